"""Sharpness-aware gradients (Foret et al., 2021): that of the loss where it rises most within a radius."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def backward(
    loss: Tensor,
    parameters: Sequence[nn.Parameter],
    radius: float,
    again: Callable[[], Tensor | None],
    scale: float = 1.0,
) -> Tensor | None:
    """Fill in the gradient of a loss, and return the loss that it is of; None if there is none to take a step by.

    With a radius the parameters go that far along the gradient, `again` works out the loss there, and they come back,
    to the bit, also when it fails. `scale` is what the loss is multiplied with on the way, against underflow.
    """
    _gradient(loss, parameters, scale)
    if not radius:
        return loss
    moved = [p for p in parameters if p.grad is not None]
    length = torch.nn.utils.get_total_norm([p.grad for p in moved if p.grad is not None])
    if not bool(length.isfinite()):
        return loss  # whoever steps sees that
    before = [p.detach().clone() for p in moved]
    try:
        with torch.no_grad():
            for p in moved:
                assert p.grad is not None
                p.add_(p.grad, alpha=float(radius / (length + 1e-12)))
                p.grad = None
        second = again()
        if second is None or not second.requires_grad:
            return None
        _gradient(second, parameters, scale)
        return second
    finally:
        with torch.no_grad():
            for p, value in zip(moved, before, strict=True):
                p.copy_(value)


def _gradient(loss: Tensor, parameters: Sequence[nn.Parameter], scale: float) -> None:
    (loss * scale if scale != 1 else loss).backward()
    for p in parameters if scale != 1 else ():
        if p.grad is not None:
            p.grad.div_(scale)
