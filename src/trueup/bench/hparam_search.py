"""Hyper-parameter search on held-out source data, the only labelled data before deployment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup.bench.grids import search_grid
from trueup.bench.stream_runner import StreamRunner
from trueup.core.registry import make_method


@dataclass(frozen=True)
class Choice:
    """The result of a search: the best values, and the score of every candidate."""

    chosen: dict[str, Any]
    search: list[dict[str, Any]]


def search_hyper(
    method: str,
    fixed: dict[str, Any],
    runners: Sequence[StreamRunner],
    tick: Callable[[], None] = lambda: None,
    task: str = "classification",
) -> Choice:
    """Run every candidate on every stream and choose the best mean accuracy (Dice for masks); ties: smaller lr."""
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
    return Choice({key: value for key, value in best.items() if key not in (score, "error")}, search)
