"""Presets: named sets of hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {"safe": {"norm": "robust"}}
"""Hyper-parameters by preset; each preset also turns on a guard. docs/trust.md has the measurements behind "safe"."""


def with_preset(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's hyper-parameters, overridden by those given."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}. There are: {', '.join(PRESETS)}")
    return {**PRESETS[name], **given}
