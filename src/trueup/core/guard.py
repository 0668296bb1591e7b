"""A guard: what it does and when, what it tells, and how it says an adapter is. `core/watch.py` does the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trueup.core.method import in_range, whole
from trueup.core.published import RDumb
from trueup.core.rules import RULES, Rule, signs


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


def plain_health(
    images: int, batches: int, updates: int, last: tuple[Tensor, Tensor | None] | None, *, multilabel: bool
) -> Health:
    """Say how an adapter without a guard is: counts, and of the last batch the entropy and agreement with the source.

    last: the last answers, and those of the source where they were asked for.
    """
    numbers = {"batches": float(batches), "updates": float(updates)}
    if last is not None:
        answer = signs(last[0], multilabel=multilabel, source=None, loss=None, updates=updates, drift=None)
        numbers["entropy"] = answer.entropy
        if last[1] is not None:
            theirs = signs(last[1], multilabel=multilabel, source=None, loss=None, updates=updates, drift=None)
            numbers["agreement"] = float((answer.classes == theirs.classes).float().mean())
    return Health("unguarded", "", images, numbers, {}, ())


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
    """Told of every event."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return self  # it never changes, and `notify` may belong to something that must not be copied

    def __post_init__(self) -> None:
        for name in ("window", "compare", "probation"):
            whole(name, getattr(self, name), 1)
        whole("cap", self.cap, 1, none=True)
        in_range("largest", self.largest, 1)
        if not isinstance(self.rules, tuple) or not all(isinstance(rule, Rule) for rule in self.rules):
            raise TypeError("rules must be a tuple of rules, such as (*trueup.rules.RULES, trueup.rules.RDumb())")
        if self.notify is not None and not callable(self.notify):
            raise TypeError(f"notify must be a function of an event, not {type(self.notify).__name__}")

    @property
    def every_rule(self) -> tuple[Rule, ...]:
        """The rules, and the cap as one."""
        return self.rules if self.cap is None else (*self.rules, RDumb(every=self.cap))
