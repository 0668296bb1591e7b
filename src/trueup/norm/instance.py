"""Instance-aware normalisation (NOTE): an image keeps its own moments where they are far from the estimates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.norm.base import Moments, NormPolicy, batchnorms, own_statistics
from trueup.norm.ema import refuse_not_finite

RATE = 0.01  # how far an updating forward moves the estimates


class InstancePolicy(NormPolicy):
    """Running estimates, corrected for each image; the number is how many deviations stay uncorrected.

    Where `centred`, images are corrected from the batch's moments instead, as in training.
    """

    default = 4.0
    remembers = True
    recomputable = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen: dict[_BatchNorm, Moments] | None = None  # moments in the forward that is running, if it updates

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Replace the layers' answers."""
        handles = [layer.register_forward_hook(self._normalize) for layer in batchnorms(model)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def forward_pass(self, model: nn.Module, *, update: bool) -> Iterator[None]:
        """Move the estimates to the batch's moments after a forward that updates."""
        seen = self._seen = {} if update else None
        try:
            with self.active(model):
                yield
        finally:
            self._seen = None
        if seen:
            _move(seen)

    def _normalize(self, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        assert isinstance(layer, _BatchNorm)
        x = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
        mean, variance = (t.to(x) for t in own_statistics(layer))
        if (self._seen is not None or self.centred) and x.numel() > x.shape[1]:
            own = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], correction=1)
            if self._seen is not None:
                self._seen[layer] = (own[1].detach(), own[0].detach())
            if self.centred:
                variance, mean = own
        mean, variance = corrected(x, mean, variance, layer.eps, self.number)
        y = (x - mean) * torch.rsqrt(variance + layer.eps)
        shape = (1, -1, *[1] * (x.ndim - 2))
        if layer.weight is not None:
            y = y * layer.weight.to(x).reshape(shape)
        if layer.bias is not None:
            y = y + layer.bias.to(x).reshape(shape)
        return y.to(out.dtype)


def corrected(x: Tensor, mean: Tensor, variance: Tensor, eps: float, reach: float) -> tuple[Tensor, Tensor]:
    """Return the moments to normalise each image (N, C, ...) with, of shape (N, C, 1, ...) or (1, C).

    An image's own moments are those of a sample of L pixels, so they scatter: the mean by sqrt(variance / L), the
    variance by variance · sqrt(2 / (L - 1)). Differences within `reach` such deviations are chance, and are left out.
    """
    shape, pixels = (1, -1, *[1] * (x.ndim - 2)), x[0, 0].numel()
    mean, variance = mean.reshape(shape), variance.reshape(shape)
    if pixels <= 1:
        return mean, variance
    own_variance, own_mean = torch.var_mean(x, dim=list(range(2, x.ndim)), keepdim=True, correction=1)
    chance_mean = ((variance + eps) / pixels).sqrt()
    chance_variance = (variance + eps) * (2 / (pixels - 1)) ** 0.5
    mean = mean + _shrunk(own_mean - mean, reach * chance_mean)
    variance = variance + _shrunk(own_variance - variance, reach * chance_variance)
    return mean, variance.clamp(min=0)


def _shrunk(values: Tensor, by: Tensor) -> Tensor:
    """Move values towards zero, and not beyond it."""
    return values.sign() * (values.abs() - by).clamp(min=0)


@torch.no_grad()
def _move(seen: dict[_BatchNorm, Moments]) -> None:
    """Move the estimates towards the moments seen; refuse those that are not finite."""
    refuse_not_finite([t for moments in seen.values() for t in moments])
    for layer, moments in seen.items():
        for estimate, new in zip(own_statistics(layer), moments, strict=True):
            estimate.lerp_(new.to(estimate), RATE)
