"""A guard: what it does and when, what it tells, and how it says an adapter is. `guard/monitor.py` does the work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trueup.guard.published_rules import RDumb
from trueup.guard.rules import RULES, Rule
from trueup.validate import check_float, check_int

log = logging.getLogger("trueup.guard")


@dataclass(frozen=True)
class Event:
    """Something the guard did: what, why, after how many images, and what it had measured."""

    name: str
    reason: str
    images: int
    state: str
    numbers: dict[str, float]


@dataclass(frozen=True)
class Health:
    """How an adapter is: its state and why, what was measured last, how often what happened, rows left out last."""

    state: str
    reason: str
    images: int
    numbers: dict[str, float]
    events: dict[str, int]
    quarantined: tuple[int, ...]

    def __str__(self) -> str:
        """In words."""
        words = [f"{self.state} after {self.images:,} images" + (f": {self.reason}" if self.reason else "")]
        words += [f"{name.replace('_', ' ')} {value:.3g}" for name, value in sorted(self.numbers.items())]
        words += [f"{count} × {name}" for name, count in self.events.items() if count]
        return "; ".join(words)


def plain_health(images: int, batches: int, updates: int, last: Mapping[str, Tensor]) -> Health:
    """Say how an adapter without a guard is: counts, and numbers of the last batch."""
    numbers = {"batches": float(batches), "updates": float(updates)}
    return Health("unguarded", "", images, numbers | {name: float(t) for name, t in last.items()}, {}, ())


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What a guard does, and when. `adapt(model, guard=True)` is a guard with these defaults."""

    rules: tuple[Rule, ...] = RULES
    window: int = 256
    """Images in a window: the last good state is kept once in a window, a cool-down begins with one."""
    compare: int = 8
    """Every so many batches are compared with the frozen source; those of the first window and under suspicion all."""
    probation: int = 2
    """Windows without a sign until a model that was taken back counts as healthy."""
    largest: float = 1000.0
    """An image with a value so many times beyond the usual is left out, as one with NaN is."""
    cap: int | None = None
    """Back to the source after so many batches, whatever happens (RDumb); None: never."""
    notify: Callable[[Event], None] | None = field(default=None, repr=False, compare=False)
    """Told of every event, after the batch, when the adapter is free for calls again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return self  # it never changes, and `notify` may belong to something that must not be copied

    def __post_init__(self) -> None:
        for name in ("window", "compare", "probation"):
            check_int(name, getattr(self, name), 1)
        check_int("cap", self.cap, 1, none=True)
        check_float("largest", self.largest, 1)
        if not isinstance(self.rules, tuple) or not all(isinstance(rule, Rule) for rule in self.rules):
            raise TypeError("rules must be a tuple of rules, such as (*trueup.rules.RULES, trueup.rules.RDumb())")
        if self.notify is not None and not callable(self.notify):
            raise TypeError(f"notify must be a function of an event, not {type(self.notify).__name__}")

    def tell(self, events: list[Event]) -> None:
        """Notify of events and take them off the list. Whoever is told must not stop the predictions."""
        while events and self.notify is not None:
            try:
                self.notify(events.pop(0))
            except Exception:
                log.exception("notify failed")

    @property
    def every_rule(self) -> tuple[Rule, ...]:
        """The rules, and the cap as one."""
        return self.rules if self.cap is None else (*self.rules, RDumb(every=self.cap))
