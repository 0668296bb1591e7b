"""The guard: watches an adapter, freezes it under suspicion, takes it back when it went astray, lets the source answer.

healthy → suspect (nothing is learnt) → rolled back (to the last good state, and nothing is learnt for a while) →
fallback (the source answers, while the adapter tries again unseen) → probation (under close watch) → healthy.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from trueup.core.copying import move_state
from trueup.core.frozen_source import drift, pull, restore_part, restore_some, source_logits
from trueup.core.moments import Moment, back_to, remember
from trueup.finite import LARGEST, NotFiniteError, bad_rows
from trueup.guard.config import Event, Guard, Health
from trueup.guard.drift_alarm import FeatureShift, PooledMoments, SeenMoments, Shift, watching_moments
from trueup.guard.rules import Action, Rule, batch_signals

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter

log = logging.getLogger("trueup.guard")

STATES = ("healthy", "suspect", "rolled back", "fallback", "probation")
FROZEN = ("suspect", "rolled back")  # nothing is learnt
EVENTS = ("suspect", "rollback", "fallback", "reset", "pull", "skipped", "quarantined", "drift")
VAST = 1e18  # logits beyond this have squares that are not finite
STUCK = 3  # gradients that are not finite, one after another
LONGEST = 16  # times its length that a cool-down may grow to


class Monitor:
    """A guard at work on one adapter. All it remembers is in `marks` (plain values), `memory` (buffers), `kept`."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.memory = nn.ModuleList()
        self.kept: list[Moment] = []
        self.marks: dict[str, Any] = {}
        self.loss: float | None = None
        self.told: list[Event] = []  # events of which nobody has been notified yet
        self._alarm = next((rule for rule in guard.rules if isinstance(rule, Shift)), None)
        self._alone = guard.every_rule == (self._alarm,)  # then there is nothing to compare, and nowhere to go back to
        self._seen: SeenMoments = []
        self.restart()

    def restart(self) -> None:
        """As before the first batch."""
        self.kept = []
        self.memory = nn.ModuleList()
        self.marks = {
            "state": "healthy", "reason": "", "images": 0, "batches": 0, "since": 0, "good": 0, "until": 0,
            "checking": self.guard.window, "cooldown": self.guard.window, "last": 0,
            "before": "healthy", "usual": 0.0, "refused": 0, "stuck": 0, "shapes": [],
            "numbers": {}, "events": dict.fromkeys(EVENTS, 0), "quarantined": [],
        }  # fmt: skip

    def load(self, adapter: Adapter, marks: dict[str, Any], memory: dict[str, Tensor]) -> None:
        """What was remembered, from a file."""
        fresh = self.marks
        marks = {**marks, "events": {"drift": 0, **marks["events"]}}  # older files do not have it
        fits = marks.keys() == fresh.keys() and marks["state"] in STATES and marks["before"] in STATES
        fits = fits and all(
            isinstance(marks[name], int | float if name == "usual" else type(fresh[name])) for name in fresh
        )
        if not fits or marks["events"].keys() != fresh["events"].keys():
            raise ValueError("the guard's marks are none")
        self.marks, self.memory = marks, nn.ModuleList()
        if memory:
            self._rules(adapter)
            self.memory.load_state_dict(memory)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Let kept states follow the model to its device or precision; an optimiser's follow when they are loaded."""
        for moment in self.kept:
            moment.net = {name: fn(t) for name, t in moment.net.items()}
            move_state(moment.state, fn)

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
        if bool(bad.all()):
            if not adapter._built:
                raise ValueError("no row of the first batch can be used: its values are NaN, infinite or too large")
            self._relearn(x)
            answers = None
        else:
            with watching_moments(adapter.net.model, active=self._measures(adapter)) as self._seen:
                answers, worse = self._answered(adapter, x[~bad])
            bad[~bad] = worse
            self.marks["usual"], self.marks["refused"] = usual, 0
        self.marks["quarantined"] = bad.nonzero().flatten().tolist()
        if self.marks["quarantined"]:
            rows = self.marks["quarantined"][:10]
            self._tell("quarantined", f"rows {rows} hold values that are NaN, infinite or too large")
        if answers is None:
            shape = [adapter.net.channels, *x.shape[2:]] if adapter.net.dense else [adapter.net.channels]
            seen, said = self.marks["shapes"] or [None, None]
            shape = said if seen == list(x.shape[1:]) else shape
            return x.new_zeros(len(x), *shape, dtype=torch.promote_types(x.dtype, torch.float32))
        self.marks["shapes"] = [list(x.shape[1:]), list(answers.shape[1:])]
        if not bool(bad.any()):
            return answers
        full = answers.new_zeros(len(x), *answers.shape[1:])
        full[~bad] = answers
        return full

    def _relearn(self, x: Tensor) -> None:
        """Where everything has been too large for a while, that is the usual now: nothing is shut out for ever."""
        sizes = x.detach().abs().flatten(1).amax(dim=1)
        if bool((sizes <= LARGEST).all()):
            self.marks["refused"] += len(x)
            if self.marks["refused"] >= self.guard.window // 4:
                self.marks["usual"], self.marks["refused"] = float(sizes.median()), 0

    def _answered(self, adapter: Adapter, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Answers to the rows that have one, and which have none; go back where only the adapted model has none."""
        none = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        try:
            return adapter._answer(x), none
        except NotFiniteError:
            if not adapter._built or adapter._undo is None:
                raise
        adapter._undo.roll_back()
        none = ~(torch.linalg.vector_norm(source_logits(adapter, x).flatten(1), dim=1) < VAST)
        if not bool(none.any()):
            self._roll_back(adapter, "the answer was not finite")
        elif bool(none.all()):
            return None, none
        marks, steps = copy.deepcopy(self.marks), dict(vars(adapter.net.runner.steps))
        try:
            return adapter._answer(x[~none]), none
        except NotFiniteError:
            self.marks = marks  # the rest of the state starts afresh
            vars(adapter.net.runner.steps).update(steps)
            self._fall_back(adapter, "there is no answer that is finite")
        return source_logits(adapter, x[~none]), none

    # Around a step

    def refuses(self, adapter: Adapter, loss: float, gradient: float) -> bool:
        """Whether a step is to be left out."""
        self.loss = loss
        reasons = [rule.before(gradient, memory) for rule, memory in self._rules(adapter)]
        for reason in filter(None, reasons):
            self._tell("skipped", f"a step was left out: {reason}")
        return any(reasons)

    def stepped(self, adapter: Adapter) -> None:
        """After a step: what is no longer finite is taken back at once."""
        self.marks["stuck"] = 0
        assert adapter._optimizer is not None
        moved = [p.detach() for group in adapter._optimizer.param_groups for p in group["params"]]
        if not bool(torch.nn.utils.get_total_norm(moved).isfinite()):
            self._roll_back(adapter, "a parameter was no longer finite")

    def stuck(self, adapter: Adapter) -> None:
        """A gradient was not finite; when that happens time after time, something that is remembered is not."""
        self.marks["stuck"] += 1
        if self.marks["stuck"] >= STUCK:
            self.marks["stuck"] = 0
            self._roll_back(adapter, f"{STUCK} gradients after another were not finite")

    # After a batch

    def after(self, adapter: Adapter, x: Tensor, answer: Tensor) -> Tensor:
        """Look at what a batch did, act, and say what to answer: the adapter's answer, or the source's."""
        m, n = self.marks, len(x)
        m["images"] += n
        m["batches"] += 1
        theirs = source_logits(adapter, x) if self._compares(n) else None
        if not bool(answer.isfinite().all()):
            self._roll_back(adapter, "what is remembered gave an answer that is not finite")
            return source_logits(adapter, x).to(answer.dtype)
        if theirs is not None and not bool(theirs.isfinite().all()):
            theirs = None  # it cannot be compared with
        whole_window = m["images"] // self.guard.window > (m["images"] - n) // self.guard.window
        kind: dict[str, Any] = {"multilabel": adapter.multilabel, "updates": adapter.updates, "loss": self.loss}
        source = None if theirs is None else batch_signals(theirs, source=None, drift=None, **kind)
        kind |= {"drift": drift(adapter) if whole_window else None, "features": self._features(adapter)}
        seen = batch_signals(answer, source=source, **kind)
        self.loss = None
        numbers: dict[str, float] = m["numbers"]
        wanted = [rule.after(seen, memory, numbers) for rule, memory in self._rules(adapter)]
        was = m["state"]
        self._act(adapter, [action for action in wanted if action is not None], n)
        if theirs is not None and "fallback" in (was, m["state"]):
            return theirs.to(answer.dtype)
        if theirs is not None and m["state"] == "healthy" and m["images"] - m["last"] >= self.guard.window:
            self.kept, m["last"] = [*self.kept, remember(adapter)][-2:], m["images"]
        return answer

    def _compares(self, n: int) -> bool:
        m = self.marks
        regular = m["images"] - n < m["checking"] or m["batches"] % self.guard.compare == 0
        return bool(m["state"] != "healthy" or (regular and not self._alone))

    def _measures(self, adapter: Adapter) -> bool:
        """True if moments of features are measured: not in a graph, nor in the first batch, which is run on copies."""
        m, alarm = self.marks, self._alarm is not None and not adapter.net.runner.settings.compile
        return alarm and m["images"] > 0 and (m["images"] < self.guard.window or m["batches"] % 2 == 1)

    def _features(self, adapter: Adapter) -> FeatureShift | None:
        if not self._seen:
            return None
        self._rules(adapter)
        pooled = cast(PooledMoments, self.memory[-1])
        pooled.take(adapter.net.model, self._seen, self.marks["images"])
        return pooled.shift(adapter.net.model, adapter._source)

    def _rules(self, adapter: Adapter) -> list[tuple[Rule, nn.Module]]:
        if not self.memory:
            classes = 2 if adapter.multilabel else adapter.net.channels
            self.memory = nn.ModuleList(rule.init(classes) for rule in self.guard.every_rule)
            if self._alarm is not None:
                self.memory.append(PooledMoments(adapter.net.model, self._alarm.memory))
        return list(zip(self.guard.every_rule, self.memory, strict=False))

    def _act(self, adapter: Adapter, wanted: list[Action], n: int) -> None:
        m = self.marks
        by = {action.kind: action for action in wanted}
        if "drift" in by:
            self._tell("drift", by["drift"].reason)
        if wanted:
            adapter._expect_update()
        for action in wanted if m["state"] not in FROZEN else ():
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
        elif bad.kind == "rollback" or (m["state"] == "suspect" and m["images"] - m["since"] >= self.guard.window // 2):
            self._roll_back(adapter, bad.reason)
        elif m["state"] == "suspect":
            m["good"] = 0
        else:
            m["before"] = m["state"]
            self._enter("suspect", bad.reason)
            self._tell("suspect", bad.reason)

    def _recover(self, adapter: Adapter, n: int) -> None:
        """A batch without a sign."""
        m, guard = self.marks, self.guard
        m["good"] += n
        if m["state"] == "suspect" and m["good"] >= guard.window // 4:
            self._enter(m["before"], "the suspicion was not confirmed")
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
        """To the older of the last good states: the newer may have been taken when it had begun, and is given up."""
        if self.marks["state"] == "fallback":  # what went wrong is not what answers
            self._fall_back(adapter, reason)
            return
        self.kept = self.kept[:1]
        if self.kept:
            back_to(adapter, self.kept[0])
        else:
            adapter._restart()
        self._enter("rolled back", reason)
        self._cool_down()
        self._compare_anew(adapter)
        self._tell("rollback", reason)

    def _fall_back(self, adapter: Adapter, reason: str) -> None:
        adapter._restart()
        self.kept = []
        self._enter("fallback", reason)
        self._cool_down()
        self._compare_anew(adapter)
        self._tell("fallback", reason)

    def _reset(self, adapter: Adapter, reason: str) -> None:
        adapter._restart()
        self.kept = []
        self._compare_anew(adapter)
        self._tell("reset", reason)

    def _change(self, adapter: Adapter, action: Action) -> None:
        if action.kind == "pull":
            pull(adapter, action.share)
        elif action.kind == "restore":
            restore_some(adapter, action.share)
        elif action.kind == "part":
            restore_part(adapter, action.share)
        if action.kind in ("pull", "part") and action.reason:
            self._tell("pull", action.reason)

    def _compare_anew(self, adapter: Adapter) -> None:
        for rule, memory in self._rules(adapter):
            rule.restart(memory)

    def _tell(self, name: str, reason: str) -> None:
        m = self.marks
        m["events"][name] += 1
        level = logging.WARNING if name in ("rollback", "fallback", "quarantined", "drift") else logging.INFO
        log.log(level, "after %d images: %s: %s", m["images"], name, reason)
        if self.guard.notify is not None:
            self.told.append(Event(name, reason, m["images"], m["state"], dict(m["numbers"])))
