"""Presets: settings that go together, under a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {"safe": {"norm": "robust"}}
"""Hyper-parameters by preset. Each also means a guard. docs/trust.md has the measurements behind "safe"."""


def with_preset(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters under a preset; what is given wins."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}. There are: {', '.join(PRESETS)}")
    return {**PRESETS[name], **given}
