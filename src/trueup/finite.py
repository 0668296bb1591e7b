"""Checks that values are finite and not too large."""

from collections.abc import Iterable

import torch
from torch import Tensor

# Larger values are refused like infinite ones: statistics of a network's activations would overflow.
LARGEST = 1e12


class NotFiniteError(ValueError):
    """Error for a model's output that is not finite although its input is."""


def usable(x: Tensor) -> Tensor:
    """Return a tensor that is True if no value is NaN, infinite or too large; without a device sync."""
    return x.detach().abs().amax() <= LARGEST


def check_values(x: Tensor) -> None:
    """Refuse values that are NaN, infinite or too large."""
    if not bool(usable(x)):
        bad = (~(x.detach().abs().flatten(1).amax(dim=1) <= LARGEST)).nonzero().flatten().tolist()
        advice = "leave these images out, or let a guard do it: adapt(..., guard=True)"
        raise ValueError(f"x has values that are NaN, infinite or beyond {LARGEST:.0e}, in rows {bad[:10]}: {advice}")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if all values are finite, with one device sync for all tensors."""
    each = [t.isfinite().all() for t in tensors]
    return not each or bool(torch.stack(each).all())
