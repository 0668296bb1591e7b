"""A batch under a guard: bad rows, answers that are not finite, signals for the monitor, and the frozen source."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.core.isolation import undisturbed
from trueup.finite import LARGEST, NotFiniteError
from trueup.guard.drift_alarm import SeenMoments, watching_moments
from trueup.guard.monitor import Monitor
from trueup.guard.rules import batch_signals
from trueup.model.calls import as_logits, call_model
from trueup.model.split_model import SplitModel

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter

MAX_LOGIT_NORM = 1e18  # squares of larger norms overflow in float32


def answer_good_rows(adapter: Adapter, monitor: Monitor, x: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
    """Answer the good rows of a batch; bad ones get logits of zero."""
    bad, usual = bad_rows(x, monitor.guard.largest, monitor.marks.usual)
    if bool(bad.all()):
        if not adapter.built:
            raise ValueError("no row of the first batch can be used: its values are NaN, infinite or too large")
        monitor.refuse_all(x.detach().abs().flatten(1).amax(dim=1))
        answers = None
    else:
        measures = monitor.measures_features and not adapter.net.runner.settings.compile
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

    If the source has finite answers to all rows, adaptation failed: the adapter is rolled back and tries again.
    Otherwise the rows to which the source has none are left out.
    """
    refused = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    try:
        return answer(x), refused
    except NotFiniteError:
        if not adapter.built or adapter.undo is None:
            raise
    adapter.undo.roll_back()
    monitor.seen.clear()  # moments of the failed pass
    theirs = source_logits(adapter, x)
    refused = ~(torch.linalg.vector_norm(theirs.flatten(1), dim=1) < MAX_LOGIT_NORM)
    if not bool(refused.any()):
        adapter.act(monitor.roll_back("the answer was not finite"))
    elif bool(refused.all()):
        return None, refused
    marks, steps = copy.deepcopy(monitor.marks), dict(vars(adapter.net.runner.steps))
    try:
        return answer(x[~refused]), refused
    except NotFiniteError:
        monitor.marks = marks  # the restart below resets the rest
        vars(adapter.net.runner.steps).update(steps)
        adapter.act(monitor.fall_back("there is no answer that is finite"))
    return source_logits(adapter, x[~refused]), refused


def judged_answer(adapter: Adapter, monitor: Monitor, x: Tensor, answer: Tensor) -> Tensor:
    """Pass signals to the monitor, act on its decisions, and return the adapter's answer or the source's."""
    n = len(x)
    monitor.count(n)
    theirs = source_logits(adapter, x) if monitor.compares(n) else None
    if not bool(answer.isfinite().all()):
        adapter.act(monitor.roll_back("the answer was not finite"))
        return source_logits(adapter, x).to(answer.dtype)
    if theirs is not None and not bool(theirs.isfinite().all()):
        theirs = None  # it cannot be compared
    updates, weights = adapter.net.runner.steps.count, adapter.fresh.weights
    step: dict[str, Any] = {"multilabel": adapter.multilabel, "updates": updates, "loss": monitor.loss}
    source = None if theirs is None else batch_signals(theirs, source=None, drift=None, **step)
    drift = parameter_drift(adapter.net, weights) if monitor.measures_drift(n) else None
    features = None
    if monitor.seen:
        monitor.moments.add(adapter.net.model, monitor.seen, monitor.marks.images)
        features = monitor.moments.shift(adapter.net.model, weights)
    verdict = monitor.judge(batch_signals(answer, source=source, drift=drift, features=features, **step))
    adapter.act(verdict.decisions)
    return theirs.to(answer.dtype) if theirs is not None and verdict.source_answers else answer


def bad_rows(x: Tensor, times: float, usual: float) -> tuple[Tensor, float]:
    """Return a mask of rows to refuse, and the usual size of a row's largest value, updated by this batch.

    Rows are bad if a value is not finite, beyond 1e12, or more than `times` the usual. The usual size never falls, or
    dark images would make bright ones look huge, and it rises at most tenfold per batch. The first batch uses the
    lower quartile of its rows; sizes below 1 count as 1.
    """
    sizes = x.detach().abs().flatten(1).amax(dim=1).float()
    bad = ~(sizes <= LARGEST)
    fine = sorted(sizes[~bad].tolist())
    reference = max(1.0, usual or (fine[(len(fine) - 1) // 4] if fine else 0.0))
    bad |= sizes > times * reference
    fine = sorted(sizes[~bad].tolist())
    return bad, max(usual, min(fine[(len(fine) - 1) // 2], 10 * reference)) if fine else usual


# The frozen source


class Answer(NamedTuple):
    """The adapter's answer to a batch, and the frozen source's."""

    adapted: Tensor
    source: Tensor


@torch.no_grad()
def source_logits(adapter: Adapter, x: Tensor) -> Tensor:
    """Return the answer of the network with the source's weights, in the adapter's precision; nothing changes."""
    net, source = adapter.net, adapter.fresh.weights if adapter.built else {}
    model = net.runner.without_caches()
    buffers = dict(model.named_buffers())
    weights = {name: t.clone() if name in buffers else t for name, t in source.items()}
    with undisturbed(x.device), net.runner.settings.autocast(x.device.type):
        answer = call_model(lambda *args, **kwargs: torch.func.functional_call(model, weights, args, kwargs), x)
    logits = as_logits(answer, net.runner.output, rows=len(x), min_channels=1 if net.multilabel else 2)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def last_numbers(answers: Tensor, source: Tensor | None = None, *, multilabel: bool) -> dict[str, Tensor]:
    """Return the mean entropy as a fraction of its maximum, and the agreement with the source; without a device sync.

    Each label of a multi-label model counts as two classes.
    """
    if multilabel:
        answers = torch.stack((torch.zeros_like(answers), answers), dim=1)
    log_p = F.log_softmax(answers.detach().float(), dim=1)
    numbers = {"entropy": -(log_p.exp() * log_p).sum(dim=1).mean() / math.log(answers.shape[1])}
    if source is not None:
        theirs = source > 0 if multilabel else source.argmax(dim=1)
        numbers["agreement"] = (log_p.argmax(dim=1) == theirs).float().mean()
    return numbers


@torch.no_grad()
def parameter_drift(net: SplitModel, source: Mapping[str, Tensor]) -> float:
    """Return the distance of the selected parameters from the source, relative to their norm."""
    ours = net.selected
    if not ours:
        return 0.0
    distance = torch.nn.utils.get_total_norm([p - source[name] for name, p in ours.items()])
    return float(distance / torch.nn.utils.get_total_norm([source[name] for name in ours]).clamp(min=1e-12))


@torch.no_grad()
def pull(net: SplitModel, source: Mapping[str, Tensor], share: float) -> None:
    """Move the selected parameters a share of the way to the source."""
    for name, p in net.selected.items():
        p.lerp_(source[name], share)


@torch.no_grad()
def restore_some(net: SplitModel, source: Mapping[str, Tensor], chance: float) -> None:
    """Set each value of the selected parameters to the source's with this chance."""
    for name, p in net.selected.items():
        p.copy_(torch.where(torch.rand_like(p) < chance, source[name], p))


@torch.no_grad()
def restore_part(net: SplitModel, source: Mapping[str, Tensor], share: float) -> None:
    """Set the selected parameters of the last share of the layers to the source's."""
    names = list(net.selected)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    last = set(layers[len(layers) - round(share * len(layers)) :])
    for name in names:
        if name.rpartition(".")[0] in last:
            net.selected[name].copy_(source[name])


MOVES = {"pull": pull, "restore": restore_some, "part": restore_part}
"""Ways of moving parameters towards the source, by the kind of a guard's decision."""
