"""Random views of images, tensor in, tensor out; random numbers come from torch's generators.

A view changes each image of a batch in its own way. With a `Normalization` it works on values in [0, 1] and clips to
them; without, it makes only changes that need no range, and clips nothing.
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
    """The normalisation of images before the model: (value - mean) / std of each channel, of values in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to_unit(self, x: Tensor) -> Tensor:
        """Convert normalised images (N, C, H, W) to values in [0, 1]."""
        mean, std = self._columns(x)
        return (x * std + mean).clamp(0, 1)

    def from_unit(self, x: Tensor) -> Tensor:
        """Normalise values in [0, 1]."""
        mean, std = self._columns(x)
        return (x.clamp(0, 1) - mean) / std

    def check_channels(self, x: Tensor) -> None:
        """Refuse images with another number of channels."""
        if len(self.mean) not in (1, x.shape[1]):
            raise ValueError(
                f"mean and std are of {len(self.mean)} channels, the images have {x.shape[1]}: "
                "give one number, or one per channel"
            )

    def _columns(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.check_channels(x)
        mean, std = (torch.tensor(values, dtype=x.dtype, device=x.device) for values in (self.mean, self.std))
        return mean.reshape(1, -1, 1, 1), std.reshape(1, -1, 1, 1)


def make_normalization(
    mean: float | Sequence[float] | None, std: float | Sequence[float] | None
) -> Normalization | None:
    """Check mean and std as given to `adapt`: one number or one per channel, both or neither."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise ValueError("mean and std go together: give both, or neither")
    both = _numbers("mean", mean), _numbers("std", std)
    if len(both[0]) != len(both[1]) or not both[0]:
        raise ValueError(f"mean={mean!r} and std={std!r} must have one number per channel, equally many in both")
    if not all(abs(value) < 1e6 for value in both[0]) or not all(0 < value < 1e6 for value in both[1]):
        raise ValueError(f"mean={mean!r} must be numbers and std={std!r} numbers above 0")
    return Normalization(*both)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    """Convert one number or several, also of numpy or torch, to floats."""
    plain = _plain(value)
    several = isinstance(plain, Iterable) and not isinstance(plain, str | bytes)
    parts = [_plain(part) for part in (plain if several else [plain])]
    if not all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts):
        raise ValueError(f"{name}={value!r} must be a number or one per channel, such as 0.5 or (0.5, 0.4, 0.3)")
    return tuple(float(part) for part in parts)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@torch.no_grad()
def cotta_view(x: Tensor, normalization: Normalization | None = None, *, strength: float = 1.0) -> Tensor:
    """Make CoTTA's and RoTTA's strong view of each image: colour jitter, affine, blur, random flip and noise.

    `strength` scales all of it; 0 changes nothing. Without `normalization` contrast is the only colour change, and
    there is no noise.
    """
    view = _color_jitter(_to_float(x, normalization), [(change, strength) for change in _COLORS], normalization)
    view = _random_affine(view, strength, "border")
    view = _blur(view, 0.5 * strength * _random(view))
    view = _random_flip(view, 0.5 * strength)
    if normalization is not None:
        view = view + 0.005 * strength * torch.randn(view.shape, device=x.device).to(view.dtype)
    return _from_float(view, x, normalization)


@torch.no_grad()
def roid_view(x: Tensor, normalization: Normalization | None = None) -> Tensor:
    """Make ROID's strong view of each image: CoTTA's without blur and noise, with reflection padding."""
    view = _color_jitter(_to_float(x, normalization), [(change, 1.0) for change in _COLORS], normalization)
    return _from_float(_random_flip(_random_affine(view, 1.0, "reflection")), x, normalization)


@torch.no_grad()
def weak_view(x: Tensor) -> Tensor:
    """Make AdaContrast's weak view of each image: a shift by up to 1/14 of its sides, in whole pixels; random flip."""
    view = _to_float(x, None)
    sides = torch.tensor([view.shape[3], view.shape[2]], dtype=view.dtype, device=x.device)
    # Differs: the published code crops 224 of 256 pixels; here the edge is repeated where a crop would show more.
    shift = torch.cat([_uniform(view, 1 / 14), _uniform(view, 1 / 14)], dim=1).flatten(1)
    identity = torch.eye(2, dtype=view.dtype, device=x.device).expand(len(x), 2, 2)
    return _from_float(_random_flip(_warp(view, identity, (shift * sides).round() / sides)), x, None)


@torch.no_grad()
def moco_view(x: Tensor, normalization: Normalization | None = None, *, crop: float = 0.2) -> Tensor:
    """Make MoCo v2's strong view of each image: a resized crop; random colour jitter, grayscale, blur and flip.

    The crop has at least the area `crop`; 1 crops nothing. Without `normalization` contrast is the only colour change.
    """
    view = _to_float(x, normalization)
    view = _random_crop(view, crop) if crop < 1 else view
    changes = ((_brightness, 1.0), (_contrast, 4 / 3), (_saturation, 0.8), (_hue, 5 / 3))  # 0.4, 0.4, 0.4, 0.1
    view = torch.where(_random(view) < 0.8, _color_jitter(view, changes, normalization), view)
    if normalization is not None and view.shape[1] == 3:
        view = torch.where(_random(view) < 0.2, _grey(view), view)
    sigma = 0.1 + 1.9 * _random(view)
    view = _blur(view, torch.where(_random(view) < 0.5, sigma, 0), radius=6)
    return _from_float(_random_flip(view), x, normalization)


@torch.no_grad()
def augmix_view(x: Tensor, normalization: Normalization | None = None, *, strength: float = 1.0) -> Tensor:
    """Make AugMix's view of each image (Hendrycks et al., 2020): mix it with three chains of one to three changes.

    A change rotates, shears or shifts the image by a random amount, or alters its tones. Without `normalization`
    contrast is the only tone change. `strength`, up to 1, scales the chains' share; 0 changes nothing.
    """
    start = _to_float(x, normalization)
    tones = _TONES if normalization is not None else (lambda part: _contrast(part, 1.0),)
    chains = start.repeat(3, 1, 1, 1)
    length = torch.randint(1, 4, (len(chains),), device=x.device)
    for step in range(3):
        change = torch.randint(len(_LIMITS) + len(tones), (len(chains),), device=x.device)
        change[length <= step] = -1  # no change
        chains = _augmix_step(chains, change, tones)
    # Dirichlet(1, 1, 1) weights are exponential variables divided by their sum; Beta(1, 1) is uniform.
    weight = -torch.rand(3, len(x), 1, 1, 1, device=x.device).clamp(min=1e-12).log().to(start.dtype)
    mixture = (weight / weight.sum(dim=0) * chains.reshape(3, *start.shape)).sum(dim=0)
    return _from_float(start.lerp(mixture, strength * _random(start)), x, normalization)


# Largest affine changes of a chain: rotation in radians, slopes of shears, shifts as parts of the sides.
_LIMITS = (math.pi / 20, 0.09, 0.09, 0.1, 0.1)


def _augmix_step(x: Tensor, change: Tensor, tones: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Apply one change to each image: 0 to 4 are affine, by up to `_LIMITS`; then come the tones; -1 is none."""
    x = x.clone()
    affine = (change >= 0) & (change < len(_LIMITS))
    limits = torch.tensor(_LIMITS, dtype=x.dtype, device=x.device)
    amount = F.one_hot(change.clamp(0, 4), len(_LIMITS)) * limits * _uniform(x, 1.0).flatten(1)
    angle, shear_x, shear_y, *_ = amount[affine].unbind(dim=1)
    matrix = torch.stack([angle.cos(), shear_x - angle.sin(), shear_y + angle.sin(), angle.cos()], dim=1)
    x[affine] = _warp(x[affine], matrix.reshape(-1, 2, 2), amount[affine, 3:])
    for i, tone in enumerate(tones, len(_LIMITS)):
        x[change == i] = tone(x[change == i])
    return x


def check_images(x: Tensor, normalization: Normalization | None = None) -> None:
    """Refuse input that views cannot be made of."""
    if x.ndim != 4:
        raise ValueError(f"views are made of images (N, C, H, W), not of {tuple(x.shape)}: use a method without views")
    if normalization is not None:
        normalization.check_channels(x)


def _to_float(x: Tensor, normalization: Normalization | None) -> Tensor:
    check_images(x)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if normalization is None else normalization.to_unit(x)


def _from_float(view: Tensor, x: Tensor, normalization: Normalization | None) -> Tensor:
    return (view if normalization is None else normalization.from_unit(view)).to(x.dtype)


def _random(x: Tensor) -> Tensor:
    """Draw a number in [0, 1) for each image, the same in all precisions."""
    return torch.rand(len(x), 1, 1, 1, device=x.device).to(x.dtype)


def _uniform(x: Tensor, limit: float) -> Tensor:
    """Draw a number in [-limit, limit) for each image."""
    return limit * (2 * _random(x) - 1)


def _random_affine(x: Tensor, strength: float, padding: str) -> Tensor:
    """Rotate images by up to 15 degrees, scale them by up to 10 % and shift them by up to 1/8 of their sides."""
    angle, scale = _uniform(x, strength * math.pi / 12), 1 + _uniform(x, 0.1 * strength)
    # 1/8 is 1/16 of an image padded to twice its size, as published.
    shift = torch.cat([_uniform(x, strength / 8), _uniform(x, strength / 8)], dim=1)
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).reshape(-1, 2, 2)
    return _warp(x, rotation / scale.reshape(-1, 1, 1), shift.flatten(1), padding)


def _random_flip(x: Tensor, probability: float = 0.5) -> Tensor:
    return torch.where(_random(x) < probability, x.flip(dims=[3]), x)


def _color_jitter(
    x: Tensor, changes: Sequence[tuple[Callable[[Tensor, float], Tensor], float]], normalization: Normalization | None
) -> Tensor:
    """Change colours by these strengths, in an order that all images share; without normalization only contrast."""
    # Differs: CoTTA's and ROID's code changes all images alike; here they share only the order of colour changes.
    changes = [pair for pair in changes if normalization is not None or pair[0] is _contrast]
    for i in torch.randperm(len(changes)).tolist():
        change, strength = changes[i]
        x = change(x, strength)
        x = x.clamp(0, 1) if normalization is not None else x
    return x


def _grey(x: Tensor) -> Tensor:
    """Return the luminance of RGB images; the mean over channels of others."""
    weights = [0.299, 0.587, 0.114] if x.shape[1] == 3 else [1 / x.shape[1]] * x.shape[1]
    return (x * torch.tensor(weights, dtype=x.dtype, device=x.device).reshape(1, -1, 1, 1)).sum(dim=1, keepdim=True)


def _brightness(x: Tensor, strength: float) -> Tensor:
    return x * (1 + _uniform(x, 0.4 * strength))


def _contrast(x: Tensor, strength: float) -> Tensor:
    """Change contrast around each channel's mean, so that the normalisation does not matter."""
    # Differs: published code changes contrast around the mean luminance of the image, one value for all channels.
    mean = x.mean(dim=(2, 3), keepdim=True)
    return mean + (x - mean) * (1 + _uniform(x, 0.3 * strength))


def _saturation(x: Tensor, strength: float) -> Tensor:
    grey = _grey(x)
    return grey + (x - grey) * (1 + _uniform(x, 0.5 * strength)) if x.shape[1] == 3 else x


def _hue(x: Tensor, strength: float) -> Tensor:
    """Rotate colours around the grey axis by up to 0.06 of a full turn."""
    # Differs: published code changes the hue of HSV, which keeps a colour's largest and smallest channel.
    if x.shape[1] != 3:
        return x
    angle = _uniform(x, 2 * math.pi * 0.06 * strength).flatten()
    ones = torch.ones(3, 3, dtype=x.dtype, device=x.device) / 3
    cross = torch.tensor([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], dtype=x.dtype, device=x.device) / math.sqrt(3)
    cos, sin = angle.cos().reshape(-1, 1, 1), angle.sin().reshape(-1, 1, 1)
    rotation = cos * torch.eye(3, dtype=x.dtype, device=x.device) + (1 - cos) * ones + sin * cross
    return torch.einsum("nij,njhw->nihw", rotation, x)


def _gamma(x: Tensor, strength: float) -> Tensor:
    return x.clamp(min=1e-8) ** (1 + _uniform(x, 0.3 * strength))


def _autocontrast(x: Tensor) -> Tensor:
    """Stretch each channel to [0, 1]; constant channels do not change."""
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp(min=1e-8), x)


def _equalize(x: Tensor) -> Tensor:
    """Equalise the histogram of each channel, over 256 levels; constant channels do not change."""
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
    """Invert values above a random threshold."""
    return torch.where(x > 1 - 0.3 * _random(x), 1 - x, x)


_COLORS = (_brightness, _contrast, _saturation, _hue, _gamma)
_TONES = (_autocontrast, _equalize, _posterize, _solarize)


def _warp(x: Tensor, matrix: Tensor, shift: Tensor, padding: str = "border") -> Tensor:
    """Warp images by linear maps (N, 2, 2) around the centre, in pixels, and shifts (N, 2) in parts of the sides.

    Outside the image the padding "border" repeats the edge; "reflection" mirrors the image without repeating the edge.
    """
    if not len(x):
        return x
    height, width = x.shape[2:]
    sides = x.new_tensor([[1.0, height / width], [width / height, 1.0]])
    theta = torch.cat([matrix * sides, 2 * shift.unsqueeze(2)], dim=2)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    reflect = padding == "reflection"  # torch mirrors at the centres of edge pixels only with align_corners=True
    if reflect:
        grid = grid * x.new_tensor([side / max(1, side - 1) for side in (width, height)])
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=reflect)


def _random_crop(x: Tensor, min_area: float) -> Tensor:
    """Crop images to at least this area and an aspect ratio from 3:4 to 4:3; resize to the old size."""
    height, width = x.shape[2:]
    area, ratio = 1 - (1 - min_area) * _random(x), torch.exp(_uniform(x, math.log(4 / 3)))
    # Differs: the published code draws again if a crop would be wider or higher than the image.
    sides = [(area * ratio * height / width).sqrt(), (area / ratio * width / height).sqrt()]
    size = torch.cat(sides, dim=1).flatten(1).clamp(max=1)
    shift = torch.cat([_uniform(x, 0.5), _uniform(x, 0.5)], dim=1).flatten(1)
    return _warp(x, torch.diag_embed(size), (1 - size) * shift)


def _blur(x: Tensor, sigma: Tensor, radius: int = 2) -> Tensor:
    """Blur each image with a Gaussian of its own sigma (N, 1, 1, 1), over `radius` pixels each way."""
    offset = torch.arange(-radius, radius + 1, dtype=x.dtype, device=x.device).reshape(-1, 1, 1, 1, 1)
    kernel = torch.exp(-offset.square() / (2 * sigma.clamp(min=1e-3).square()))
    kernel = kernel / kernel.sum(dim=0)
    for dim, pad in ((2, (0, 0, radius, radius)), (3, (radius, radius, 0, 0))):
        wide, start = F.pad(x, pad, mode="replicate"), torch.zeros_like(x)
        x = sum((kernel[i] * wide.narrow(dim, i, x.shape[dim]) for i in range(len(kernel))), start)
    return x
