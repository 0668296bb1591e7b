"""The report of a dataset check: the parts that images and masks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Progress = Callable[[int, int], None]


@dataclass
class Report:
    """The findings of a check."""

    name: str
    problems: list[str] = field(default_factory=list)  # sentences; empty if the dataset is complete and readable
    broken: list[str] = field(default_factory=list)  # images, or cases with the reason, that cannot be read
    others: list[str] = field(default_factory=list)  # other files; they are ignored
    notes: list[str] = field(default_factory=list)  # remarks that are not problems


def first_names(names: Iterable[str], most: int = 5) -> str:
    """Return the first names, and the number of the others."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
