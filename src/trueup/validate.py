"""Checks of settings: each raises a ValueError that names the setting and its value."""

import re
from typing import Any


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse a value that is not one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")


def check_pattern(name: str, value: Any) -> None:
    """Refuse anything but a regular expression; keywords are valid ones."""
    try:
        fits = isinstance(value, str) and value and re.compile(value)
    except re.error as error:
        raise ValueError(f"{name}={value!r} is not a regular expression: {error}") from error
    if not fits:
        raise ValueError(f"{name}={value!r} must be a keyword, a regular expression or a function of the name")


def check_bool(name: str, value: Any) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_float(name: str, value: Any, low: float, high: float = float("inf")) -> None:
    """Refuse anything but a finite number in [low, high]."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits or value == float("inf"):
        bounds = f"at least {low}" if high == float("inf") else f"from {low} to {high}"
        raise ValueError(f"{name}={value!r} must be a number {bounds}")


def check_int(name: str, value: Any, low: int, *, none: bool = False) -> None:
    """Refuse anything but an integer of at least `low`, or None if `none` allows it."""
    if none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}={value!r} must be an integer of at least {low}{' or None' if none else ''}")
