"""Statistics of the batch, or a mixture of the source's and the batch's, and a record of them for `unwrap()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.norm.base import (
    Moments,
    NormPolicy,
    Statistics,
    batchnorms,
    biased_moments,
    mixed,
    own_statistics,
    replacing_statistics,
    set_statistics,
)

DECAY = 0.9  # the weight of all earlier images after a batch of WHOLE images; closer to 1 after a smaller one
WHOLE = 64
PART = 2**18  # values whose squares are summed at a time: few enough for a processor's cache
Call = tuple[Tensor, Tensor, int]  # the mean and variance that a layer used, and the number of images


class BatchPolicy(NormPolicy):
    """The statistics of the batch, through which the gradient flows.

    It records the moments used, pooled over batches. With w images so far, n new ones, r = n / (k w + n), where k = 0.9
    to the power of min(1, n / 64), and d the distance of the means: mean += r d, and variance = (1 - r) variance
    + r (new variance + (1 - r) d²), the variance of the mixture. No answer depends on the record.
    """

    compilable = True
    mean: Tensor
    variance: Tensor
    images: Tensor
    _sizes: Sequence[int] = ()  # channels of the layers

    def statistics(self, own: Moments, x: Tensor) -> Statistics:
        """Return what a layer normalises its input with."""
        return None, None

    def following(self, model: nn.Module) -> AbstractContextManager[None]:
        """Replace the layers' statistics call by call, and note those used in a forward that updates."""

        def choose(layer: _BatchNorm, own: Moments, x: Tensor) -> Statistics:
            if self.few(x):
                return own
            mean, variance = self.statistics(own, x)
            if self.seen is not None:
                used = batch_moments(x) if mean is None or variance is None else (mean, variance)
                self.seen.setdefault(layer, []).append((*used, len(x)))
            return mean, variance

        return replacing_statistics(model, choose)

    @contextmanager
    def in_graph(self, model: nn.Module) -> Iterator[None]:
        """Let every layer use the batch's statistics; nothing is recorded."""
        own = {layer: own_statistics(layer) for layer in batchnorms(model)}
        for layer in own:
            set_statistics(layer, (None, None))
        try:
            yield
        finally:
            for layer in own:
                set_statistics(layer, own[layer])

    # The record

    def restart(self, model: nn.Module, **task: Any) -> None:
        """Start an empty record."""
        super().restart(model, **task)
        layers = batchnorms(model)
        self._sizes = [layer.num_features for layer in layers]
        like = own_statistics(layers[0])[0] if layers else torch.empty(0)
        dtype = torch.promote_types(like.dtype, torch.float32)
        for name in ("mean", "variance", "images"):
            self.register_buffer(name, torch.zeros(sum(self._sizes), dtype=dtype, device=like.device))

    @torch.no_grad()
    def remember(self, model: nn.Module, seen: dict[_BatchNorm, list[Call]]) -> None:
        """Record the calls of one forward; a layer that ran several times counts as often."""
        if not self._buffers:  # a model without an adapter
            return
        calls = [list(seen.get(layer, ())) for layer in batchnorms(model)]
        zeros = [self.mean.new_zeros(size) for size in self._sizes]
        while any(calls):
            now = [each.pop(0) if each else (zero, zero, 0) for each, zero in zip(calls, zeros, strict=True)]
            counts = [call[2] for call in now]
            if len(set(counts)) == 1:  # a tensor that needs no copy from the host
                images = torch.full_like(self.images, counts[0])
            else:
                images = torch.tensor(counts).repeat_interleave(torch.tensor(self._sizes)).to(self.images)
            means, variances = [call[0].to(self.mean) for call in now], [call[1].to(self.mean) for call in now]
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
        if not self._buffers:  # before the first batch
            return found
        parts = zip(*(t.split(self._sizes) for t in (self.mean, self.variance, self.images)), strict=True)
        for layer, (mean, variance, images) in zip(batchnorms(model), parts, strict=True):
            prefix = f"{names[layer]}." if names[layer] else ""
            for name, new in (("running_mean", mean), ("running_var", variance)):
                found[prefix + name] = torch.where(images > 0, new, getattr(layer, name).to(new))
        return found

    @property
    def empty(self) -> bool:
        """Return True if nothing was recorded although there are layers that could."""
        return bool(self._sizes) and not bool(self.images.any())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to its device and to higher precision, never to lower."""

        def widen(t: Tensor) -> Tensor:
            new = fn(t)
            return new if torch.promote_types(t.dtype, new.dtype) == new.dtype else t.to(new.device)

        return super()._apply(widen, recurse)  # type: ignore[no-any-return, no-untyped-call]


class MixPolicy(BatchPolicy):
    """A mixture of the source's statistics and the batch's, as constants; the number is the batch's part."""

    default, largest, compilable = 0.1, 1.0, False

    def statistics(self, own: Moments, x: Tensor) -> Statistics:
        """Move from the source's statistics towards the batch's."""
        return mixed(own, biased_moments(x), self.part(len(x)))

    def part(self, images: int) -> float:
        """Return the part of a batch of so many images."""
        return self.number


class PriorPolicy(MixPolicy):
    """A mixture in which the source's statistics count for a number of images (Schneider et al., 2020)."""

    default, largest = 16.0, 1e6

    def part(self, images: int) -> float:
        """Return the part of a batch of so many images."""
        return images / (images + self.number)


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
