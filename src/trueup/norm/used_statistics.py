"""A record of the moments that BatchNorm layers normalised with, for `unwrap()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.norm.base import NormPolicy, batchnorms

DECAY = 0.9  # the weight of all earlier images after a batch of WHOLE images; closer to 1 after a smaller one
WHOLE = 64
PART = 2**18  # values whose squares are summed at a time: few enough for a processor's cache
Call = tuple[_BatchNorm, Tensor, Tensor, int]  # a layer, the mean and variance it used, and the number of images


class UsedStatistics(NormPolicy):
    """A policy that records the moments it normalises with, pooled over batches; older ones count for less and less.

    With w images so far, n new ones, r = n / (k w + n), where k = 0.9 to the power of min(1, n / 64), and d the
    distance of the means: mean += r d, and variance = (1 - r) variance + r (new variance + (1 - r) d²), the variance
    of the mixture. No answer depends on the record.
    """

    mean: Tensor
    variance: Tensor
    images: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sizes: list[int] = []
        self.calls: list[Call] | None = None  # of the forward that is running, if it updates

    def restart(self, model: nn.Module, **task: Any) -> None:
        """Start an empty record."""
        super().restart(model, **task)
        layers = batchnorms(model)
        self.sizes = [layer.num_features for layer in layers]
        like = next((layer.running_mean for layer in layers if layer.running_mean is not None), torch.empty(0))
        dtype = torch.promote_types(like.dtype, torch.float32)
        for name in ("mean", "variance", "images"):
            self.register_buffer(name, torch.zeros(sum(self.sizes), dtype=dtype, device=like.device))

    @contextmanager
    def forward_pass(self, model: nn.Module, *, update: bool) -> Iterator[None]:
        """Record the moments of a forward that updates."""
        calls = self.calls = [] if update and self._buffers else None
        try:
            with self.active(model):
                yield
        finally:
            self.calls = None
        if calls:
            self.add(batchnorms(model), calls)

    @torch.no_grad()
    def add(self, layers: Sequence[_BatchNorm], calls: Sequence[Call]) -> None:
        """Add the calls of one forward; a layer that ran several times counts as often."""
        waiting: dict[_BatchNorm, list[Call]] = {layer: [] for layer in layers}
        for call in calls:
            waiting[call[0]].append(call)
        while any(waiting.values()):
            now = [waiting[layer].pop(0) if waiting[layer] else _nothing(layer, self.mean) for layer in layers]
            counts = [call[3] for call in now]
            if len(set(counts)) == 1:  # a tensor that needs no copy from the host
                images = torch.full_like(self.images, counts[0])
            else:
                images = torch.tensor(counts).repeat_interleave(torch.tensor(self.sizes)).to(self.images)
            means, variances = [call[1].to(self.mean) for call in now], [call[2].to(self.mean) for call in now]
            self._pool(torch.cat(means), torch.cat(variances), images)

    def _pool(self, mean: Tensor, variance: Tensor, images: Tensor) -> None:
        """Add one batch; a channel that did not run, or whose moments are not finite, is left as it is."""
        fine = mean.isfinite() & variance.isfinite() & (images > 0)
        total = DECAY ** (images / WHOLE).clamp(max=1) * self.images + images
        rate = torch.where(fine, images / total, 0)
        away = torch.where(fine, mean - self.mean, 0)
        new = torch.where(fine, variance, 0) + (1 - rate) * away.square()
        self.mean.add_(rate * away)
        self.variance.copy_((1 - rate) * self.variance + rate * new)
        self.images.copy_(torch.where(fine, total, self.images))

    def by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the moments under the names of the layers' running statistics; of channels without, the layer's."""
        names = {layer: path for path, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
        found: dict[str, Tensor] = {}
        parts = zip(*(t.split(self.sizes) for t in (self.mean, self.variance, self.images)), strict=True)
        for layer, (mean, variance, images) in zip(batchnorms(model), parts, strict=True):
            prefix = f"{names[layer]}." if names[layer] else ""
            for name, new in (("running_mean", mean), ("running_var", variance)):
                found[prefix + name] = torch.where(images > 0, new, getattr(layer, name).to(new))
        return found

    @property
    def empty(self) -> bool:
        """Return True if nothing was recorded although there are layers that could."""
        return bool(self.sizes) and not bool(self.images.any())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to its device and to higher precision, never to lower."""

        def widen(t: Tensor) -> Tensor:
            new = fn(t)
            return new if torch.promote_types(t.dtype, new.dtype) == new.dtype else t.to(new.device)

        return super()._apply(widen, recurse)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance per channel of a batch (N, C, ...), at least in float32.

    On a processor by parts: `torch.var_mean` takes several times as long there, and needs no less care with memory.
    """
    dims, wide = [d for d in range(x.ndim) if d != 1], torch.promote_types(x.dtype, torch.float32)
    if x.device.type != "cpu":
        variance, mean = torch.var_mean(x.to(wide), dim=dims, correction=0)
        return mean, variance
    mean = x.mean(dim=dims, dtype=wide)
    middle, total = mean.view(1, -1, *[1] * (x.ndim - 2)), torch.zeros_like(mean)
    for part in x.split(max(1, PART * len(x) // x.numel())):
        total += (part - middle).square_().sum(dim=dims)
    return mean, total / (x.numel() // x.shape[1])


def _nothing(layer: _BatchNorm, like: Tensor) -> Call:
    zero = like.new_zeros(layer.num_features)
    return layer, zero, zero, 0
