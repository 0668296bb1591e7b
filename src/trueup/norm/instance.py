"""Instance-aware normalisation (NOTE): an image keeps its own moments where they are far from the estimates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.finite import NotFiniteError, all_finite

RATE = 0.01  # how far a batch that is learnt from moves the estimates


@contextmanager
def correcting(model: nn.Module, reach: float, *, update: bool, centred: bool = False) -> Iterator[None]:
    """Let BatchNorm layers with running statistics correct them for each image; see `corrected`.

    The middle is the estimates; `centred`, it is the batch's moments, as in training. With `update` the estimates move
    to these once the whole forward went well. Not for models that work out activations again in backward.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    seen: dict[_BatchNorm, tuple[Tensor, Tensor]] = {}

    def replace(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        assert isinstance(layer, _BatchNorm)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        x = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
        mean, variance = layer.running_mean.to(x), layer.running_var.to(x)
        if (update or centred) and x.numel() > x.shape[1]:
            own = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], correction=1)
            if update:
                seen[layer] = (own[1].detach(), own[0].detach())
            if centred:
                variance, mean = own
        mean, variance = corrected(x, mean, variance, layer.eps, reach)
        y = (x - mean) * torch.rsqrt(variance + layer.eps)
        shape = (1, -1, *[1] * (x.ndim - 2))
        if layer.weight is not None:
            y = y * layer.weight.to(x).reshape(shape)
        if layer.bias is not None:
            y = y + layer.bias.to(x).reshape(shape)
        return y.to(out.dtype)

    handles = [layer.register_forward_hook(replace) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    _move(seen)


def corrected(x: Tensor, mean: Tensor, variance: Tensor, eps: float, reach: float) -> tuple[Tensor, Tensor]:
    """The moments that each image (N, C, ...) is normalised with, of shape (N, C, 1, ...) or (1, C).

    An image's own moments are those of a sample of L pixels, so they scatter: the mean by sqrt(variance / L), the
    variance by variance · sqrt(2 / (L - 1)). What lies within `reach` such deviations is chance, and is left out.
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
    """Nearer to zero by so much, and zero where that is farther."""
    return values.sign() * (values.abs() - by).clamp(min=0)


def _move(seen: dict[_BatchNorm, tuple[Tensor, Tensor]]) -> None:
    """Move the estimates to what was seen, unless that is not finite."""
    if not all_finite(t for moments in seen.values() for t in moments):
        raise NotFiniteError(
            "the batch's normalisation statistics are not finite: its values are too large for this model"
        )
    with torch.no_grad():
        for layer, (mean, variance) in seen.items():
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.lerp_(mean.to(layer.running_mean), RATE)
            layer.running_var.lerp_(variance.to(layer.running_var), RATE)
