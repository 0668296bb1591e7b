"""The settings of a guard, its events, and the health of an adapter; `guard/monitor.py` does the work."""

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
    """An event of a guard: its name, reason, the images so far, the guard's state and its measurements."""

    name: str
    reason: str
    images: int
    state: str
    numbers: dict[str, float]


@dataclass(frozen=True)
class Health:
    """The health of an adapter: its state and reason, last measurements, counts of events, rows last quarantined."""

    state: str
    reason: str
    images: int
    numbers: dict[str, float]
    events: dict[str, int]
    quarantined: tuple[int, ...]

    def __str__(self) -> str:
        """Describe the health in one line."""
        parts = [f"{self.state} after {self.images:,} images" + (f": {self.reason}" if self.reason else "")]
        parts += [f"{name.replace('_', ' ')} {value:.3g}" for name, value in sorted(self.numbers.items())]
        parts += [f"{count} × {name}" for name, count in self.events.items() if count]
        return "; ".join(parts)


def plain_health(images: int, batches: int, updates: int, last: Mapping[str, Tensor]) -> Health:
    """Return the health of an adapter without a guard: counts, and measurements of the last batch."""
    numbers = {"batches": float(batches), "updates": float(updates)}
    return Health("unguarded", "", images, numbers | {name: float(t) for name, t in last.items()}, {}, ())


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The settings of a guard. `adapt(model, guard=True)` uses these defaults."""

    rules: tuple[Rule, ...] = RULES
    window: int = 256
    """Images in a window: a good state is kept once per window, and the first cool-down lasts one window."""
    compare: int = 8
    """Compare every `compare`-th batch with the frozen source; in the first window and under suspicion, every batch."""
    probation: int = 2
    """Windows without a request of a rule until a model counts as healthy again after a rollback."""
    largest: float = 1000.0
    """Quarantine images with a value this many times above the typical maximum, like images with NaN."""
    cap: int | None = None
    """Reset to the source every so many batches (RDumb); None: never."""
    notify: Callable[[Event], None] | None = field(default=None, repr=False, compare=False)
    """Called with every event after the batch, when the adapter can be called again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return self  # it is immutable, and `notify` may belong to an object that must not be copied

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
        """Call `notify` for each event and clear the list; its errors are logged, and must not stop predictions."""
        while events and self.notify is not None:
            try:
                self.notify(events.pop(0))
            except Exception:
                log.exception("notify failed")

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules, with the cap as one of them."""
        return self.rules if self.cap is None else (*self.rules, RDumb(every=self.cap))
