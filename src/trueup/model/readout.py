"""The head as a linear map: its width, its weight per class, its scores for features.

A head is a linear layer, a convolution, a transposed convolution, a cosine head, or a module of such layers that adds
their outputs (a residual sum). The weight of a kernel is summed over its taps, as for a map of equal features.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class CosineHead(nn.Module):
    """Scaled cosine similarities of unit features with fixed class vectors, as in zero-shot CLIP."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: float, bias: float | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", F.normalize(weight, p=2, dim=1))
        self.register_buffer("scale", weight.new_tensor(scale))
        self.register_buffer("bias", None if bias is None else weight.new_tensor(bias))

    def forward(self, features: Tensor) -> Tensor:
        """Compute scores (N, C) of unit features (N, D)."""
        scores = self.scale * F.linear(features, self.weight)
        return scores if self.bias is None else scores + self.bias


HEADS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, CosineHead)
_PASSIVE = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def linear_sums(model: nn.Module) -> dict[nn.Module, str]:
    """Return modules inside a model that consist of linear layers alone, and so may be a residual head."""
    found: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        leaves = [m for m in module.modules() if not any(True for _ in m.children())]
        linear = [m for m in leaves if isinstance(m, HEADS)]
        strided = any(set(getattr(m, "stride", (1,))) != {1} for m in linear)
        others = any(not isinstance(m, (*HEADS, *_PASSIVE)) for m in leaves)
        if path and linear and not (strided or others or isinstance(module, HEADS)):
            found[module] = path
    return found


def width_of(layer: nn.Module) -> int:
    """Return the number of outputs of a single layer."""
    if isinstance(layer, TRANSPOSED):  # its weight is (in, out / groups, ...)
        return layer.out_channels
    return cast(Tensor, layer.weight).shape[0]


def weight_of(layer: nn.Module) -> Tensor:
    """Return the head's weight (C, D); a kernel larger than one is summed over its taps.

    With a stride a transposed convolution reaches each output with only some of its taps: the mean over the outputs of
    one input is taken, which is the sum over all taps divided by the number of these outputs.
    """
    if not isinstance(layer, HEADS):
        return _affine(layer)[0]
    weight = layer.weight
    if isinstance(layer, TRANSPOSED):
        return weight.flatten(2).sum(dim=2).T / math.prod(layer.stride)
    return weight.flatten(2).sum(dim=2) if weight.ndim > 2 else weight


def classify(layer: nn.Module, features: Tensor) -> Tensor:
    """Compute the head's scores of features (N, D)."""
    if isinstance(layer, nn.Linear | CosineHead):
        return cast(Tensor, layer(features.to(layer.weight.dtype)))
    weight, bias = (weight_of(layer), layer.bias) if isinstance(layer, HEADS) else _affine(layer)
    assert bias is None or isinstance(bias, Tensor)
    return F.linear(features.to(weight.dtype), weight, bias)


def features_and_scores(layer: nn.Module, inp: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and scores on one grid: a transposed convolution's scores are averaged over each input pixel."""
    if not isinstance(layer, TRANSPOSED) or inp.shape[2:] == out.shape[2:]:
        return inp, out
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[inp.ndim - 3]
    return inp, pool(out, layer.stride)


def same_pixels(layer: nn.Module, inp: Tensor, out: Tensor) -> bool:
    """Return whether each pixel of the head's input has its own pixels in the output."""
    if inp.ndim != out.ndim:
        return False
    stride = layer.stride if isinstance(layer, TRANSPOSED) else (1,) * (inp.ndim - 2)
    return [n * s for n, s in zip(inp.shape[2:], stride, strict=True)] == list(out.shape[2:])


@torch.no_grad()
def is_affine(layer: nn.Module, inp: Tensor) -> bool:
    """Return whether a module is linear up to a bias, tried with random inputs of this shape."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(inp.shape, generator=generator).to(inp) for _ in range(2))
    both, apart = layer(a + b) + layer(torch.zeros_like(a)), layer(a) + layer(b)
    coarse = torch.finfo(inp.dtype).eps > 1e-5
    return torch.allclose(both, apart, rtol=1e-4, atol=5e-2 if coarse else 1e-4 * float(apart.abs().mean() + 1e-6))


def _affine(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Compute weight (C, D) and bias (C,) of a module of linear layers, for a map of equal features.

    One backward pass: row c is the gradient of class c, at a pixel that sees no border, summed over the map.
    """
    layers = [m for m in module.modules() if isinstance(m, HEADS)]
    convolutions = [m for m in layers if isinstance(m, (*CONVOLUTIONS, *TRANSPOSED))]
    first, last = layers[0], layers[-1]
    dim = first.in_channels if isinstance(first, (*CONVOLUTIONS, *TRANSPOSED)) else first.weight.shape[1]
    axes = len(convolutions[0].kernel_size) if convolutions else 0
    radius = sum((max(m.kernel_size) - 1) * max(m.dilation) for m in convolutions)
    learns = torch.is_grad_enabled()
    with torch.enable_grad():
        x = first.weight.new_zeros((width_of(last), dim, *(2 * radius + 1,) * axes)).requires_grad_()
        out = module(x)[(slice(None), slice(None), *(radius,) * axes)]
        (weight,) = torch.autograd.grad(out.diagonal().sum(), x, create_graph=learns)
    return weight.flatten(2).sum(dim=2) if axes else weight, out[0] if learns else out[0].detach()
