"""Instance-aware normalisation (NOTE): an image keeps its own moments where they are far from the estimates."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.hooks import hooked
from trueup.norm.policy import Moments, NormPolicy, batchnorms, own_statistics, refuse_not_finite

RATE = 0.01  # how far an updating forward moves the estimates


class InstancePolicy(NormPolicy):
    """Running estimates, corrected for each image; differences of up to this number of deviations stay.

    Where `centred`, images are corrected from the batch's moments instead, as in training.
    """

    default = 4.0
    remembers = True
    recomputable = False

    def following(self, model: nn.Module) -> AbstractContextManager[None]:
        """Replace the layers' outputs."""
        return hooked(batchnorms(model), after=self._normalize)

    @torch.no_grad()
    def remember(self, model: nn.Module, seen: dict[_BatchNorm, Moments]) -> None:
        """Move the estimates towards the batch's moments."""
        refuse_not_finite(list(seen.values()))
        for layer, moments in seen.items():
            for estimate, new in zip(own_statistics(layer), moments, strict=True):
                estimate.lerp_(new.to(estimate), RATE)

    def _normalize(self, layer: _BatchNorm, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
        mean, variance = (t.to(x) for t in own_statistics(layer))
        if (self.seen is not None or self.centred) and x.numel() > x.shape[1]:
            own = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], correction=1)
            if self.seen is not None:
                self.seen[layer] = (own[1].detach(), own[0].detach())
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
    """Shrink values towards zero (soft threshold)."""
    return values.sign() * (values.abs() - by).clamp(min=0)
