"""The guard: watches an adapter, freezes it under suspicion, takes it back when it went astray, lets the source answer.

healthy → suspect (nothing is learnt) → rolled back (to the last good state, and nothing is learnt for a while) →
fallback (the source answers, while the adapter tries again unseen) → probation (under close watch) → healthy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trueup.core.anchor import drift, pull, restore_part, restore_some, source_logits
from trueup.core.inputs import bad_rows
from trueup.core.method import in_range, whole
from trueup.core.moments import Moment, back_to, remember
from trueup.core.published import RDumb
from trueup.core.rules import RULES, Action, Rule, signs

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter

log = logging.getLogger("trueup.guard")

STATES = ("healthy", "suspect", "rolled back", "fallback", "probation")
FROZEN = ("suspect", "rolled back")  # nothing is learnt
EVENTS = ("suspect", "rollback", "fallback", "reset", "pull", "skipped", "quarantined")
LONGEST = 16  # times its length that a cool-down may grow to


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
        if self.cap is not None:
            object.__setattr__(self, "rules", (*self.rules, RDumb(every=self.cap)))


class Watch:
    """A guard at work on one adapter. All it remembers is in `marks` (plain values), `memory` (buffers), `kept`."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.memory = nn.ModuleList()
        self.kept: list[Moment] = []
        self.marks: dict[str, Any] = {}
        self.loss: float | None = None
        self.restart()

    def restart(self) -> None:
        """As before the first batch."""
        self.kept = []
        self.memory = nn.ModuleList()
        self.marks = {
            "state": "healthy", "reason": "", "images": 0, "batches": 0, "since": 0, "good": 0, "until": 0,
            "checking": self.guard.window, "cooldown": self.guard.window, "usual": 0.0, "answer": [],
            "numbers": {}, "events": dict.fromkeys(EVENTS, 0), "quarantined": [],
        }  # fmt: skip

    def load(self, adapter: Adapter, memory: dict[str, Tensor]) -> None:
        """What the rules remember, from a file."""
        self.memory = nn.ModuleList()
        if memory:
            self._rules(adapter)
            self.memory.load_state_dict(memory)

    @property
    def health(self) -> Health:
        """What can be said of the adapter."""
        m = self.marks
        return Health(
            m["state"], m["reason"], m["images"], dict(m["numbers"]), dict(m["events"]), tuple(m["quarantined"])
        )

    @property
    def frozen(self) -> bool:
        """Whether nothing is to be learnt."""
        return self.marks["state"] in FROZEN

    # Before the model sees a batch

    def answer(self, adapter: Adapter, x: Tensor) -> Tensor:
        """The adapter's answers; an image that must not enter gets logits of zero and disturbs no other."""
        bad, usual = bad_rows(x, self.guard.largest, self.marks["usual"])
        if not adapter._built and not bool(bad.all()):
            adapter._probe(x[~bad])
        self.marks["usual"] = usual
        self.marks["quarantined"] = bad.nonzero().flatten().tolist()
        if not bool(bad.any()):
            return self._answered(adapter, x)
        self._tell(adapter, "quarantined", f"rows {self.marks['quarantined'][:10]} hold NaN, infinite or huge values")
        if bool(bad.all()):
            if not self.marks["answer"]:
                raise ValueError("no row of the first batch can be used: its values are NaN, infinite or too large")
            return x.new_zeros(len(x), *self.marks["answer"], dtype=torch.promote_types(x.dtype, torch.float32))
        some = self._answered(adapter, x[~bad])
        full = some.new_zeros(len(x), *some.shape[1:])
        full[~bad] = some
        return full

    def _answered(self, adapter: Adapter, x: Tensor) -> Tensor:
        """Go back once where the adapted model has no finite answer."""
        try:
            answers = adapter._answer(x)
        except ValueError as error:
            if not adapter._built or "not finite" not in str(error):
                raise
            self._roll_back(adapter, "the answer was not finite")
            answers = adapter._answer(x)
        self.marks["answer"] = list(answers.shape[1:])
        return answers

    # Around a step

    def refuses(self, adapter: Adapter, loss: float, gradient: float) -> bool:
        """Whether a step is to be left out."""
        self.loss = loss
        reasons = [rule.before(gradient, memory) for rule, memory in self._rules(adapter)]
        for reason in filter(None, reasons):
            self._tell(adapter, "skipped", f"a step was left out: {reason}")
        return any(reasons)

    def stepped(self, adapter: Adapter) -> None:
        """After a step: what is no longer finite is taken back at once."""
        if not bool(torch.nn.utils.get_total_norm([p.detach() for p in adapter.net.selected.values()]).isfinite()):
            self._roll_back(adapter, "a parameter was no longer finite")

    # After a batch

    def after(self, adapter: Adapter, x: Tensor, logits: Tensor, answer: Tensor) -> Tensor:
        """Look at what a batch did, act, and say what to answer: the adapter's answer, or the source's."""
        m, n = self.marks, len(x)
        m["images"] += n
        m["batches"] += 1
        theirs = source_logits(adapter, x) if self._compares() else None
        whole_window = m["images"] // self.guard.window > (m["images"] - n) // self.guard.window
        kind: dict[str, Any] = {"multilabel": adapter.multilabel, "updates": adapter.updates, "loss": self.loss}
        source = None if theirs is None else signs(theirs, source=None, drift=None, **kind)
        seen = signs(logits, source=source, drift=drift(adapter) if whole_window else None, **kind)
        self.loss = None
        numbers: dict[str, float] = m["numbers"]
        wanted = [rule.after(seen, memory, numbers) for rule, memory in self._rules(adapter)]
        was = m["state"]
        self._act(adapter, [action for action in wanted if action is not None], n)
        if theirs is not None and "fallback" in (was, m["state"]):
            return theirs.to(answer.dtype)
        if whole_window and m["state"] == "healthy":
            self.kept = [*self.kept, remember(adapter)][-2:]
        return answer

    def _compares(self) -> bool:
        m = self.marks
        return bool(m["state"] != "healthy" or m["images"] <= m["checking"] or m["batches"] % self.guard.compare == 0)

    def _rules(self, adapter: Adapter) -> list[tuple[Rule, nn.Module]]:
        if not self.memory:
            classes = 2 if adapter.multilabel else adapter.net.channels
            self.memory = nn.ModuleList(rule.init(classes) for rule in self.guard.rules)
        return list(zip(self.guard.rules, self.memory, strict=True))

    def _act(self, adapter: Adapter, wanted: list[Action], n: int) -> None:
        m = self.marks
        by = {action.kind: action for action in wanted}
        for action in wanted:
            self._change(adapter, action)
        if "reset" in by:
            self._reset(adapter, by["reset"].reason)
        bad = by.get("fallback") or by.get("rollback") or by.get("suspect")
        if bad is not None and m["state"] in ("healthy", "suspect", "probation"):
            self._worsen(adapter, bad)
        elif bad is not None and m["images"] - m["since"] >= self.guard.window // 4:
            self._fall_back(adapter, bad.reason)  # going back was no help, or the next try was no better
        elif bad is None:
            self._recover(adapter, n)
            if "check" in by and m["images"] > m["checking"] and m["state"] == "healthy":
                m["checking"] = m["images"] + self.guard.window
                self._compare_anew(adapter)

    def _worsen(self, adapter: Adapter, bad: Action) -> None:
        m = self.marks
        if bad.kind == "fallback":
            self._fall_back(adapter, bad.reason)
        elif bad.kind == "rollback" or (m["state"] == "suspect" and m["images"] - m["since"] >= self.guard.window):
            self._roll_back(adapter, bad.reason)
        elif m["state"] != "suspect":
            self._enter("suspect", bad.reason)
            self._tell(adapter, "suspect", bad.reason)

    def _recover(self, adapter: Adapter, n: int) -> None:
        """A batch without a sign."""
        m, guard = self.marks, self.guard
        m["good"] += n
        if m["state"] == "suspect" and m["good"] >= guard.window // 4:
            self._enter("healthy", "the suspicion was not confirmed")
        elif m["state"] in ("rolled back", "fallback") and m["images"] >= m["until"]:
            self._enter("probation", f"the cool-down after: {m['reason']}")
            self._compare_anew(adapter)
        elif m["state"] == "probation" and m["good"] >= guard.probation * guard.window:
            self._enter("healthy", "")
            log.info("after %d images: healthy again", m["images"])
        elif m["state"] == "healthy" and m["good"] >= 10 * guard.window:
            m["cooldown"], m["reason"] = guard.window, ""

    # What a guard can do

    def _enter(self, state: str, reason: str) -> None:
        m = self.marks
        m.update(state=state, reason=reason, since=m["images"], good=0)

    def _cool_down(self) -> None:
        m = self.marks
        m["until"] = m["images"] + m["cooldown"]
        m["cooldown"] = min(2 * m["cooldown"], LONGEST * self.guard.window)

    def _roll_back(self, adapter: Adapter, reason: str) -> None:
        """To the older of the last good states: the newer may have been taken when it had begun."""
        if self.kept:
            back_to(adapter, self.kept[0])
        else:
            adapter._restart()
        self._enter("rolled back", reason)
        self._cool_down()
        self._compare_anew(adapter)
        self._tell(adapter, "rollback", reason)

    def _fall_back(self, adapter: Adapter, reason: str) -> None:
        adapter._restart()
        self._enter("fallback", reason)
        self._cool_down()
        self._compare_anew(adapter)
        self._tell(adapter, "fallback", reason)

    def _reset(self, adapter: Adapter, reason: str) -> None:
        adapter._restart()
        self._compare_anew(adapter)
        self._tell(adapter, "reset", reason)

    def _change(self, adapter: Adapter, action: Action) -> None:
        if action.kind == "pull":
            pull(adapter, action.share)
        elif action.kind == "restore":
            restore_some(adapter, action.share)
        elif action.kind == "part":
            restore_part(adapter, action.share)
        if action.kind in ("pull", "part") and action.reason:
            self._tell(adapter, "pull", action.reason)

    def _compare_anew(self, adapter: Adapter) -> None:
        for rule, memory in self._rules(adapter):
            rule.restart(memory)

    def _tell(self, adapter: Adapter, name: str, reason: str) -> None:
        m = self.marks
        m["events"][name] += 1
        level = logging.WARNING if name in ("rollback", "fallback") else logging.INFO
        log.log(level, "after %d images: %s: %s", m["images"], name, reason)
        if self.guard.notify is not None:
            self.guard.notify(Event(name, reason, m["images"], m["state"], dict(m["numbers"])))
