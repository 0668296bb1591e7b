"""Optimiser steps: their gradients, those left out because a gradient is not finite, and how many were taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trueup import devices

log = logging.getLogger("trueup")


def backward(
    loss: Tensor,
    parameters: Sequence[nn.Parameter],
    radius: float,
    again: Callable[[], Tensor | None],
    scale: float = 1.0,
) -> Tensor | None:
    """Fill in the gradient of a loss, and return the loss that it is of; None if there is none to take a step by.

    With a radius the parameters go that far along the gradient, `again` works out the loss there, and they come back,
    to the bit, also when it fails. `scale` is the loss scale, against underflow.
    """
    _gradient(loss, parameters, scale)
    if not radius:
        return loss
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


def decides(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimiser can skip a step on the device, as torch's fused Adam and AdamW can."""
    # Fused SGD can, too, but leaves the momentum of a first step that it left out without a value.
    groups = optimizer.param_groups
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and all(g.get("fused") for g in groups)


def left_to_device(optimizer: torch.optim.Optimizer, norm: Tensor) -> bool:
    """Return whether the device should check the gradient's norm, so that the host need not wait for it."""
    return devices.waits(norm) and decides(optimizer)


def step_if_finite(optimizer: torch.optim.Optimizer, size: Tensor) -> Tensor:
    """Take a step that the device skips if the gradient's norm is not finite; return 1 if it did, else 0.

    A skipped step changes nothing, bit by bit: parameters, moments, count of steps. The host does not wait.
    """
    held = (~size.isfinite()).to(torch.float32)
    optimizer.found_inf = held  # type: ignore[attr-defined]  # what torch's own scaler of gradients sets
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
    return held


class Steps:
    """A count of optimiser steps. Steps skipped on a device become known when the host next waits for it."""

    def __init__(self) -> None:
        self._count = 0
        self._held: Tensor | None = None  # how many of them were skipped on a device, not read yet
        self.shrunk = 0  # how often the loss scale was too large

    @property
    def count(self) -> int:
        """Return how many steps were taken; this may wait for a device."""
        if self._held is not None:
            self._read(float(self._held))
        return self._count

    @count.setter
    def count(self, count: int) -> None:
        """Set the count, with no step left to read."""
        self._count, self._held = count, None

    def scale(self, usual: float) -> float:
        """Return the loss scale: less, each time that a gradient was not finite."""
        return max(1.0, usual * 0.25**self.shrunk)

    def left_out(self, count: int = 1) -> None:
        """Note that so many gradients were not finite."""
        self.shrunk = min(self.shrunk + count, 8)
        log.warning("the gradient is not finite; %d update%s left out", count, " is" if count == 1 else "s are")

    def restart(self) -> None:
        """Start again at zero."""
        self.count = self.shrunk = 0

    def taken(self, held: Tensor | None = None) -> None:
        """Count a step, unless `held`, if given, turns out to be 1."""
        self._count += 1
        if held is not None:
            self._held = held if self._held is None else self._held + held

    def look(self, fine: Tensor) -> bool:
        """Read a truth value and, in the same wait for the device, how many steps were skipped."""
        if self._held is None:
            return bool(fine)
        good, held = torch.stack([fine.to(self._held), self._held]).tolist()
        self._read(held)
        return bool(good)

    def _read(self, held: float) -> None:
        self._held = None
        if held:
            self._count -= int(held)
            self.left_out(int(held))
