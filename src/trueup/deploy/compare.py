"""Several methods on a user's own model and images, side by side, with what can be said without labels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from trueup.augment import Pixels
from trueup.core.adapter import Adapter
from trueup.core.copying import copy_model
from trueup.core.listening import heard
from trueup.core.method import Method
from trueup.core.split import Output, SplitModel

DRAWS, DROPPED, POWER = 10, 0.4, 3  # AETTA: dropout passes and rate, exponent
EVEN = 8  # images of no class in particular that diversity starts from: one sure image is no collapse
FEWER = 0.65  # of the source's classes in use, below which a method counts as collapsed
STRANGE = 0.2  # agreement with the source below which something is wrong with one of the two
LEAD = 0.01  # by which a method must be ahead of the source to be worth the trouble
Batches = Callable[[], Iterable[tuple[Tensor, NDArray[np.int64] | None]]]


@dataclass
class Sighting:
    """What was seen of a method, image by image."""

    probs: list[Tensor] = field(default_factory=list)
    again: list[Tensor] = field(default_factory=list)
    """The answers of its second, disturbed run."""
    error: float | None = None
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
    aetta: float | None
    """Estimate of the accuracy by AETTA; None where an answer is not the head's: T3A, LAME."""
    gde: float | None
    """Estimate by generalised disagreement, for any answer; None where the model has no head."""
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
    """Run each method over the stream from a fresh copy of the model, and again from a disturbed one.

    The first method must be the frozen source. `tick` is called after each batch of each run.

    Two runs of training that differ by chance disagree about as often as each is wrong, if they are calibrated (Jiang
    et al., ICLR 2022). Differs: adaptation is run twice, not training; the second run has another seed, and features
    are dropped before its head, so that the frozen source and methods without chance have two runs, too.
    """
    head = _tried(model, methods, batches, pixels)
    sightings: dict[str, Sighting] = {}
    labels: list[NDArray[np.int64]] = []
    for name, method in methods.items():
        sighting, judge = Sighting(), Aetta(seed)
        adapter = Adapter(model, heard(method, judge.hear, judge.first), seed=seed, pixels=pixels).to(device)
        for x, y in batches():
            start = time.perf_counter()
            logits = adapter(x.to(device)).double().cpu()
            sighting.seconds += time.perf_counter() - start
            sighting.probs.append(F.softmax(logits, dim=1))
            if not sightings and y is not None:
                labels.append(y)
            tick()
        if head is not None:
            other = _disturbed(model, head, seed + 1)
            adapter = Adapter(other, method, head=head, seed=seed + 1, pixels=pixels).to(device)
            for x, _ in batches():
                sighting.again.append(adapter(x.to(device)).argmax(dim=1).cpu())
                tick()
        sighting.error = judge.error if judge.images == sum(map(len, sighting.probs)) else None
        sightings[name] = sighting
    truth = torch.from_numpy(np.concatenate(labels)) if labels else None
    first = torch.cat(next(iter(sightings.values())).probs)
    return [_finding(name, sighting, first, truth) for name, sighting in sightings.items()]


def _tried(model: nn.Module, methods: Mapping[str, Method], batches: Batches, pixels: Pixels | None) -> str | None:
    """Refuse what cannot run before anything does; the name of the model's head."""
    first = next(iter(batches()), None)
    if first is None:
        raise ValueError("none of the images can be read, so there is nothing to compare: look at the files")
    x = first[0][:2].to(next((p.device for p in model.parameters()), torch.device("cpu")))
    head = None
    for k, (name, method) in enumerate(methods.items()):
        try:
            adapter = Adapter(model, method, pixels=pixels, example=x)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if adapter.task != "classification":
            raise ValueError("the model answers with maps, not classes: compare takes a classifier of images")
        head = adapter.net.head if k == 0 else head
    return head


def _disturbed(model: nn.Module, head: str, seed: int) -> nn.Module:
    """A copy of a model that drops features before its head, others in each pass."""
    random, running = torch.Generator().manual_seed(seed), [False]

    def run(_: nn.Module, *rest: Any) -> None:
        running[0] = len(rest) == 1  # before the pass there are its arguments, after it the output, too

    def drop(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # A method that asks the head again has features of which some were dropped.
        return (_dropped(args[0], random), *args[1:]) if running[0] else args

    twin = copy_model(model)
    twin.register_forward_pre_hook(run)
    twin.register_forward_hook(run)
    twin.get_submodule(head).register_forward_pre_hook(drop)
    return twin


def _dropped(features: Tensor, random: torch.Generator) -> Tensor:
    return features * (torch.rand(features.shape, generator=random) >= DROPPED).to(features) / (1 - DROPPED)


def _finding(name: str, sighting: Sighting, source: Tensor, truth: Tensor | None) -> Finding:
    p = torch.cat(sighting.probs)
    answers, middle = p.argmax(dim=1), p.mean(dim=0)
    return Finding(
        name=name,
        agreement=_share(answers == source.argmax(dim=1)),
        entropy=float(_entropy(p).mean()),
        confidence=float(p.max(dim=1).values.mean()),
        classes=math.exp(float(_entropy(middle[None])[0])),
        aetta=None if sighting.error is None else 1 - sighting.error,
        gde=_share(answers == torch.cat(sighting.again)) if sighting.again else None,
        accuracy=_share(answers == truth) if truth is not None and len(truth) == len(p) else None,
        seconds=sighting.seconds,
    )


def _share(right: Tensor) -> float:
    return float(right.double().mean())


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-30).log()).sum(dim=1)


class Aetta:
    """The error of a model without labels (Lee et al., CVPR 2024): how often dropout changes its answers.

    Where a model has collapsed it agrees with itself whatever is dropped, so the rate is divided by a power of how
    diverse its answers are. Differs: features are dropped before the head, not inside the network, so that any will do;
    rate and diversity are those of all images so far, not of a batch, which may be small or of one class.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.images, self.changed = 0, 0.0
        self.total = torch.zeros(0, dtype=torch.float64)
        """The sum of the predictions with features dropped, a number for each class."""

    @torch.no_grad()
    def first(self, net: SplitModel, out: Output) -> None:
        """Drop features of a pass while the head is the one that answers."""
        if net.head is None or out.features.ndim != 2:
            return
        named, changed = out.logits.argmax(dim=1).cpu(), 0.0
        total = torch.zeros(net.classes, dtype=torch.float64)
        for _ in range(DRAWS):
            p = F.softmax(net.classify(_dropped(out.features, self.random)).double().cpu(), dim=1)
            changed += float((p.argmax(dim=1) != named).sum()) / DRAWS
            total += p.sum(dim=0) / DRAWS
        out.memo["aetta"] = (changed, total)

    def hear(self, net: SplitModel, out: Output, answer: Tensor) -> None:
        """Count a pass, if it is what was answered: dropping features says nothing of other answers."""
        if "aetta" in out.memo and torch.equal(answer, out.logits):
            changed, total = out.memo["aetta"]
            self.images += len(answer)
            self.changed += changed
            self.total = total + self.total if len(self.total) else total

    @property
    def error(self) -> float | None:
        """The estimate for all images so far, at most that of guessing."""
        if not self.images:
            return None
        classes = len(self.total)
        middle = (self.total + EVEN / classes) / (self.images + EVEN)
        # Fewer images than classes cannot be more diverse than they are many.
        diversity = min(1.0, float(_entropy(middle[None])[0]) / math.log(min(classes, self.images + EVEN)))
        return min(1 - 1 / classes, self.changed / self.images / max(diversity, 1e-6) ** POWER)


def advise(findings: Sequence[Finding]) -> Advice:
    """The most accurate method where there are labels; else the best by AETTA among those with no sign of collapse.

    By generalised disagreement only if no method has an estimate by AETTA; the source, if none is ahead of it.
    """
    source, *others = findings
    if not others:
        return Advice(source.name, ("no other method was tried",))
    if source.accuracy is not None:
        return _best(source, others, "accuracy", "accuracy on the labelled images")
    refused = {finding.name: why for finding in others if (why := _collapse(finding, source))}
    fit, said = [f for f in others if f.name not in refused], tuple(refused.values())
    if not fit:
        return Advice(source.name, ("every other method shows signs of collapse", *said))
    if source.aetta is not None and (scored := [f for f in fit if f.aetta is not None]):
        best = _best(source, scored, "aetta", "accuracy as estimated by AETTA")
        rest = [f for f in fit if f.aetta is None]
        return Advice(best.name, (*best.reasons, *_unjudged(rest, source), *said))
    if source.gde is not None and (scored := [f for f in fit if f.gde is not None]):
        best = _best(source, scored, "gde", "accuracy as estimated by GDE")
        names = ", ".join(f.name for f in fit)
        why = f"AETTA has no estimate of {names}, whose answers are not the head's, so GDE decides"
        return Advice(best.name, (*best.reasons, why, *said))
    return Advice(source.name, ("nothing can be estimated without labels: no head was found in the model", *said))


def _collapse(finding: Finding, source: Finding) -> str | None:
    if finding.classes < FEWER * source.classes:
        return f"{finding.name} uses {finding.classes:.1f} classes where the source uses {source.classes:.1f}"
    if finding.agreement < STRANGE:
        return f"{finding.name} agrees with the source in only {finding.agreement:.0%} of its answers"
    return None


def _unjudged(findings: Sequence[Finding], source: Finding) -> list[str]:
    """Who has no estimate by AETTA, and what the other one says of them."""
    if not findings:
        return []
    names = ", ".join(f"{f.name} {f.gde:.1%}" if f.gde is not None else f.name for f in findings)
    other = f" (GDE beside each; the source's is {source.gde:.1%})" if source.gde is not None else ""
    return [f"not judged, since their answers are not the head's and AETTA has no estimate: {names}{other}"]


def _best(source: Finding, others: Sequence[Finding], kind: str, what: str) -> Advice:
    """The method that is first by one of the numbers, if it is ahead of the source."""
    best = max(others, key=lambda f: float(getattr(f, kind)))
    high, low = getattr(best, kind), getattr(source, kind)
    if high - low < LEAD:
        return Advice(source.name, (f"its {what} is {low:.1%}, and no other is ahead of it by a point",))
    reasons = (
        f"its {what} is {high:.1%}, the source's {low:.1%}",
        f"it uses {best.classes:.1f} classes (source {source.classes:.1f})",
        f"it agrees with the source in {best.agreement:.0%} of its answers",
    )
    return Advice(best.name, reasons)
