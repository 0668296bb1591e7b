"""Special optimiser steps: sharpness-aware gradients, and steps that a device skips by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def sharpness_aware(
    loss: Tensor, parameters: Sequence[nn.Parameter], radius: float, second_loss: Callable[[], Tensor | None],
    backward: Callable[[Tensor, Sequence[nn.Parameter]], None],
) -> Tensor | None:  # fmt: skip
    """Replace the gradient by the gradient at a distance of `radius` along it, and return the loss at that point.

    Returns None if there is no loss at that point, and the first loss if its gradient is not finite. The parameters are
    restored bit-exactly, also after an exception.
    """
    moved = [p for p in parameters if p.grad is not None]
    length = torch.nn.utils.get_total_norm([p.grad for p in moved if p.grad is not None])
    if not bool(length.isfinite()):
        return loss  # the caller checks it before the step
    before = [p.detach().clone() for p in moved]
    try:
        with torch.no_grad():
            for p in moved:
                assert p.grad is not None
                p.add_(p.grad, alpha=float(radius / (length + 1e-12)))
                p.grad = None
        second = second_loss()
        if second is None or not second.requires_grad:
            return None
        backward(second, parameters)
        return second
    finally:
        with torch.no_grad():
            for p, value in zip(moved, before, strict=True):
                p.copy_(value)


def left_to_device(optimizer: torch.optim.Optimizer, norm: Tensor) -> bool:
    """Return whether the device can check the gradient's norm and skip the step, so that the host need not wait."""
    # Fused Adam and AdamW can. Fused SGD does not initialise momentum if it skips the first step.
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return not norm.is_cpu and fused and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> Tensor:
    """Take a step that the device skips if the gradient's norm is not finite; return 1 if it did, else 0.

    A skipped step changes nothing, bit by bit: parameters, moments, count of steps. The host does not wait.
    """
    skipped = (~norm.isfinite()).to(torch.float32)
    optimizer.found_inf = skipped  # type: ignore[attr-defined]  # as torch's GradScaler does
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
    return skipped
