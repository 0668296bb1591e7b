"""The monitor of a guard: signals of a batch in, decisions out.

healthy → suspect (nothing is learnt) → rolled back (to the last good state, and nothing is learnt for a while) →
fallback (the source predicts, while the adapter restarts in the background) → probation (under close watch) → healthy.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trueup.finite import LARGEST
from trueup.guard.config import Event, Guard, Health
from trueup.guard.drift_alarm import PooledMoments, SeenMoments, Shift
from trueup.guard.marks import FROZEN, Decision, Marks, Verdict
from trueup.guard.rules import Action, BatchSignals, Rule

log = logging.getLogger("trueup.guard")

MAX_BAD_GRADIENTS = 3  # gradients in a row that are not finite
MAX_COOLDOWN = 16  # windows that a cool-down may grow to


class Monitor:
    """A guard at work on one adapter: it returns decisions, and changes nothing in the adapter."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.rules = guard.all_rules
        self.alarm = next((rule for rule in self.rules if isinstance(rule, Shift)), None)
        self.pending: list[Event] = []
        """Events that nobody has been notified of yet."""
        self.seen: SeenMoments = []
        """Moments of the features of this batch, if they are measured."""
        self._classes = 0
        self._layers: Sequence[int] = ()
        self.restart()

    def attach(self, classes: int, layers: Sequence[int]) -> None:
        """Set the number of classes, and the number of features of each BatchNorm layer."""
        self._classes, self._layers = classes, layers

    def restart(self) -> None:
        """Forget everything."""
        self.marks = Marks(checking=self.guard.window, cooldown=self.guard.window)
        self.memory = nn.ModuleList()
        self.loss: float | None = None
        """Loss of the last step, until the batch is judged."""

    def snapshot(self) -> tuple[Any, ...]:
        """Return what a batch may change, apart from the values of buffers."""
        return copy.deepcopy(self.marks), self.memory, self.loss

    def put_back(self, snapshot: tuple[Any, ...]) -> None:
        """Undo everything since a snapshot, apart from the values of buffers."""
        marks, self.memory, self.loss = snapshot
        self.marks = copy.deepcopy(marks)
        self.pending.clear()

    def load(self, marks: Marks | None, memory: Mapping[str, Tensor]) -> None:
        """Restore marks and the states of rules; without them, forget everything."""
        self.restart()
        self.marks = marks or self.marks
        if memory:
            self._rules()
            self.memory.load_state_dict(memory)

    @property
    def health(self) -> Health:
        """The state of the adapter, according to its guard."""
        m = self.marks
        return Health(m.state, m.reason, m.images, dict(m.numbers), dict(m.events), tuple(m.quarantined))

    @property
    def frozen(self) -> bool:
        """True while nothing is to be learnt."""
        return self.marks.state in FROZEN

    # Rows of a batch

    def accept(self, usual: float) -> None:
        """Note that rows were taken, and their typical maximum."""
        self.marks.usual, self.marks.refused = usual, 0

    def refuse_all(self, sizes: Tensor) -> None:
        """Note that all rows were too large; if that lasts, their size becomes the typical one."""
        if bool((sizes <= LARGEST).all()):
            self.marks.refused += len(sizes)
            if self.marks.refused >= self.guard.window // 4:
                self.marks.usual, self.marks.refused = float(sizes.median()), 0

    def quarantine(self, rows: list[int]) -> None:
        """Note which rows were left out."""
        self.marks.quarantined = rows
        if rows:
            self._report("quarantined", f"rows {rows[:10]} hold values that are NaN, infinite or too large")

    def answer_shape(self, x: Tensor) -> list[int] | None:
        """Return the shape of the last answer to an image of this shape, if there was one."""
        shapes = self.marks.shapes
        return shapes[1] if shapes and shapes[0] == list(x.shape[1:]) else None

    # A step

    def refuses(self, loss: float, gradient: float) -> bool:
        """Note the loss of a step; return True if its gradient norm is a reason to skip it."""
        self.loss = loss
        reasons = [rule.before(gradient, memory) for rule, memory in self._rules()]
        for reason in filter(None, reasons):
            self._report("skipped", f"a step was left out: {reason}")
        return any(reasons)

    def step_taken(self, *, finite: bool) -> list[Decision]:
        """Judge a step by whether the parameters are still finite."""
        self.marks.stuck = 0
        return [] if finite else self.roll_back("a parameter was no longer finite")

    def gradient_failed(self) -> list[Decision]:
        """Judge a gradient that is not finite; several in a row mean that something remembered is not finite."""
        self.marks.stuck += 1
        if self.marks.stuck < MAX_BAD_GRADIENTS:
            return []
        self.marks.stuck = 0
        return self.roll_back(f"{MAX_BAD_GRADIENTS} gradients in a row were not finite")

    # A whole batch

    def count(self, n: int) -> None:
        """Count a batch of n images."""
        self.marks.images += n
        self.marks.batches += 1

    def compares(self, n: int) -> bool:
        """Return True if the batch of n images that was just counted is to be compared with the frozen source."""
        m, only_alarm = self.marks, self.rules == (self.alarm,)
        regular = m.images - n < m.checking or m.batches % self.guard.compare == 0
        return m.state != "healthy" or (regular and not only_alarm)

    def measures_drift(self, n: int) -> bool:
        """Return True if a window ended within the last n images."""
        return self.marks.images // self.guard.window > (self.marks.images - n) // self.guard.window

    @property
    def measures_features(self) -> bool:
        """True if the drift alarm wants moments of features; not of the first batch, which runs on copies."""
        m = self.marks
        return self.alarm is not None and m.images > 0 and (m.images < self.guard.window or m.batches % 2 == 1)

    @property
    def moments(self) -> PooledMoments:
        """Pooled moments of features, for the drift alarm."""
        self._rules()
        moments = self.memory[-1]
        assert isinstance(moments, PooledMoments)
        return moments

    def judge(self, signals: BatchSignals) -> Verdict:
        """Judge a batch, and say who answers it."""
        m, was, n = self.marks, self.marks.state, len(signals.probs)
        self.loss = None
        wanted = [rule.after(signals, memory, m.numbers) for rule, memory in self._rules()]
        decisions = self._decide([action for action in wanted if action is not None], n)
        compared = signals.source is not None
        if compared and "fallback" in (was, m.state):
            return Verdict(decisions, True)
        if compared and m.state == "healthy" and m.images - m.last >= self.guard.window:
            m.last = m.images
            decisions.append(Decision("keep"))
        return Verdict(decisions, False)

    def _rules(self) -> list[tuple[Rule, nn.Module]]:
        if not self.memory:
            self.memory = nn.ModuleList(rule.init(self._classes) for rule in self.rules)
            if self.alarm is not None:
                self.memory.append(PooledMoments(self._layers, self.alarm.memory))
        return list(zip(self.rules, self.memory, strict=False))

    def _decide(self, wanted: list[Action], n: int) -> list[Decision]:
        """Turn the rules' actions into decisions, depending on the state."""
        m, decisions = self.marks, list[Decision]()
        by_kind = {action.kind: action for action in wanted}
        if "drift" in by_kind:
            self._report("drift", by_kind["drift"].reason)
        if m.state not in FROZEN:
            decisions += self._parameter_moves(wanted)
        if "reset" in by_kind:
            self._restart_comparisons()
            self._report("reset", by_kind["reset"].reason)
            decisions.append(Decision("restart"))
        worst = by_kind.get("fallback") or by_kind.get("rollback") or by_kind.get("suspect")
        if worst is not None and m.state in ("healthy", "suspect", "probation"):
            decisions += self._escalate(worst)
        elif worst is not None and m.images - m.since >= self.guard.window // 4:
            decisions += self.fall_back(worst.reason)  # the rollback or the retry did not help
        elif worst is None:
            self._recover(n)
            if "check" in by_kind and m.images > m.checking and m.state == "healthy":
                m.checking = m.images + self.guard.window
                self._restart_comparisons()
        return decisions

    def _parameter_moves(self, wanted: list[Action]) -> list[Decision]:
        decisions = []
        for action in wanted:
            if action.kind in ("pull", "restore", "part"):
                decisions.append(Decision(action.kind, action.share))
                if action.kind != "restore" and action.reason:
                    self._report("pull", action.reason)
        return decisions

    def _escalate(self, bad: Action) -> list[Decision]:
        m = self.marks
        if bad.kind == "fallback":
            return self.fall_back(bad.reason)
        if bad.kind == "rollback" or (m.state == "suspect" and m.images - m.since >= self.guard.window // 2):
            return self.roll_back(bad.reason)
        if m.state == "suspect":
            m.good = 0
        else:
            m.before = m.state
            self._enter("suspect", bad.reason)
            self._report("suspect", bad.reason)
        return []

    def _recover(self, n: int) -> None:
        """Count n images without a bad sign."""
        m, guard = self.marks, self.guard
        m.good += n
        if m.state == "suspect" and m.good >= guard.window // 4:
            self._enter(m.before, "the suspicion was not confirmed")
        elif m.state in ("rolled back", "fallback") and m.images >= m.until:
            self._enter("probation", f"the cool-down after: {m.reason}")
            self._restart_comparisons()
        elif m.state == "probation" and m.good >= guard.probation * guard.window:
            self._enter("healthy", "")
            log.info("after %d images: healthy again", m.images)
        elif m.state == "healthy" and m.good >= 10 * guard.window:
            m.cooldown, m.reason = guard.window, ""

    # Changes of state

    def roll_back(self, reason: str) -> list[Decision]:
        """Decide to return to the last good state; during a fallback, to restart in the background."""
        if self.marks.state == "fallback":
            return self.fall_back(reason)
        self._cool_down("rolled back", reason)
        self._report("rollback", reason)
        return [Decision("rollback")]

    def fall_back(self, reason: str) -> list[Decision]:
        """Decide to let the source predict, and to restart from it."""
        self._cool_down("fallback", reason)
        self._report("fallback", reason)
        return [Decision("restart")]

    def _enter(self, state: str, reason: str) -> None:
        m = self.marks
        m.state, m.reason, m.since, m.good = state, reason, m.images, 0

    def _cool_down(self, state: str, reason: str) -> None:
        m = self.marks
        self._enter(state, reason)
        self._restart_comparisons()
        m.until = m.images + m.cooldown
        m.cooldown = min(2 * m.cooldown, MAX_COOLDOWN * self.guard.window)

    def _restart_comparisons(self) -> None:
        for rule, memory in self._rules():
            rule.restart(memory)

    def _report(self, name: str, reason: str) -> None:
        m = self.marks
        m.events[name] += 1
        level = logging.WARNING if name in ("rollback", "fallback", "quarantined", "drift") else logging.INFO
        log.log(level, "after %d images: %s: %s", m.images, name, reason)
        if self.guard.notify is not None:
            self.pending.append(Event(name, reason, m.images, m.state, dict(m.numbers)))
