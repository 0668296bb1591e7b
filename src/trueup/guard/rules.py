"""Rules of a guard: each judges the signals of a batch and may request an action, which the guard carries out.

The default thresholds were chosen on the embedded benchmark (docs/trust.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.validate import check_float, check_int

if TYPE_CHECKING:
    from trueup.guard.drift_alarm import FeatureShift

Kind = Literal["check", "suspect", "rollback", "fallback", "reset", "pull", "restore", "part", "drift"]
MIN_COMPARED = 64  # images that a comparison with the source needs
NEGLIGIBLE = 0.02  # nats: differences in diversity below this mean nothing


@dataclass(frozen=True)
class Action:
    """A rule's request, with its reason.

    check: compare the next batches with the source. suspect: stop learning until the suspicion is cleared.
    rollback: restore the last good state. fallback: predict with the source, as a rollback would not help.
    reset: restore the source. pull: move all parameters by `share` of the way to the source. restore: restore each
    value to the source's with probability `share`. part: restore the last `share` of layers. drift: only report.
    """

    kind: Kind
    reason: str
    share: float = 0.0


@dataclass(frozen=True)
class BatchSignals:
    """Signals of a batch that rules judge: the model's predictions, the frozen source's if compared, and the step."""

    probs: Tensor
    """(N, C): probabilities of each image, averaged over its pixels or labels."""
    classes: Tensor
    """(N, ...): predicted classes."""
    class_counts: Tensor
    """(C,): number of images predicted as each class; fractions of images if each pixel or label has a class."""
    mean_logits: Tensor
    """(C,): mean over the batch."""
    entropy: float
    """Mean entropy of the predictions, as a fraction of its maximum."""
    source: BatchSignals | None
    """Signals of the frozen source on the same batch; None if not compared."""
    loss: float | None
    """Loss of the last step; None if there was none."""
    updates: int
    """Gradient steps so far."""
    drift: float | None
    """Distance of the parameters from the source, relative to their norm; None if not measured."""
    features: FeatureShift | None = None
    """Distance of the features from the source's; None if not measured."""

    @property
    def named(self) -> Tensor:
        """Name of `class_counts` until version 0.2."""
        return self.class_counts


def batch_signals(logits: Tensor, *, multilabel: bool = False, **step: Any) -> BatchSignals:
    """Compute the signals of logits (N, C) or (N, C, ...); with `multilabel`, each label is a pixel of two classes."""
    logits = logits.detach().float()
    if multilabel:
        logits = torch.stack((torch.zeros_like(logits), logits), dim=1)
    log_p = F.log_softmax(logits, dim=1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(dim=1).mean() / math.log(logits.shape[1])
    probs = p.flatten(2).mean(dim=2) if p.ndim > 2 else p
    mean_logits = logits.transpose(0, 1).flatten(1).mean(dim=1)
    classes = logits.argmax(dim=1)
    counts = classes.flatten().bincount(minlength=logits.shape[1]) * (len(classes) / classes.numel())
    return BatchSignals(probs.cpu(), classes, counts.cpu(), mean_logits.cpu(), float(entropy), **step)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Base of all rules: hyper-parameters with hooks. All memory of a rule is in the buffers of its state."""

    def init(self, classes: int) -> nn.Module:
        """Return the rule's state before any batch."""
        return nn.Module()

    def before(self, gradient: float, state: Any) -> str | None:
        """Judge a step by its gradient norm; return a reason to skip it, or None."""
        return None

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Judge a batch; return a request or None, and add measurements to `numbers`."""
        return None

    def restart(self, state: Any) -> None:
        """Forget comparisons with the source, as the model was replaced or comparing starts anew."""


def buffers(**values: Tensor) -> nn.Module:
    """Return a state with these buffers."""
    state = nn.Module()
    for name, value in values.items():
        state.register_buffer(name, value)
    return state


def diversity(probs: Tensor) -> float:
    """Return the entropy of the mean prediction (C,), which need not be normalised."""
    p = probs / probs.sum().clamp(min=1e-12)
    return float(-(p * p.clamp(min=1e-12).log()).sum())


def is_diverse(counts: Tensor, part: float) -> bool:
    """Return whether exp(entropy) - 1, the effective number of further classes, is at least `part` of its maximum."""
    return math.exp(diversity(counts)) >= 1 + part * (min(len(counts), float(counts.sum())) - 1)


def add_decayed(total: Tensor, value: Tensor, n: int, memory: float) -> None:
    """Add a batch of n images to a running sum, whose old values decay by a factor of e every `memory` images."""
    total.mul_(math.exp(-n / memory)).add_(value)


@dataclass(frozen=True, kw_only=True)
class Diversity(Rule):
    """The entropy of the mean prediction, relative to the frozen source's on the same images.

    A collapsed model predicts one class where the source predicts several. On a stream with few classes both predict
    few, and a model that is better than the source predicts even fewer; so the limits are halved if the source
    predicts less than half of the classes.
    """

    suspect: float = 0.65
    """Suspect the model below this ratio."""
    rollback: float = 0.35
    """Roll it back below this ratio."""
    memory: float = 128.0
    """Images after which the weight of an image has decayed by a factor of e."""
    blind: float = 0.9
    """A source whose entropy is above this fraction of the maximum is not compared with: it knows nothing."""

    def __post_init__(self) -> None:
        check_float("suspect", self.suspect, 0)
        check_float("rollback", self.rollback, 0, self.suspect)
        check_float("memory", self.memory, 1)
        check_float("blind", self.blind, 0, 1)

    def init(self, classes: int) -> nn.Module:
        """Return decayed sums of both models' probabilities and class counts, and the number of images compared."""
        zero = torch.zeros(classes)
        # Buffers are saved under these names: summed probabilities of the model and the source, then class counts.
        both = {name: zero.clone() for name in ("ours", "theirs", "said", "heard")}
        return buffers(free=zero, usual=torch.zeros(1), count=torch.zeros(1), same=torch.zeros(1), **both)

    def restart(self, state: Any) -> None:
        """Forget all comparisons."""
        for name in ("ours", "theirs", "said", "heard", "same", "count"):
            getattr(state, name).zero_()

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Request a check if the model's own diversity falls, which costs nothing; decide by the comparison."""
        n = len(signals.probs)
        add_decayed(state.free, signals.probs.sum(dim=0), n, self.memory)
        free, usual = diversity(state.free), float(state.usual)
        numbers["effective_classes"] = math.exp(free)
        state.usual.fill_(max(free, usual + (free - usual) * min(1.0, n / 2048)))
        action = self._compare(signals, state, numbers, n) if signals.source is not None else None
        if action is None and free < 0.85 * usual:
            return Action("check", f"predictions have become less diverse ({math.exp(free):.1f} classes)")
        return action

    def _compare(self, signals: BatchSignals, state: Any, numbers: dict[str, float], n: int) -> Action | None:
        assert signals.source is not None
        add_decayed(state.ours, signals.probs.sum(dim=0), n, self.memory)
        add_decayed(state.theirs, signals.source.probs.sum(dim=0), n, self.memory)
        add_decayed(state.said, signals.class_counts, n, self.memory)
        add_decayed(state.heard, signals.source.class_counts, n, self.memory)
        add_decayed(state.same, n * (signals.classes == signals.source.classes).float().mean().cpu(), n, self.memory)
        state.count.add_(n)
        ours, theirs = diversity(state.ours), diversity(state.theirs)
        ratio = ours / max(theirs, 1e-3)
        numbers["diversity_ratio"] = ratio
        if float(state.count) < MIN_COMPARED or signals.source.entropy > self.blind:
            return None
        if diversity(state.heard) - diversity(state.said) < NEGLIGIBLE:  # as many classes, only with other confidence
            return None
        if signals.classes.ndim == 1 and float(state.same) > 0.5 * float(state.said.sum()):  # most predictions agree
            return None
        ratio *= 1 if is_diverse(state.theirs, 0.5) else 2
        reason = f"predicts {math.exp(ours):.1f} classes where the source predicts {math.exp(theirs):.1f}"
        kind: Kind = "rollback" if ratio < self.rollback else "suspect"
        return Action(kind, reason) if ratio < self.suspect else None


@dataclass(frozen=True, kw_only=True)
class Agreement(Rule):
    """Agreement of predictions with the frozen source's beyond chance: Cohen's kappa, 0 for constant predictions.

    It counts only if the source predicts many classes: a source that fails on a hard shift is no reference.
    """

    suspect: float = 0.05
    """Suspect the model below this kappa."""
    rollback: float = 0.02
    """Roll it back below this kappa."""
    memory: float = 128.0
    """Images after which the weight of an image has decayed by a factor of e."""
    sees: float = 0.4
    """Part of the classes beyond the first (or of the images, if those are fewer) that the source must predict."""

    def __post_init__(self) -> None:
        check_float("suspect", self.suspect, 0, 1)
        check_float("rollback", self.rollback, 0, self.suspect)
        check_float("memory", self.memory, 1)
        check_float("sees", self.sees, 0, 1)

    def init(self, classes: int) -> nn.Module:
        """Return decayed counts of equal predictions and of each class, and the number of images compared."""
        ours, theirs = torch.zeros(classes), torch.zeros(classes)
        return buffers(same=torch.zeros(1), ours=ours, theirs=theirs, count=torch.zeros(1))

    def restart(self, state: Any) -> None:
        """Forget all comparisons."""
        for name in ("same", "ours", "theirs", "count"):
            getattr(state, name).zero_()

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Judge batches that were compared with the source."""
        if signals.source is None:
            return None
        n = len(signals.classes)
        add_decayed(state.same, n * (signals.classes == signals.source.classes).float().mean().cpu(), n, self.memory)
        add_decayed(state.ours, signals.class_counts, n, self.memory)
        add_decayed(state.theirs, signals.source.class_counts, n, self.memory)
        state.count.add_(n)
        total = float(state.ours.sum())
        same, chance = float(state.same) / total, float((state.ours * state.theirs).sum()) / total**2
        kappa = (same - chance) / max(1 - chance, 1e-6)
        numbers["flip_rate"], numbers["agreement"] = 1 - same, kappa
        if float(state.count) < 2 * MIN_COMPARED or not is_diverse(state.theirs, self.sees):
            return None
        reason = f"agrees with the source on {same:.0%} of the images, where chance alone gives {chance:.0%}"
        kind: Kind = "rollback" if kappa < self.rollback else "suspect"
        return Action(kind, reason) if kappa < self.suspect else None


@dataclass(frozen=True, kw_only=True)
class Concentration(Rule):
    """Entropy of softmax(mean logits), ASR's measure of concentration; a drop requests a check."""

    fall: float = 0.5
    """Request a check below this fraction of the running mean."""
    momentum: float = 0.05

    def __post_init__(self) -> None:
        check_float("fall", self.fall, 0, 1)
        check_float("momentum", self.momentum, 0, 1)

    def init(self, classes: int) -> nn.Module:
        """Return the running mean; negative before the first batch."""
        return buffers(mean=torch.full((1,), -1.0))

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Request a check at most: it costs nothing, but varies with the classes of a batch."""
        now, mean = diversity(F.softmax(signals.mean_logits, dim=0)), float(state.mean)
        numbers["concentration"] = now
        state.mean.fill_(now if mean < 0 else mean + self.momentum * (now - mean))
        return Action("check", "the mean prediction has become one-sided") if 0 <= now < self.fall * mean else None


@dataclass(frozen=True, kw_only=True)
class Spike(Rule):
    """Skip steps whose gradient norm is above the median + `deviations` median absolute deviations of recent ones."""

    deviations: float = 8.0
    history: int = 200
    least: int = 20
    """Steps to see before any is skipped."""

    def __post_init__(self) -> None:
        check_float("deviations", self.deviations, 0)
        check_int("least", self.least, 1)
        check_int("history", self.history, self.least)

    def init(self, classes: int) -> nn.Module:
        """Return the recent gradient norms and the number of steps."""
        return buffers(norms=torch.zeros(self.history, dtype=torch.float64), count=torch.tensor(0))

    def before(self, gradient: float, state: Any) -> str | None:
        """Judge the gradient norm and remember it, even if the step is skipped, so that a lasting change passes."""
        count = int(state.count)
        recent = state.norms[: min(count, self.history)].clone()
        state.norms[count % self.history] = gradient
        state.count.add_(1)
        if count < self.least:
            return None
        median = recent.median()
        limit = float(median + self.deviations * (recent - median).abs().median().clamp(min=float(median) * 0.01))
        return f"its gradient norm is {gradient:.3g}, the median {float(median):.3g}" if gradient > limit else None


@dataclass(frozen=True, kw_only=True)
class Drift(Rule):
    """Distance of the parameters from the source, relative to their norm; beyond the limit they are pulled to it."""

    limit: float = 0.25
    pull: float = 0.1

    def __post_init__(self) -> None:
        check_float("limit", self.limit, 0)
        check_float("pull", self.pull, 0, 1)

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Judge batches after which the distance was measured."""
        if signals.drift is None:
            return None
        numbers["drift"] = signals.drift
        reason = f"parameters have moved by {signals.drift:.0%} of their norm"
        return Action("pull", reason, self.pull) if signals.drift > self.limit else None


RULES: tuple[Rule, ...] = (Diversity(), Agreement(), Concentration(), Spike(), Drift())
