"""Statistics that no batch, class or intruder can move far: the "robust" policy of BatchNorm layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

RATE = 0.1 / 64  # how far one image moves the estimates: 64 of them as far as a batch moves those of "ema"
ANCHOR = 0.1  # the source's part in what the estimates move to
LEAST = 16  # images that a batch needs to be learnt from with statistics of its own
REACH = 4.0  # deviations from the estimates that an image may pull at
FAR = 9.0  # median absolute deviations from the others
MEMORY = 64  # images over which the shares of classes are reckoned
Moments = tuple[Tensor, Tensor]  # of each image (N, C): mean and biased variance per channel
Rows = dict[_BatchNorm, Moments]


class Robust(nn.Module):
    """Running estimates of the moments of activations, in the layers' own buffers; here is what else they need.

    An image is normalised with the estimates as they stood before its batch, so the answer to it does not depend on
    what else is in the batch. Afterwards each image moves the estimates a little: less where its predicted class has
    been frequent, so that a run of one class does not drag them along, and never all the way from the source's.
    """

    shares: Tensor

    def __init__(self, model: nn.Module, classes: int | None) -> None:
        """classes: of an image; None where pixels are classified, or an image may have several labels."""
        super().__init__()
        count = classes or 0
        layers = _layers(model)
        self.layers = len(layers)
        like = next((layer.running_mean for layer in layers if layer.running_mean is not None), torch.empty(0))
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.register_buffer("shares", torch.full((count,), 1 / max(1, count), dtype=dtype, device=like.device))
        for i, layer in enumerate(layers):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            self.register_buffer(f"mean{i}", layer.running_mean.clone(), persistent=False)
            self.register_buffer(f"variance{i}", layer.running_var.clone(), persistent=False)

    @torch.no_grad()
    def learn(self, model: nn.Module, rows: Rows, logits: Tensor) -> None:
        """Move the estimates to the usual images of a batch; nothing moves where a value is not finite."""
        fit, n = inlier_rows(rows, len(logits)), len(logits)
        if not bool(fit.any()):
            return
        rows = {layer: (m[fit], v[fit]) if len(m) == n else (m, v) for layer, (m, v) in rows.items()}
        logits = logits[fit]
        weights = self._weights(logits)
        total = weights.sum()
        rate = 1 - (1 - RATE) ** total
        new = [self._moved(i, layer, rows, weights / total, rate) for i, layer in enumerate(_layers(model))]
        if not all(bool(t.isfinite().all()) for moments in new for t in moments):
            return
        for layer, (mean, variance) in zip(_layers(model), new, strict=True):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)
        if len(self.shares):
            self.shares.copy_(self._shares(logits))

    def _shares(self, logits: Tensor) -> Tensor:
        """How often each class was predicted lately, with this batch."""
        classes = torch.nn.functional.one_hot(logits.argmax(dim=1), logits.shape[1]).to(self.shares)
        return self.shares.lerp(classes.mean(dim=0), 1 - (1 - 1 / MEMORY) ** len(logits))

    def _weights(self, logits: Tensor) -> Tensor:
        """One for an image of a class that is not too frequent, and wherever an image has no one class."""
        if not len(self.shares):
            return self.shares.new_ones(len(logits))
        shares = self._shares(logits)
        return (1 / (len(shares) * shares[logits.argmax(dim=1)])).clamp(max=1)

    def _moved(self, i: int, layer: _BatchNorm, rows: Rows, weights: Tensor, rate: Tensor) -> Moments:
        """The estimates of a layer after the batch: of a mixture of the old ones, the source's and the images'."""
        assert layer.running_mean is not None
        assert layer.running_var is not None
        old = layer.running_mean, layer.running_var
        if layer not in rows:  # it did not run
            return old
        mean, variance = _clipped(*(t.to(self.shares) for t in (*rows[layer], *old)))
        means = torch.stack([old[0].to(mean), self.get_buffer(f"mean{i}").to(mean), *mean.unbind()])
        variances = torch.stack([old[1].to(mean), self.get_buffer(f"variance{i}").to(mean), *variance.unbind()])
        if len(weights) != len(mean):  # a model that makes several rows of an image, or folds its frames into the batch
            weights = mean.new_full((len(mean),), 1 / len(mean))
        parts = torch.cat([torch.stack([1 - rate, rate * ANCHOR]), rate * (1 - ANCHOR) * weights]).unsqueeze(1)
        middle = (parts * means).sum(dim=0)
        return middle, (parts * (variances + (means - middle).square())).sum(dim=0)


def _clipped(mean: Tensor, variance: Tensor, middle: Tensor, spread: Tensor) -> Moments:
    """Moments of images no farther from the estimates than REACH deviations: one glaring image must not swamp them."""
    spread = spread.clamp(min=float(spread.mean()))  # a channel that was hardly used may well come to be
    reach = REACH * spread.sqrt()
    return mean.clamp(middle - reach, middle + reach), variance.clamp(max=REACH**2 * spread)


@torch.no_grad()
def inlier_rows(rows: Rows, n: int) -> Tensor:
    """Which of n images are like the others in what the layers see of them; all, where they are too few to tell.

    An image is set aside if in any layer its mean activations, or its variances, are farther from those of the batch
    than its median by 9 median absolute deviations: images crafted to move the statistics of others have to be.
    """
    layers = [moments for moments in rows.values() if len(moments[0]) == n]
    device = next(iter(rows.values()))[0].device if rows else torch.device("cpu")
    if n < LEAST or not layers:
        return torch.ones(n, dtype=torch.bool, device=device)
    away = []
    for mean, variance in layers:
        middle, spread = mean.median(dim=0).values, variance.mean(dim=0) + 1e-5
        away.append(((mean - middle).abs() / spread.sqrt()).mean(dim=1))
        away.append(((variance + 1e-5) / spread).log().abs().mean(dim=1))
    scores = torch.stack(away)
    above = scores - scores.median(dim=1, keepdim=True).values
    return (above <= FAR * above.abs().median(dim=1, keepdim=True).values.clamp(min=0.01)).all(dim=0)


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


@contextmanager
def recording_rows(model: nn.Module) -> Iterator[Rows]:
    """The moments of each image in what the BatchNorm layers see, collected while a forward runs."""
    rows: Rows = {}

    def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, _BatchNorm)
        x = args[0].detach().to(torch.promote_types(args[0].dtype, torch.float32))
        x = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
        variance, mean = torch.var_mean(x, dim=2, correction=0)
        rows[layer] = (mean, variance)

    handles = [layer.register_forward_pre_hook(note) for layer in _layers(model)]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()
