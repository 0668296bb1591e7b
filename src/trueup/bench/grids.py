"""Hyper-parameter grids for the search."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

LR = (1e-3, 1e-4, 1e-5, 1e-6)
COARSE = (0.1, 1e-2, 1e-3, 1e-4)  # for SGD, whose steps scale with the gradient
BEYOND = ("tent-clf", "pl-clf", "tent-prebn", "shot", "roid", "note", "rotta", "cotta", "tast", "tast-bn")
PER_CLASS = (1, 5, 20, 50, 100, None)
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "tsd": {"lr": LR, "per_class": PER_CLASS},
    "t3a": {"per_class": PER_CLASS},
    "lame": {"affinity": ("knn", "rbf", "linear"), "neighbors": (1, 3, 5)},  # "linear" has no neighbors: tried once
    **{name: {"lr": LR} for name in ("tent", "pl", "shot-im", "eta", "eata")},
    **{name: {"lr": LR} for name in BEYOND},
    **{name: {"lr": COARSE} for name in ("rdumb", "sar", "deyo", "memo", "adacontrast")},
}
"""The paper's grids; a grid of learning rates for methods without one."""
MASK_GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "tsd": {"lr": LR, "alignment": (0.1, 1.0)},
    **{name: {"lr": LR} for name in ("tent", "pl", "shot-im", "eta", "eata")},
}
"""Grids for masks, for which the paper gives none: learning rates, and TSD's alignment weight."""


def search_grid(method: str, fixed: Mapping[str, Any], task: str = "classification") -> list[dict[str, Any]]:
    """Return the combinations to try, smallest learning rate first; given values stay fixed."""
    grids = GRIDS if task == "classification" else MASK_GRIDS
    axes = {key: values for key, values in grids.get(method, {}).items() if key not in fixed}
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    first = grids.get(method, {}).get("neighbors", (None,))[0]
    combinations = [c for c in combinations if c.get("affinity") != "linear" or c.get("neighbors", first) == first]
    return sorted(combinations, key=lambda c: c.get("lr", 0.0)) if axes else []
