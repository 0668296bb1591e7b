"""Checks that values are finite and of a usable size."""

from collections.abc import Iterable

import torch
from torch import Tensor

# Larger values are refused as infinite ones are: statistics of what a network makes of them overflow.
LARGEST = 1e12


class NotFiniteError(ValueError):
    """What a model makes of a batch is not finite, although the batch is."""


def usable(x: Tensor) -> Tensor:
    """Whether no value is NaN, infinite or too large; as a tensor, for which nobody has to wait."""
    return x.detach().abs().amax() <= LARGEST


def check_values(x: Tensor) -> None:
    """Refuse values that are NaN, infinite or too large."""
    if not bool(usable(x)):
        bad = (~(x.detach().abs().flatten(1).amax(dim=1) <= LARGEST)).nonzero().flatten().tolist()
        what = f"NaN, infinite or beyond {LARGEST:.0e}"
        way = "leave these images out, or let a guard do it: adapt(..., guard=True)"
        raise ValueError(f"x has values that are {what}, in rows {bad[:10]}: {way}")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite: one look at all tensors, for which a device is waited for once."""
    each = [t.isfinite().all() for t in tensors]
    return not each or bool(torch.stack(each).all())


def bad_rows(x: Tensor, times: float, usual: float) -> tuple[Tensor, float]:
    """Which rows must not enter, and the usual size of a row's largest value, with this batch.

    Bad are values that are not finite or beyond 1e12, and those `times` beyond the usual. That never falls: dark images
    must not make bright ones look huge. It rises tenfold at most. Before anything is usual, the rows' lower quarter is;
    nothing below 1 counts.
    """
    sizes = x.detach().abs().flatten(1).amax(dim=1).float()
    bad = ~(sizes <= LARGEST)
    fine = sorted(sizes[~bad].tolist())
    reference = max(1.0, usual or (fine[(len(fine) - 1) // 4] if fine else 0.0))
    bad |= sizes > times * reference
    fine = sorted(sizes[~bad].tolist())
    return bad, max(usual, min(fine[(len(fine) - 1) // 2], 10 * reference)) if fine else usual
