"""Method specifications: `tsd`, `tsd:lr=1e-5`, `tsd:preset=safe`, or `{tsd: {lr: 1e-5}}` in YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, get_args, get_type_hints

from trueup.core.presets import with_preset
from trueup.core.registry import get_method

Spec = tuple[str, dict[str, Any]]
"""A method's name and its values: hyper-parameters, `guard` and `preset`."""


def as_list(value: Any) -> Any:
    """Return a list; a single value becomes a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def parse_numbers(values: Any) -> Any:
    """Convert strings that are numbers in a mapping: YAML reads 1e-5 as a string."""
    return {key: _number(v) for key, v in values.items()} if isinstance(values, Mapping) else values


def _number(value: Any) -> Any:
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return kind(value)
    return value


def read_specs(value: Any) -> Any:
    """Parse [tsd, {tsd: {lr: 1e-5}}] into (name, values) pairs."""
    pairs: list[Any] = []
    for item in as_list(value):
        if isinstance(item, str):
            name, _, rest = item.partition(":")
            pairs.append((name, parse_numbers(parse_assignments(rest.split(",")) if rest else {})))
        elif isinstance(item, Mapping) and len(item) == 1:
            name, hyper = next(iter(item.items()))
            if not isinstance(hyper, Mapping):
                raise ValueError(f"write hyper-parameters as `{name}: {{lr: 0.001}}`, not {hyper!r}")
            pairs.append((name, parse_numbers(hyper)))
        elif isinstance(item, tuple):
            pairs.append(item)
        else:
            raise ValueError(f"a method is a name, or `name: {{lr: 0.001}}`, not {item!r}")
    return pairs


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Parse name=value texts into a dictionary; values are YAML."""
    import yaml

    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{text!r} must be name=value")
        values[key.strip()] = yaml.safe_load(value)
    return values


def split_guard(values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Split the values of a method into hyper-parameters and guard; a preset implies a guard."""
    hyper = dict(values)
    preset, guard = hyper.pop("preset", None), hyper.pop("guard", None)
    if guard is not None and not isinstance(guard, bool):
        raise ValueError(f"guard={guard!r} must be true or false")
    if preset is None:
        return hyper, bool(guard)
    return with_preset(preset, hyper), guard is None or guard


def cast_values(method: str, values: Mapping[str, Any], task: str = "classification") -> dict[str, Any]:
    """Convert values to the types of the method's fields: 1 to 1.0 for a float, "none" to None if allowed."""
    hints = get_type_hints(get_method(method, task))
    result = dict(values)
    for key, value in values.items():
        kinds = get_args(hints.get(key)) or (hints.get(key),)
        if isinstance(value, str) and value.lower() in ("none", "null") and type(None) in kinds:
            result[key] = None
        elif isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
            result[key] = float(value)
    return result
