"""Rules of a guard: each looks at what a batch did and may ask for something. They watch; the guard acts.

The thresholds of the first five were chosen on the embedded benchmark (docs/trust.md); the others are published rules,
which can be tried with any method.
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
MANY = 64  # images that a comparison with the source needs
LITTLE = 0.02  # a difference of entropies that means nothing


@dataclass(frozen=True)
class Action:
    """What a rule asks for, and why.

    check: compare with the source. suspect: learn nothing until it is clear. rollback: to the last good state.
    fallback: let the source answer, since going back would not help. reset: to the source. pull: `share` of the way to
    the source. restore: each value to the source's with the chance `share`. part: the last `share` of the layers.
    drift: nothing; it is told.
    """

    kind: Kind
    reason: str
    share: float = 0.0


@dataclass(frozen=True)
class BatchSignals:
    """What rules see of a batch: the model's answers, the frozen source's where they were compared, and the step."""

    probs: Tensor
    """(N, C): of each image, the mean over its pixels or labels where it has several."""
    classes: Tensor
    """(N, ...): predicted."""
    named: Tensor
    """(C,): how many images are said to be of each class, or parts of them where each pixel has one."""
    mean_logits: Tensor
    """(C,): of the batch."""
    entropy: float
    """Mean of that of each answer, in parts of the greatest."""
    source: BatchSignals | None
    loss: float | None
    updates: int
    """Steps so far."""
    drift: float | None
    """How far the parameters are from the source, in parts of their norm; where it was measured."""
    features: FeatureShift | None = None
    """How far the features are from the source's; where it was measured."""


def batch_signals(logits: Tensor, *, multilabel: bool = False, **step: Any) -> BatchSignals:
    """The signs of answers (N, C) or (N, C, ...); of several labels each is a problem of two classes, like a pixel."""
    logits = logits.detach().float()
    if multilabel:
        logits = torch.stack((torch.zeros_like(logits), logits), dim=1)
    log_p = F.log_softmax(logits, dim=1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(dim=1).mean() / math.log(logits.shape[1])
    flat = p.flatten(2).mean(dim=2) if p.ndim > 2 else p
    middle = logits.transpose(0, 1).flatten(1).mean(dim=1)
    classes = logits.argmax(dim=1)
    named = classes.flatten().bincount(minlength=logits.shape[1]) * (len(classes) / classes.numel())
    return BatchSignals(flat.cpu(), classes, named.cpu(), middle.cpu(), float(entropy), **step)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Base of all rules: hyper-parameters with two hooks. What a rule remembers is in the buffers of its state."""

    def init(self, classes: int) -> nn.Module:
        """What the rule remembers, before any batch."""
        return nn.Module()

    def before(self, gradient: float, state: Any) -> str | None:
        """Before a step: a reason to leave it out."""
        return None

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """After a batch: what to do, if anything; what it measures goes into `numbers`."""
        return None

    def restart(self, state: Any) -> None:
        """What was compared so far no longer counts: the model is another one now, or is under suspicion."""


def buffers(**values: Tensor) -> nn.Module:
    """A state of these buffers."""
    state = nn.Module()
    for name, value in values.items():
        state.register_buffer(name, value)
    return state


def diversity(probs: Tensor) -> float:
    """Entropy of the mean of predictions (C,), which need not be normalised."""
    p = probs / probs.sum().clamp(min=1e-12)
    return float(-(p * p.clamp(min=1e-12).log()).sum())


def sees(counts: Tensor, part: float) -> bool:
    """Whether a model sees more than one class: this part of the others, or of the images where those are fewer."""
    return math.exp(diversity(counts)) >= 1 + part * (min(len(counts), float(counts.sum())) - 1)


def fade(mean: Tensor, value: Tensor, n: int, memory: float) -> None:
    """A running sum in which an image counts e times less after each `memory` images."""
    mean.mul_(math.exp(-n / memory)).add_(value)


@dataclass(frozen=True, kw_only=True)
class Diversity(Rule):
    """The entropy of the mean prediction against the frozen source's on the same images.

    A collapsed model says one class of everything, where the source sees several; a stream that really has few classes
    shows few to both. There a model that is better than the source shows even fewer, so the limits are halved where
    the source sees less than half of the classes.
    """

    suspect: float = 0.65
    rollback: float = 0.35
    memory: float = 128.0
    """Images after which one counts e times less."""
    blind: float = 0.9
    """A source whose entropy is above this part of the greatest knows nothing to compare with."""

    def __post_init__(self) -> None:
        check_float("suspect", self.suspect, 0)
        check_float("rollback", self.rollback, 0, self.suspect)
        check_float("memory", self.memory, 1)
        check_float("blind", self.blind, 0, 1)

    def init(self, classes: int) -> nn.Module:
        """Sums of predictions of both, of probabilities and of classes, and how many they are."""
        zero = torch.zeros(classes)
        both = {name: zero.clone() for name in ("ours", "theirs", "said", "heard")}
        return buffers(free=zero, usual=torch.zeros(1), count=torch.zeros(1), same=torch.zeros(1), **both)

    def restart(self, state: Any) -> None:
        """Compare anew."""
        for name in ("ours", "theirs", "said", "heard", "same", "count"):
            getattr(state, name).zero_()

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Its own diversity costs nothing and asks for a comparison where it falls; the comparison decides."""
        n = len(signs.probs)
        fade(state.free, signs.probs.sum(dim=0), n, self.memory)
        free, usual = diversity(state.free), float(state.usual)
        numbers["effective_classes"] = math.exp(free)
        state.usual.fill_(max(free, usual + (free - usual) * min(1.0, n / 2048)))
        action = self._compared(signs, state, numbers, n) if signs.source is not None else None
        if action is None and free < 0.85 * usual:
            return Action("check", f"predictions have become less diverse ({math.exp(free):.1f} classes)")
        return action

    def _compared(self, signs: BatchSignals, state: Any, numbers: dict[str, float], n: int) -> Action | None:
        assert signs.source is not None
        fade(state.ours, signs.probs.sum(dim=0), n, self.memory)
        fade(state.theirs, signs.source.probs.sum(dim=0), n, self.memory)
        fade(state.said, signs.named, n, self.memory)
        fade(state.heard, signs.source.named, n, self.memory)
        fade(state.same, n * (signs.classes == signs.source.classes).float().mean().cpu(), n, self.memory)
        state.count.add_(n)
        ours, theirs = diversity(state.ours), diversity(state.theirs)
        ratio = ours / max(theirs, 1e-3)
        numbers["diversity_ratio"] = ratio
        if float(state.count) < MANY or signs.source.entropy > self.blind:
            return None
        seen = f"predicts {math.exp(ours):.1f} classes where the source sees {math.exp(theirs):.1f}"
        if diversity(state.heard) - diversity(state.said) < LITTLE:  # they name as many classes, more or less surely
            return None
        if signs.classes.ndim == 1 and float(state.same) > 0.5 * float(state.said.sum()):  # mostly they agree
            return None
        ratio *= 1 if sees(state.theirs, 0.5) else 2
        if ratio < self.rollback:
            return Action("rollback", seen)
        return Action("suspect", seen) if ratio < self.suspect else None


@dataclass(frozen=True, kw_only=True)
class Agreement(Rule):
    """How far predictions agree with the frozen source's beyond chance: Cohen's kappa, 0 for a constant answer.

    It counts only where the source itself sees many classes: one that a hard shift has broken is no measure.
    """

    suspect: float = 0.05
    rollback: float = 0.02
    memory: float = 128.0
    """Images after which one counts e times less."""
    sees: float = 0.4
    """Part of the classes beyond the first, or of the images that count, that the source must see."""

    def __post_init__(self) -> None:
        check_float("suspect", self.suspect, 0, 1)
        check_float("rollback", self.rollback, 0, self.suspect)
        check_float("memory", self.memory, 1)
        check_float("sees", self.sees, 0, 1)

    def init(self, classes: int) -> nn.Module:
        """Faded counts of equal predictions and of each class, and how many images were compared."""
        ours, theirs = torch.zeros(classes), torch.zeros(classes)
        return buffers(same=torch.zeros(1), ours=ours, theirs=theirs, count=torch.zeros(1))

    def restart(self, state: Any) -> None:
        """Compare anew."""
        for name in ("same", "ours", "theirs", "count"):
            getattr(state, name).zero_()

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Where the batch was compared."""
        if signs.source is None:
            return None
        n = len(signs.classes)
        fade(state.same, n * (signs.classes == signs.source.classes).float().mean().cpu(), n, self.memory)
        fade(state.ours, signs.named, n, self.memory)
        fade(state.theirs, signs.source.named, n, self.memory)
        state.count.add_(n)
        total = float(state.ours.sum())
        same, chance = float(state.same) / total, float((state.ours * state.theirs).sum()) / total**2
        kappa = (same - chance) / max(1 - chance, 1e-6)
        numbers["flip_rate"], numbers["agreement"] = 1 - same, kappa
        if float(state.count) < 2 * MANY or not sees(state.theirs, self.sees):
            return None
        said = f"agrees with the source on {same:.0%} of the images, by chance it would on {chance:.0%}"
        if kappa < self.rollback:
            return Action("rollback", said)
        return Action("suspect", said) if kappa < self.suspect else None


@dataclass(frozen=True, kw_only=True)
class Concentration(Rule):
    """Entropy of softmax(mean logit), the concentration that ASR watches: a fall of it asks for a comparison."""

    fall: float = 0.5
    """Part of its running mean below which it has fallen."""
    momentum: float = 0.05

    def __post_init__(self) -> None:
        check_float("fall", self.fall, 0, 1)
        check_float("momentum", self.momentum, 0, 1)

    def init(self, classes: int) -> nn.Module:
        """The running mean."""
        return buffers(mean=torch.full((1,), -1.0))

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """It costs nothing, and jumps with the classes of a batch, so it decides nothing."""
        now, mean = diversity(F.softmax(signs.mean_logits, dim=0)), float(state.mean)
        numbers["concentration"] = now
        state.mean.fill_(now if mean < 0 else mean + self.momentum * (now - mean))
        return Action("check", "the mean answer has become one-sided") if 0 <= now < self.fall * mean else None


@dataclass(frozen=True, kw_only=True)
class Spike(Rule):
    """A gradient far above the usual is left out: median + `deviations` median absolute deviations of the last ones."""

    deviations: float = 8.0
    history: int = 200
    least: int = 20
    """Steps to see before any is left out."""

    def __post_init__(self) -> None:
        check_float("deviations", self.deviations, 0)
        check_int("least", self.least, 1)
        check_int("history", self.history, self.least)

    def init(self, classes: int) -> nn.Module:
        """The last gradient norms, and how many there were."""
        return buffers(norms=torch.zeros(self.history, dtype=torch.float64), count=torch.tensor(0))

    def before(self, gradient: float, state: Any) -> str | None:
        """Whether the step is a usual one; what is left out is remembered, too, so that a lasting change passes."""
        count = int(state.count)
        seen = state.norms[: min(count, self.history)].clone()
        state.norms[count % self.history] = gradient
        state.count.add_(1)
        if count < self.least:
            return None
        median = seen.median()
        limit = float(median + self.deviations * (seen - median).abs().median().clamp(min=float(median) * 0.01))
        return f"its gradient is {gradient:.3g}, the usual {float(median):.3g}" if gradient > limit else None


@dataclass(frozen=True, kw_only=True)
class Drift(Rule):
    """How far the parameters have gone from the source; beyond the limit they are pulled back a little."""

    limit: float = 0.25
    pull: float = 0.1

    def __post_init__(self) -> None:
        check_float("limit", self.limit, 0)
        check_float("pull", self.pull, 0, 1)

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Where it was measured."""
        if signs.drift is None:
            return None
        numbers["drift"] = signs.drift
        far = f"parameters have moved by {signs.drift:.0%} of their norm"
        return Action("pull", far, self.pull) if signs.drift > self.limit else None


RULES: tuple[Rule, ...] = (Diversity(), Agreement(), Concentration(), Spike(), Drift())
