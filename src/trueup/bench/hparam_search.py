"""Hyper-parameter search on held-out source data, the only labelled data before deployment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trueup.bench.stream_runner import StreamRunner
from trueup.core.registry import make_method

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


def search_hyper(
    method: str,
    fixed: dict[str, Any],
    runners: Sequence[StreamRunner],
    tick: Callable[[], None] = lambda: None,
    task: str = "classification",
) -> dict[str, Any]:
    """Run every candidate on every stream and choose the best mean accuracy (Dice for masks); ties: smaller lr.

    Returns the values as "chosen", and the score of every candidate as "search".
    """
    search: list[dict[str, Any]] = []
    score = "accuracy" if task == "classification" else "dice"
    for candidate in search_grid(method, fixed, task):
        scores = []
        try:
            for runner in runners:
                tick()
                result = runner.run(make_method(method, {**fixed, **candidate}, task), trace=False)
                scores.append(result.results[score] or 0.0)
            search.append({**candidate, score: float(np.mean(scores))})
        except ValueError as error:  # such as a learning rate that is too large
            search.append({**candidate, score: 0.0, "error": str(error)})
    if all("error" in candidate for candidate in search):
        raise ValueError(f"every candidate failed: {search[0]['error']}")
    best = max(search, key=lambda s: s[score])  # the first of equals; candidates are sorted by lr
    return {"chosen": {key: value for key, value in best.items() if key not in (score, "error")}, "search": search}
