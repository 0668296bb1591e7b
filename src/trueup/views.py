"""Views of images: tensor in, tensor out. Chance comes from torch's random state, which is the adapter's own stream.

A view changes each image of a batch in its own way. Where it is known how images were normalised it works on values in
[0, 1] and stays there; else it makes only such changes as need no range, and clips nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Normalization:
    """How images were normalised before the model: (value - mean) / std of each channel, of values in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def unit(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) as values in [0, 1]."""
        mean, std = self._columns(x)
        return (x * std + mean).clamp(0, 1)

    def back(self, x: Tensor) -> Tensor:
        """Values in [0, 1] as the model takes them."""
        mean, std = self._columns(x)
        return (x.clamp(0, 1) - mean) / std

    def suits(self, x: Tensor) -> None:
        """Refuse images with another number of channels."""
        if len(self.mean) not in (1, x.shape[1]):
            raise ValueError(
                f"mean and std are of {len(self.mean)} channels, the images have {x.shape[1]}: "
                "give one number, or one for each channel"
            )

    def _columns(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.suits(x)
        mean, std = (torch.tensor(values, dtype=x.dtype, device=x.device) for values in (self.mean, self.std))
        return mean.reshape(1, -1, 1, 1), std.reshape(1, -1, 1, 1)


def make_normalization(
    mean: float | Sequence[float] | None, std: float | Sequence[float] | None
) -> Normalization | None:
    """Mean and standard deviation as given to `adapt`: one number, or one for each channel; both or neither."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise ValueError("mean and std go together: give both, or neither")
    both = _numbers("mean", mean), _numbers("std", std)
    if len(both[0]) != len(both[1]) or not both[0]:
        raise ValueError(f"mean={mean!r} and std={std!r} must have a number for each channel, as many in both")
    if not all(abs(value) < 1e6 for value in both[0]) or not all(0 < value < 1e6 for value in both[1]):
        raise ValueError(f"mean={mean!r} must be numbers and std={std!r} numbers above 0")
    return Normalization(*both)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    """One number or several, also numpy's and torch's, as Python's own."""
    plain = _plain(value)
    several = isinstance(plain, Iterable) and not isinstance(plain, str | bytes)
    parts = [_plain(part) for part in (plain if several else [plain])]
    if not all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts):
        raise ValueError(f"{name}={value!r} must be a number or one for each channel, such as 0.5 or (0.5, 0.4, 0.3)")
    return tuple(float(part) for part in parts)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@torch.no_grad()
def cotta_view(x: Tensor, pixels: Normalization | None = None, *, strength: float = 1.0) -> Tensor:
    """A strong view of each image (CoTTA, RoTTA): colours, turned, moved, scaled, blurred, mirrored by chance, noise.

    `strength` scales all of it; at 0 the images stay as they are. Colours and noise need `pixels`, contrast does not.
    """
    view = _begin(x, pixels)
    # Differs: the published code changes all images of a batch alike; here they share the order of the colours alone.
    view = _jittered(view, [(change, strength) for change in _COLOURS], pixels)
    view = _moved(view, strength, "border")
    view = _blur(view, 0.5 * strength * _chance(view))
    view = _mirrored(view, 0.5 * strength)
    if pixels is not None:
        view = view + 0.005 * strength * torch.randn(view.shape, device=x.device).to(view.dtype)
    return _end(view, x, pixels)


@torch.no_grad()
def roid_view(x: Tensor, pixels: Normalization | None = None) -> Tensor:
    """Make ROID's strong view of each image: CoTTA's without blur and noise, reflected beyond the edge."""
    view = _begin(x, pixels)
    # Differs: the published code changes all images of a batch alike; here they share the order of the colours alone.
    view = _jittered(view, [(change, 1.0) for change in _COLOURS], pixels)
    return _end(_mirrored(_moved(view, 1.0, "reflection")), x, pixels)


@torch.no_grad()
def weak_view(x: Tensor) -> Tensor:
    """A weak view of each image (AdaContrast): moved by up to a 14th of its sides, whole pixels; mirrored by chance."""
    view = _begin(x, None)
    sides = torch.tensor([view.shape[3], view.shape[2]], dtype=view.dtype, device=x.device)
    # Differs: the published code crops 224 of 256 pixels; here the edge goes on where it would see more of the image.
    shift = torch.cat([_uniform(view, 1 / 14), _uniform(view, 1 / 14)], dim=1).flatten(1)
    still = torch.eye(2, dtype=view.dtype, device=x.device).expand(len(x), 2, 2)
    return _end(_mirrored(_warp(view, still, (shift * sides).round() / sides)), x, None)


@torch.no_grad()
def moco_view(x: Tensor, pixels: Normalization | None = None, *, crop: float = 0.2) -> Tensor:
    """A strong view of each image (MoCo v2): a part of it, resized; colours, grey, blurred, mirrored, each by chance.

    The part has at least the area `crop`; 1 is the whole. Colours and grey need `pixels`, contrast does not.
    """
    view = _begin(x, pixels)
    view = _cropped(view, crop) if crop < 1 else view
    colours = ((_brightness, 1.0), (_contrast, 4 / 3), (_saturation, 0.8), (_hue, 5 / 3))  # 0.4, 0.4, 0.4, 0.1
    view = torch.where(_chance(view) < 0.8, _jittered(view, colours, pixels), view)
    if pixels is not None and view.shape[1] == 3:
        view = torch.where(_chance(view) < 0.2, _grey(view), view)
    sigma = 0.1 + 1.9 * _chance(view)
    view = _blur(view, torch.where(_chance(view) < 0.5, sigma, 0), reach=6)
    return _end(_mirrored(view), x, pixels)


@torch.no_grad()
def augmix_view(x: Tensor, pixels: Normalization | None = None, *, strength: float = 1.0) -> Tensor:
    """AugMix (Hendrycks et al., 2020): each image mixed with a mixture of three chains of one to three changes.

    A change turns, shears or moves the image by a random amount, or alters its tones; those need `pixels`, but for
    contrast. `strength`, up to 1, scales the mixture's part; at 0 the images stay as they are.
    """
    start = _begin(x, pixels)
    tones = _TONES if pixels is not None else (lambda part: _contrast(part, 1.0),)
    chains = start.repeat(3, 1, 1, 1)
    length = torch.randint(1, 4, (len(chains),), device=x.device)
    for step in range(3):
        change = torch.randint(len(_LIMITS) + len(tones), (len(chains),), device=x.device)
        change[length <= step] = -1  # none
        chains = _changed(chains, change, tones)
    # Dirichlet(1, 1, 1) weights are exponential variables over their sum; a Beta(1, 1) variable is uniform.
    weight = -torch.rand(3, len(x), 1, 1, 1, device=x.device).clamp(min=1e-12).log().to(start.dtype)
    mixture = (weight / weight.sum(dim=0) * chains.reshape(3, *start.shape)).sum(dim=0)
    return _end(start.lerp(mixture, strength * _chance(start)), x, pixels)


# What a chain may do, at most: turn, shear along either axis (radians, slopes), move (parts of a side).
_LIMITS = (math.pi / 20, 0.09, 0.09, 0.1, 0.1)


def _changed(x: Tensor, change: Tensor, tones: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Each image after its change: below 5 one of `_LIMITS`, from there on one of the tones, below 0 none."""
    x = x.clone()
    moved = (change >= 0) & (change < len(_LIMITS))
    limits = torch.tensor(_LIMITS, dtype=x.dtype, device=x.device)
    amount = F.one_hot(change.clamp(0, 4), len(_LIMITS)) * limits * _uniform(x, 1.0).flatten(1)
    angle, along, across, *_ = amount[moved].unbind(dim=1)
    matrix = torch.stack([angle.cos(), along - angle.sin(), across + angle.sin(), angle.cos()], dim=1)
    x[moved] = _warp(x[moved], matrix.reshape(-1, 2, 2), amount[moved, 3:])
    for i, tone in enumerate(tones, len(_LIMITS)):
        x[change == i] = tone(x[change == i])
    return x


def check_images(x: Tensor, pixels: Normalization | None = None) -> None:
    """Refuse what no view can be made of."""
    if x.ndim != 4:
        raise ValueError(f"a view is made of images (N, C, H, W), not of {tuple(x.shape)}: use a method without views")
    if pixels is not None:
        pixels.suits(x)


def _begin(x: Tensor, pixels: Normalization | None) -> Tensor:
    check_images(x)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if pixels is None else pixels.unit(x)


def _end(view: Tensor, x: Tensor, pixels: Normalization | None) -> Tensor:
    return (view if pixels is None else pixels.back(view)).to(x.dtype)


def _chance(x: Tensor) -> Tensor:
    """A number in [0, 1) for each image, the same in all precisions."""
    return torch.rand(len(x), 1, 1, 1, device=x.device).to(x.dtype)


def _uniform(x: Tensor, reach: float) -> Tensor:
    """A number in [-reach, reach) for each image."""
    return reach * (2 * _chance(x) - 1)


def _moved(x: Tensor, strength: float, padding: str) -> Tensor:
    """Turn images by up to 15 degrees, scale them by up to a tenth and move them by up to an eighth of their sides."""
    angle, scale = _uniform(x, strength * math.pi / 12), 1 + _uniform(x, 0.1 * strength)
    # A sixteenth of an image that was padded to twice its size.
    shift = torch.cat([_uniform(x, strength / 8), _uniform(x, strength / 8)], dim=1)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).reshape(-1, 2, 2)
    return _warp(x, turn / scale.reshape(-1, 1, 1), shift.flatten(1), padding)


def _mirrored(x: Tensor, chance: float = 0.5) -> Tensor:
    return torch.where(_chance(x) < chance, x.flip(dims=[3]), x)


def _jittered(
    x: Tensor, colours: Sequence[tuple[Callable[[Tensor, float], Tensor], float]], pixels: Normalization | None
) -> Tensor:
    """Colours changed by these strengths, in an order that all images share; without a range contrast alone."""
    jitters = [pair for pair in colours if pixels is not None or pair[0] is _contrast]
    for i in torch.randperm(len(jitters)).tolist():
        change, strength = jitters[i]
        x = change(x, strength)
        x = x.clamp(0, 1) if pixels is not None else x
    return x


def _grey(x: Tensor) -> Tensor:
    """Luminance of red, green and blue; the mean of other channels."""
    weights = [0.299, 0.587, 0.114] if x.shape[1] == 3 else [1 / x.shape[1]] * x.shape[1]
    return (x * torch.tensor(weights, dtype=x.dtype, device=x.device).reshape(1, -1, 1, 1)).sum(dim=1, keepdim=True)


def _brightness(x: Tensor, strength: float) -> Tensor:
    return x * (1 + _uniform(x, 0.4 * strength))


def _contrast(x: Tensor, strength: float) -> Tensor:
    """About each channel's mean, so that it does not matter how the channels were normalised."""
    # Differs: published code has contrast about the mean luminance of the image, one value for all channels.
    middle = x.mean(dim=(2, 3), keepdim=True)
    return middle + (x - middle) * (1 + _uniform(x, 0.3 * strength))


def _saturation(x: Tensor, strength: float) -> Tensor:
    grey = _grey(x)
    return grey + (x - grey) * (1 + _uniform(x, 0.5 * strength)) if x.shape[1] == 3 else x


def _hue(x: Tensor, strength: float) -> Tensor:
    """Colours turned about the grey axis, by up to 0.06 of a circle."""
    # Differs: published code changes the hue of HSV, which keeps a colour's largest and smallest channel.
    if x.shape[1] != 3:
        return x
    angle = _uniform(x, 2 * math.pi * 0.06 * strength).flatten()
    ones = torch.ones(3, 3, dtype=x.dtype, device=x.device) / 3
    cross = torch.tensor([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], dtype=x.dtype, device=x.device) / math.sqrt(3)
    cos, sin = angle.cos().reshape(-1, 1, 1), angle.sin().reshape(-1, 1, 1)
    turn = cos * torch.eye(3, dtype=x.dtype, device=x.device) + (1 - cos) * ones + sin * cross
    return torch.einsum("nij,njhw->nihw", turn, x)


def _gamma(x: Tensor, strength: float) -> Tensor:
    return x.clamp(min=1e-8) ** (1 + _uniform(x, 0.3 * strength))


def _autocontrast(x: Tensor) -> Tensor:
    """Each channel stretched to [0, 1]; one of a single value stays."""
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp(min=1e-8), x)


def _equalize(x: Tensor) -> Tensor:
    """Each channel's 256 levels spread so that they are about equally frequent; one of a single level stays."""
    level = (255 * x).round().long().flatten(2)
    count = torch.zeros(*x.shape[:2], 256, dtype=x.dtype, device=x.device)
    below = count.scatter_add_(2, level, torch.ones_like(level, dtype=x.dtype)).cumsum(dim=2)
    low, rank = below.gather(2, level.amin(dim=2, keepdim=True)), below.gather(2, level)
    spread = (rank - low) / (level.shape[2] - low).clamp(min=1)
    return torch.where(low < level.shape[2], spread, x.flatten(2)).reshape(x.shape)


def _posterize(x: Tensor) -> Tensor:
    levels = torch.randint(8, 17, (len(x), 1, 1, 1), device=x.device)
    return (x * levels).floor().clamp(max=levels - 1) / (levels - 1)


def _solarize(x: Tensor) -> Tensor:
    """What is brighter than some value is turned into its negative."""
    return torch.where(x > 1 - 0.3 * _chance(x), 1 - x, x)


_COLOURS = (_brightness, _contrast, _saturation, _hue, _gamma)
_TONES = (_autocontrast, _equalize, _posterize, _solarize)


def _warp(x: Tensor, matrix: Tensor, shift: Tensor, padding: str = "border") -> Tensor:
    """Images seen through maps (N, 2, 2) of pixels about the middle, and shifts (N, 2) in parts of the sides.

    Beyond the image its edge goes on; with the padding "reflection" the image is mirrored there, the edge seen once.
    """
    if not len(x):
        return x
    height, width = x.shape[2:]
    sides = torch.tensor([[1.0, height / width], [width / height, 1.0]], dtype=x.dtype, device=x.device)
    theta = torch.cat([matrix * sides, 2 * shift.unsqueeze(2)], dim=2)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    centres = padding == "reflection"  # torch mirrors at the centres of the edge's pixels only if 1 stands for these
    if centres:
        grid = grid * torch.tensor(
            [side / max(1, side - 1) for side in (width, height)], dtype=x.dtype, device=x.device
        )
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=centres)


def _cropped(x: Tensor, least: float) -> Tensor:
    """Parts of images, of at least this area and a shape from 3:4 to 4:3 in pixels, as large as the images."""
    height, width = x.shape[2:]
    area, shape = 1 - (1 - least) * _chance(x), torch.exp(_uniform(x, math.log(4 / 3)))
    # Differs: the published code draws again where a part would be wider or higher than the image.
    sides = [(area * shape * height / width).sqrt(), (area / shape * width / height).sqrt()]
    part = torch.cat(sides, dim=1).flatten(1).clamp(max=1)
    away = torch.cat([_uniform(x, 0.5), _uniform(x, 0.5)], dim=1).flatten(1)
    return _warp(x, torch.diag_embed(part), (1 - part) * away)


def _blur(x: Tensor, sigma: Tensor, reach: int = 2) -> Tensor:
    """A Gaussian of a width (N, 1, 1, 1) for each image, over so many pixels each way."""
    away = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device).reshape(-1, 1, 1, 1, 1)
    taps = torch.exp(-away.square() / (2 * sigma.clamp(min=1e-3).square()))
    taps = taps / taps.sum(dim=0)
    height, width = x.shape[2:]
    tall = F.pad(x, (0, 0, reach, reach), mode="replicate")
    x = sum((taps[i] * tall[:, :, i : i + height] for i in range(len(taps))), torch.zeros_like(x))
    wide = F.pad(x, (reach, reach, 0, 0), mode="replicate")
    return sum((taps[i] * wide[:, :, :, i : i + width] for i in range(len(taps))), torch.zeros_like(x))
