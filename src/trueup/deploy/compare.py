"""Several methods on a user's own model and images, side by side, with what can be said without labels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from trueup.augment import Pixels
from trueup.core.adapter import Adapter
from trueup.core.listening import heard
from trueup.core.method import Method
from trueup.core.split import Output, SplitModel

DRAWS, DROPPED, POWER, NEWEST = 10, 0.4, 3, 0.4  # AETTA: dropout passes and rate, exponent, part of the newest batch
FEWER = 0.65  # of the source's classes in use, below which a method counts as collapsed
STRANGE = 0.2  # agreement with the source below which something is wrong with one of the two
LEAD = 0.01  # by which an estimate must be ahead of the source's to be worth the trouble
Batches = Callable[[], Iterable[tuple[Tensor, NDArray[np.int64] | None]]]


@dataclass
class Sighting:
    """What was seen of a method, image by image."""

    probs: list[Tensor] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    """AETTA's estimate of the error after each batch."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Finding:
    """What can be said of a method on a stream; all are parts of 1 but for entropy (nats) and classes in use."""

    name: str
    agreement: float
    """Answers that are the source's."""
    entropy: float
    confidence: float
    """Mean of the highest probability: what a calibrated model's accuracy would be."""
    classes: float
    """In use: exp of the entropy of the mean prediction."""
    estimate: float | None
    """Of the accuracy, by AETTA; None where the answer is not the head's: T3A, LAME."""
    accuracy: float | None
    """Where there are labels."""
    seconds: float


@dataclass(frozen=True)
class Advice:
    """Which method to take, and why."""

    name: str
    reasons: tuple[str, ...]


def look(
    model: nn.Module, methods: Mapping[str, Method], batches: Batches, *, device: str = "cpu", seed: int = 0,
    pixels: Pixels | None = None, tick: Callable[[], None] = lambda: None,
) -> list[Finding]:  # fmt: skip
    """Run each method over the stream from a fresh copy of the model; the first must be the frozen source."""
    sightings: dict[str, Sighting] = {}
    labels: list[NDArray[np.int64]] = []
    for name, method in methods.items():
        sighting = sightings[name] = Sighting()
        judge = Aetta(seed)
        adapter = Adapter(model, heard(method, judge.hear), seed=seed, pixels=pixels).to(device)
        for x, y in batches():
            start = time.perf_counter()
            logits = adapter(x.to(device)).double().cpu()
            sighting.seconds += time.perf_counter() - start
            sighting.probs.append(F.softmax(logits, dim=1))
            sighting.errors += judge.errors[len(sighting.errors) :]
            if len(sightings) == 1 and y is not None:
                labels.append(y)
            tick()
    truth = torch.from_numpy(np.concatenate(labels)) if labels else None
    first = torch.cat(next(iter(sightings.values())).probs)
    return [_finding(name, sighting, first, truth) for name, sighting in sightings.items()]


def _finding(name: str, sighting: Sighting, source: Tensor, truth: Tensor | None) -> Finding:
    p = torch.cat(sighting.probs)
    answers, middle = p.argmax(dim=1), p.mean(dim=0)
    return Finding(
        name=name,
        agreement=float((answers == source.argmax(dim=1)).double().mean()),
        entropy=float(_entropy(p).mean()),
        confidence=float(p.max(dim=1).values.mean()),
        classes=math.exp(float(_entropy(middle[None])[0])),
        estimate=1 - float(np.mean(sighting.errors)) if sighting.errors else None,
        accuracy=float((answers == truth).double().mean()) if truth is not None and len(truth) == len(p) else None,
        seconds=sighting.seconds,
    )


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-30).log()).sum(dim=1)


class Aetta:
    """The error of a model without labels (Lee et al., CVPR 2024): how often dropout changes its answers.

    Where a model has collapsed it agrees with itself whatever is dropped, so the rate is divided by a power of how
    diverse its answers are. Differs: features are dropped before the head, not inside the network, so that any will do.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.errors: list[float] = []

    @torch.no_grad()
    def hear(self, net: SplitModel, out: Output, answer: Tensor) -> None:
        """Take an answer and the features that it was made of."""
        if net.head is None or out.features.ndim != 2 or not torch.equal(answer, out.logits):
            return  # dropping features says nothing of an answer that is not the head's
        named, features = out.logits.argmax(dim=1).cpu(), out.features
        total = torch.zeros(len(features), net.classes, dtype=torch.float64)
        changed = 0.0
        for _ in range(DRAWS):
            kept = (torch.rand(features.shape, generator=self.random) >= DROPPED).to(features) / (1 - DROPPED)
            p = F.softmax(net.classify(features * kept).double().cpu(), dim=1)
            changed += float((p.argmax(dim=1) != named).double().mean()) / DRAWS
            total += p / DRAWS
        diversity = float(_entropy(total.mean(dim=0)[None])[0]) / math.log(net.classes)
        error = min(1 - 1 / net.classes, changed / max(diversity, 1e-6) ** POWER)
        last = self.errors[-1] if self.errors else error
        self.errors.append((1 - NEWEST) * last + NEWEST * error)


def advise(findings: Sequence[Finding]) -> Advice:
    """The method with the best estimate among those that show no sign of collapse; the source, if none is ahead."""
    source, *others = findings
    refused, fit = [], []
    for finding in others:
        if finding.classes < FEWER * source.classes:
            refused.append(
                f"{finding.name} uses {finding.classes:.1f} classes where the source uses {source.classes:.1f}"
            )
        elif finding.agreement < STRANGE:
            refused.append(f"{finding.name} agrees with the source in only {finding.agreement:.0%} of its answers")
        else:
            fit.append(finding)
    scored = [f for f in fit if f.estimate is not None]
    if source.estimate is None or not scored:
        return Advice(source.name, ("nothing can be estimated without labels here", *refused))
    best = max(scored, key=lambda f: f.estimate or 0.0)
    ahead = (best.estimate or 0.0) - source.estimate
    if ahead < LEAD:
        return Advice(source.name, (f"no method's estimate is ahead of its {source.estimate:.1%} by a point", *refused))
    reasons = [
        f"its estimated accuracy is {best.estimate:.1%}, the source's {source.estimate:.1%}",
        f"it uses {best.classes:.1f} classes (source {source.classes:.1f})",
        f"it agrees with the source in {best.agreement:.0%} of its answers",
    ]
    return Advice(best.name, (*reasons, *refused))
