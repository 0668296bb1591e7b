"""A batch under a guard: rows that must not enter, answers that are not finite, and signals for the monitor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trueup.core.frozen_source import parameter_drift, source_logits
from trueup.finite import NotFiniteError, bad_rows
from trueup.guard.drift_alarm import FeatureShift, SeenMoments, watching_moments
from trueup.guard.monitor import Monitor
from trueup.guard.rules import batch_signals

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter

VAST = 1e18  # logits beyond this have squares that are not finite


def answer_good_rows(adapter: Adapter, monitor: Monitor, x: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
    """Answer a batch; a row that must not enter gets logits of zero and disturbs no other."""
    bad, usual = bad_rows(x, monitor.guard.largest, monitor.marks.usual)
    if bool(bad.all()):
        if not adapter.built:
            raise ValueError("no row of the first batch can be used: its values are NaN, infinite or too large")
        monitor.refuse_all(x.detach().abs().flatten(1).amax(dim=1))
        answers = None
    else:
        measures = monitor.measures_features and not adapter.net.engine.compile
        watched: AbstractContextManager[SeenMoments] = (
            watching_moments(adapter.net.model) if measures else nullcontext([])
        )
        with watched as monitor.seen:
            answers, refused = _answer_finite(adapter, monitor, x[~bad], answer)
        bad[~bad] = refused
        monitor.accept(usual)
    monitor.quarantine(bad.nonzero().flatten().tolist())
    if answers is None:
        shape = monitor.answer_shape(x) or [adapter.net.channels, *(x.shape[2:] if adapter.net.dense else ())]
        return x.new_zeros(len(x), *shape, dtype=torch.promote_types(x.dtype, torch.float32))
    monitor.marks.shapes = [list(x.shape[1:]), list(answers.shape[1:])]
    if not bool(bad.any()):
        return answers
    full = answers.new_zeros(len(x), *answers.shape[1:])
    full[~bad] = answers
    return full


def _answer_finite(
    adapter: Adapter, monitor: Monitor, x: Tensor, answer: Callable[[Tensor], Tensor]
) -> tuple[Tensor | None, Tensor]:
    """Return answers to the rows that have a finite one, and a mask of the rows that have none.

    Rows to which the source has no finite answer either are left out. If it has one to all, adaptation went wrong, and
    the adapter is rolled back before it tries again.
    """
    refused = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    try:
        return answer(x), refused
    except NotFiniteError:
        if not adapter.built or adapter.undo is None:
            raise
    adapter.undo.roll_back()
    theirs = source_logits(adapter.net, adapter.source, x)
    refused = ~(torch.linalg.vector_norm(theirs.flatten(1), dim=1) < VAST)
    if not bool(refused.any()):
        adapter.act(monitor.roll_back("the answer was not finite"))
    elif bool(refused.all()):
        return None, refused
    marks, steps = copy.deepcopy(monitor.marks), dict(vars(adapter.net.steps))
    try:
        return answer(x[~refused]), refused
    except NotFiniteError:
        monitor.marks = marks  # the rest of the state starts afresh
        vars(adapter.net.steps).update(steps)
        adapter.act(monitor.fall_back("there is no answer that is finite"))
    return source_logits(adapter.net, adapter.source, x[~refused]), refused


def judged_answer(adapter: Adapter, monitor: Monitor, x: Tensor, answer: Tensor) -> Tensor:
    """Let the monitor judge an answer, act on its decisions, and return who answers: the adapter or the source."""
    n = len(x)
    monitor.count(n)
    theirs = source_logits(adapter.net, adapter.source, x) if monitor.compares(n) else None
    if not bool(answer.isfinite().all()):
        adapter.act(monitor.roll_back("what is remembered gave an answer that is not finite"))
        return source_logits(adapter.net, adapter.source, x).to(answer.dtype)
    if theirs is not None and not bool(theirs.isfinite().all()):
        theirs = None  # it cannot be compared with
    step: dict[str, Any] = {"multilabel": adapter.multilabel, "updates": adapter.updates, "loss": monitor.loss}
    source = None if theirs is None else batch_signals(theirs, source=None, drift=None, **step)
    drift = parameter_drift(adapter.net, adapter.source) if monitor.measures_drift(n) else None
    features = _feature_shift(adapter, monitor)
    verdict = monitor.judge(batch_signals(answer, source=source, drift=drift, features=features, **step))
    adapter.act(verdict.decisions)
    return theirs.to(answer.dtype) if theirs is not None and verdict.source_answers else answer


def _feature_shift(adapter: Adapter, monitor: Monitor) -> FeatureShift | None:
    """Pool the moments of this batch, and compare them with the source's."""
    if not monitor.seen:
        return None
    monitor.moments.take(adapter.net.model, monitor.seen, monitor.marks.images)
    return monitor.moments.shift(adapter.net.model, adapter.source)
