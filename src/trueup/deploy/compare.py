"""Several methods on a user's own model and images, side by side, with what can be said without labels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from trueup.core.adapter import Adapter
from trueup.core.listening import heard
from trueup.core.method import Method
from trueup.deploy.estimates import MethodReport, Score
from trueup.guard.config import Guard
from trueup.model.copying import copy_model
from trueup.model.split_model import Output, SplitModel
from trueup.views import Normalization

DRAWS, DROPPED, POWER = 10, 0.4, 3  # AETTA: dropout passes and rate, exponent
EVEN = 8  # images of no class in particular that diversity starts from: one sure image is no collapse
Batches = Callable[[], Iterable[tuple[Tensor, NDArray[np.int64] | None]]]


@dataclass(frozen=True)
class Trial:
    """A method to try, with a guard if wanted."""

    method: Method
    guard: bool = False

    def adapter(self, model: nn.Module, method: Method | None = None, **how: Any) -> Adapter:
        """Wrap the model; `method` in place of its own, if given."""
        return Adapter(model, method or self.method, guard=Guard() if self.guard else None, **how)


@dataclass
class MethodRun:
    """What was seen of a method, image by image."""

    probs: list[Tensor] = field(default_factory=list)
    again: list[Tensor] = field(default_factory=list)
    """The answers of its second, disturbed run."""
    aetta: Score | None = None
    seconds: float = 0.0


def compare_methods(
    model: nn.Module, trials: Mapping[str, Trial], batches: Batches, *, device: str = "cpu", seed: int = 0,
    pixels: Normalization | None = None, tick: Callable[[], None] = lambda: None,
) -> list[MethodReport]:  # fmt: skip
    """Run each method over the stream from a fresh copy of the model, and again from a disturbed one.

    The first method must be the frozen source. `tick` is called after each batch of each run.

    Two runs of training that differ by chance disagree about as often as each is wrong, if they are calibrated (Jiang
    et al., ICLR 2022). Differs: adaptation is run twice, not training; the second run has another seed, and features
    are dropped before its head, so that the frozen source and methods without chance have two runs, too.
    """
    head = _tried(model, trials, batches, pixels)
    sightings: dict[str, MethodRun] = {}
    labels: list[NDArray[np.int64]] = []
    for name, trial in trials.items():
        sighting, judge, answers = MethodRun(), Aetta(seed), []
        adapter = trial.adapter(model, heard(trial.method, judge.hear, judge.first), seed=seed, pixels=pixels)
        adapter = adapter.to(device)
        for x, y in batches():
            start = time.perf_counter()
            logits = adapter(x.to(device))
            sighting.seconds += time.perf_counter() - start
            answers.append(logits.cpu())
            sighting.probs.append(F.softmax(answers[-1].double(), dim=1))
            if not sightings and y is not None:
                labels.append(y)
            tick()
        if head is not None:
            other = _disturbed(model, head, seed + 1)
            adapter = trial.adapter(other, head=head, seed=seed + 1, pixels=pixels).to(device)
            for x, _ in batches():
                sighting.again.append(adapter(x.to(device)).argmax(dim=1).cpu())
                tick()
        sighting.aetta = judge.score(torch.cat(answers))
        sightings[name] = sighting
    truth = torch.from_numpy(np.concatenate(labels)) if labels else None
    first = torch.cat(next(iter(sightings.values())).probs)
    return [_finding(name, sighting, first, truth) for name, sighting in sightings.items()]


def _tried(model: nn.Module, trials: Mapping[str, Trial], batches: Batches, pixels: Normalization | None) -> str | None:
    """Refuse what cannot run before anything does; the name of the model's head."""
    first = next(iter(batches()), None)
    if first is None:
        raise ValueError("none of the images can be read, so there is nothing to compare: look at the files")
    x = first[0][:2].to(next((p.device for p in model.parameters()), torch.device("cpu")))
    head = None
    for k, (name, trial) in enumerate(trials.items()):
        try:
            adapter = trial.adapter(model, pixels=pixels, example=x)
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


def _finding(name: str, sighting: MethodRun, source: Tensor, truth: Tensor | None) -> MethodReport:
    p = torch.cat(sighting.probs)
    answers, middle = p.argmax(dim=1), p.mean(dim=0)
    return MethodReport(
        name=name,
        answers=answers,
        agreement=float((answers == source.argmax(dim=1)).double().mean()),
        entropy=float(_entropy(p).mean()),
        classes=math.exp(float(_entropy(middle[None])[0])),
        confidence=Score.mean(p.max(dim=1).values),
        aetta=sighting.aetta,
        gde=Score.mean(answers == torch.cat(sighting.again)) if sighting.again else None,
        accuracy=Score.mean(answers == truth) if truth is not None and len(truth) == len(p) else None,
        seconds=sighting.seconds,
    )


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
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        """Of each pass: the answers, the share of draws that change each, the mean prediction with features dropped."""

    @torch.no_grad()
    def first(self, net: SplitModel, out: Output) -> None:
        """Drop features of a pass while the head is the one that answers."""
        if net.head is None or out.features.ndim != 2:
            return
        named = out.logits.argmax(dim=1).cpu()
        changed = torch.zeros(len(named), dtype=torch.float64)
        total = torch.zeros(len(named), net.classes, dtype=torch.float64)
        for _ in range(DRAWS):
            p = F.softmax(net.classify(_dropped(out.features, self.random)).double().cpu(), dim=1)
            changed += (p.argmax(dim=1) != named).double() / DRAWS
            total += p / DRAWS
        out.memo["aetta"] = (changed, total)

    def hear(self, net: SplitModel, out: Output, answer: Tensor) -> None:
        """Keep a pass, if it is what was answered: dropping features says nothing of other answers."""
        if "aetta" in out.memo and torch.equal(answer, out.logits):
            self.parts.append((answer.cpu(), *out.memo["aetta"]))

    def score(self, answers: Tensor) -> Score | None:
        """Estimate the accuracy, if all passes are the answers: a guard may have given others."""
        if not self.parts:
            return None
        heard, changed, rows = (torch.cat(each) for each in zip(*self.parts, strict=True))
        if not torch.equal(heard, answers):
            return None
        n, sums = len(rows), (changed.sum(), rows.sum(dim=0))
        whole = float(1 - aetta_error(sums[0][None], sums[1][None], n)[0])
        if n == 1:
            return Score(whole, torch.tensor([whole], dtype=torch.float64))
        return Score(whole, 1 - aetta_error(sums[0] - changed, sums[1] - rows, n - 1))


def aetta_error(changed: Tensor, total: Tensor, images: int) -> Tensor:
    """Divide the mean of `changed`, summed over images, by a power of diversity; at most the error of guessing.

    One value for each row: changed (K), total (K, classes), the predictions summed over images.
    """
    classes = total.shape[1]
    middle = (total + EVEN / classes) / (images + EVEN)
    # Fewer images than classes cannot be more diverse than they are many.
    diversity = (_entropy(middle) / math.log(min(classes, images + EVEN))).clamp(max=1.0)
    return (changed / images / diversity.clamp(min=1e-6) ** POWER).clamp(max=1 - 1 / classes)
