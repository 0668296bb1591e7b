"""Comparison of methods on a user's model and unlabelled images."""

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
from trueup.core.method import Method
from trueup.deploy.estimates import MethodReport, Score
from trueup.guard.config import Guard
from trueup.model.copy_model import copy_model
from trueup.model.split_model import Output, SplitModel
from trueup.views import Normalization

DRAWS, DROPPED, POWER = 10, 0.4, 3  # AETTA: dropout passes and rate, exponent
EVEN = 8  # virtual images with uniform predictions, so that a single confident image does not look like a collapse
Batches = Callable[[], Iterable[tuple[Tensor, NDArray[np.int64] | None]]]


@dataclass(frozen=True)
class Trial:
    """A method to try, with a guard if wanted."""

    method: Method
    guard: bool = False

    def adapter(self, model: nn.Module, **how: Any) -> Adapter:
        """Wrap the model."""
        return Adapter(model, self.method, guard=Guard() if self.guard else None, **how)


@dataclass
class MethodRun:
    """Predictions of a method, batch by batch."""

    probs: list[Tensor] = field(default_factory=list)
    again: list[Tensor] = field(default_factory=list)  # answers of the second run, with features dropped
    aetta: Score | None = None
    seconds: float = 0.0


def compare_methods(
    model: nn.Module, trials: Mapping[str, Trial], batches: Batches, *, device: str = "cpu", seed: int = 0,
    pixels: Normalization | None = None, tick: Callable[[], None] = lambda: None,
) -> list[MethodReport]:  # fmt: skip
    """Run each method twice over the stream: from a copy of the model, and from one that drops features.

    The first method must be the frozen source. `tick` is called after each batch of each run.

    Calibrated models of two random trainings disagree about as often as each is wrong (Jiang et al., ICLR 2022).
    Differs: adaptation is run twice, not training. The second run has another seed and drops features before its head,
    so that the frozen source and deterministic methods have two different runs, too.
    """
    head = _check_trials(model, trials, batches, pixels)
    runs: dict[str, MethodRun] = {}
    labels: list[NDArray[np.int64]] = []
    for name, trial in trials.items():
        run, judge, answers = MethodRun(), Aetta(seed), []
        adapter = trial.adapter(model, seed=seed, normalization=pixels).to(device)
        judge.observe(adapter)
        for x, y in batches():
            start = time.perf_counter()
            logits = adapter(x.to(device))
            run.seconds += time.perf_counter() - start
            answers.append(logits.cpu())
            run.probs.append(F.softmax(answers[-1].double(), dim=1))
            if not runs and y is not None:
                labels.append(y)
            tick()
        if head is not None:
            other = _with_dropout(model, head, seed + 1)
            adapter = trial.adapter(other, head=head, seed=seed + 1, normalization=pixels).to(device)
            for x, _ in batches():
                run.again.append(adapter(x.to(device)).argmax(dim=1).cpu())
                tick()
        run.aetta = judge.score(torch.cat(answers))
        runs[name] = run
    truth = torch.from_numpy(np.concatenate(labels)) if labels else None
    first = torch.cat(next(iter(runs.values())).probs)
    return [_method_report(name, run, first, truth) for name, run in runs.items()]


def _check_trials(
    model: nn.Module, trials: Mapping[str, Trial], batches: Batches, pixels: Normalization | None
) -> str | None:
    """Refuse methods that cannot run before any runs; return the name of the model's head."""
    first = next(iter(batches()), None)
    if first is None:
        raise ValueError("none of the images can be read, so there is nothing to compare: check the files")
    x = first[0][:2].to(next((p.device for p in model.parameters()), torch.device("cpu")))
    head = None
    for k, (name, trial) in enumerate(trials.items()):
        try:
            adapter = trial.adapter(model, normalization=pixels, example=x)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if adapter.task != "classification":
            raise ValueError("the model answers with maps, not classes: compare takes a classifier of images")
        head = adapter.net.head if k == 0 else head
    return head


def _with_dropout(model: nn.Module, head: str, seed: int) -> nn.Module:
    """Return a copy of a model that drops random features before its head in each pass."""
    random, running = torch.Generator().manual_seed(seed), [False]

    def track(_: nn.Module, *rest: Any) -> None:
        running[0] = len(rest) == 1  # a pre-hook gets the arguments, a hook also the output

    def drop(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # A method that calls the head again passes features that already have some dropped.
        return (_dropped(args[0], random), *args[1:]) if running[0] else args

    twin = copy_model(model)
    twin.register_forward_pre_hook(track)
    twin.register_forward_hook(track)
    twin.get_submodule(head).register_forward_pre_hook(drop)
    return twin


def _dropped(features: Tensor, random: torch.Generator) -> Tensor:
    return features * (torch.rand(features.shape, generator=random) >= DROPPED).to(features) / (1 - DROPPED)


def _method_report(name: str, run: MethodRun, source: Tensor, truth: Tensor | None) -> MethodReport:
    p = torch.cat(run.probs)
    answers, middle = p.argmax(dim=1), p.mean(dim=0)
    return MethodReport(
        name=name,
        answers=answers,
        agreement=float((answers == source.argmax(dim=1)).double().mean()),
        entropy=float(_entropy(p).mean()),
        classes=math.exp(float(_entropy(middle[None])[0])),
        confidence=Score.mean(p.max(dim=1).values),
        aetta=run.aetta,
        gde=Score.mean(answers == torch.cat(run.again)) if run.again else None,
        accuracy=Score.mean(answers == truth) if truth is not None and len(truth) == len(p) else None,
        seconds=run.seconds,
    )


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-30).log()).sum(dim=1)


class Aetta:
    """AETTA: estimate of the error without labels, from how often dropout changes answers (Lee et al., CVPR 2024).

    A collapsed model agrees with itself under any dropout, so the rate is divided by a power of the diversity of its
    answers. Differs: features are dropped before the head, not inside the network, which works for any network; rate
    and diversity are over all images so far, not over a batch, which may be small or of one class.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        """For each pass: the answers, the share of draws that change them, and the mean prediction under dropout."""

    def observe(self, adapter: Adapter) -> None:
        """Observe the forward passes and answers of an adapter."""
        adapter.forward_observers.append(self.drop_features)
        adapter.answer_observers.append(self.keep_pass)

    @torch.no_grad()
    def drop_features(self, net: SplitModel, out: Output) -> None:
        """Measure the effect of dropout on a pass, before the head changes."""
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

    def keep_pass(self, net: SplitModel, out: Output, answer: Tensor) -> None:
        """Keep a pass if its logits are the answer; dropout tells nothing about other answers."""
        if "aetta" in out.memo and torch.equal(answer, out.logits):
            self.parts.append((answer.cpu(), *out.memo["aetta"]))

    def score(self, answers: Tensor) -> Score | None:
        """Estimate the accuracy; None if a guard or the method answered otherwise."""
        if not self.parts:
            return None
        seen, changed, rows = (torch.cat(each) for each in zip(*self.parts, strict=True))
        if not torch.equal(seen, answers):
            return None
        n, sums = len(rows), (changed.sum(), rows.sum(dim=0))
        whole = float(1 - aetta_error(sums[0][None], sums[1][None], n)[0])
        if n == 1:
            return Score(whole, torch.tensor([whole], dtype=torch.float64))
        return Score(whole, 1 - aetta_error(sums[0] - changed, sums[1] - rows, n - 1))


def aetta_error(changed: Tensor, total: Tensor, images: int) -> Tensor:
    """Divide the rate of changed answers by a power of their diversity, up to the error of guessing.

    changed (K) and total (K, classes) are sums over images: of changed answers, and of predictions.
    """
    classes = total.shape[1]
    middle = (total + EVEN / classes) / (images + EVEN)
    # The diversity of n images is at most ln n.
    diversity = (_entropy(middle) / math.log(min(classes, images + EVEN))).clamp(max=1.0)
    return (changed / images / diversity.clamp(min=1e-6) ** POWER).clamp(max=1 - 1 / classes)
