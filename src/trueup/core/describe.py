"""The description of an adapter in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trueup.core.lifecycle import AdapterBase


def describe(adapter: AdapterBase) -> str:
    """Return the method with its hyper-parameters, the number of updated values, the head and the guard's state."""
    hyper = ", ".join(f"{name}={value!r}" for name, value in adapter.method.hyperparameters().items())
    method = f"{type(adapter.method).__name__}({hyper})"
    guard = "" if adapter.monitor is None else f", guard: {adapter.monitor.health.state}"
    if not adapter.built:
        return f"{method}, waiting for its first batch{guard}"
    total = sum(p.numel() for p in adapter.net.model.parameters())
    groups = adapter.optimizer.param_groups if adapter.optimizer is not None else []
    updated = {id(p) for group in groups for p in group["params"]}  # an optimiser may skip selected parameters
    count = sum(p.numel() for p in adapter.net.selected.values() if id(p) in updated)
    head = f"head {adapter.net.head!r}" if adapter.net.head is not None else "no head"
    labels = f", {adapter.net.channels} labels" if adapter.multilabel else ""
    return f"{method}, updates {_short(count)} of {_short(total)} values, {head}{labels}{guard}"


def _short(count: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)
