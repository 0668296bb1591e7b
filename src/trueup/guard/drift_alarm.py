"""A drift alarm: how far features are from the source's BatchNorm moments, and predictions from those at the start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.guard.rules import Action, BatchSignals, Rule, buffers, fade
from trueup.hooks import hooked
from trueup.norm.base import batchnorms
from trueup.norm.batch import batch_moments
from trueup.validate import check_float

SeenMoments = list[tuple[_BatchNorm, Tensor, Tensor, int]]
"""A BatchNorm layer, the mean and the variance of what went into it, and the number of images."""

FEWEST = 64  # images that moments are pooled over before they are compared


class FeatureShift(NamedTuple):
    """How far features have moved, in nats per channel, and the layer where they moved the most."""

    size: float
    layer: str


@contextmanager
def watching_moments(model: nn.Module, *, active: bool = True) -> Iterator[SeenMoments]:
    """Collect the moments of what goes into the BatchNorm layers of a model."""
    seen: SeenMoments = []

    def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, _BatchNorm)
        seen.append((layer, *batch_moments(args[0].detach()), len(args[0])))

    with hooked(batchnorms(model) if active else (), before=note):
        yield seen


class PooledMoments(nn.Module):
    """Moments of the features before each BatchNorm layer, over the last images: older ones count for less and less."""

    at: Tensor
    count: Tensor
    first: Tensor
    second: Tensor

    def __init__(self, layers: Sequence[int], memory: float) -> None:
        """layers: the number of features of each BatchNorm layer."""
        super().__init__()
        self.memory = memory
        self.register_buffer("at", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(len(layers), dtype=torch.float64))
        for name in ("first", "second"):
            self.register_buffer(name, torch.zeros(sum(layers), dtype=torch.float64))

    def take(self, model: nn.Module, seen: SeenMoments, images: int) -> None:
        """Add what was seen, and forget that it was."""
        self.add(model, seen, images)
        seen.clear()

    @torch.no_grad()
    def add(self, model: nn.Module, seen: SeenMoments, images: int) -> None:
        """Add the moments of a batch, and forget some of the older ones.

        images: how many there were so far. Of a layer that ran several times, its first call counts: the others may be
        views, stored images, or a comparison with the source.
        """
        keep = math.exp(-(images - float(self.at)) / self.memory)
        self.at.fill_(images)
        for t in (self.count, self.first, self.second):
            t.mul_(keep)
        calls = {layer: (mean, variance, n) for layer, mean, variance, n in reversed(seen)}
        start = 0
        for i, layer in enumerate(batchnorms(model)):
            rows = slice(start, start + layer.num_features)
            start += layer.num_features
            if layer in calls:
                mean, variance, n = calls[layer]
                mean, variance = mean.double().to(self.first.device), variance.double().to(self.first.device)
                self.count[i] += n
                self.first[rows] += n * mean
                self.second[rows] += n * (variance + mean.square())

    @torch.no_grad()
    def shift(self, model: nn.Module, source: Mapping[str, Tensor]) -> FeatureShift | None:
        """Compare with the source: the mean over layers and channels of the divergence of two normal distributions.

        For a channel with pooled moments m, v and the source's M, V it is ((v + (m - M)²) / V - 1 - ln(v / V)) / 2.
        """
        found: dict[str, float] = {}
        names = {layer: path for path, layer in model.named_modules()}
        start = 0
        for i, layer in enumerate(batchnorms(model)):
            rows = slice(start, start + layer.num_features)
            start += layer.num_features
            if float(self.count[i]) < min(FEWEST, self.memory / 2) * (1 - math.exp(-1)):
                continue
            prefix, eps = f"{names[layer]}." if names[layer] else "", layer.eps
            mean = self.first[rows] / self.count[i]
            variance = (self.second[rows] / self.count[i] - mean.square()).clamp(min=0) + eps
            theirs = source[f"{prefix}running_var"].double().to(mean.device) + eps
            away = (mean - source[f"{prefix}running_mean"].double().to(mean.device)).square()
            divergence = ((variance + away) / theirs - 1 - (variance / theirs).log()) / 2
            found[names[layer]] = float(divergence.mean())
        if not found:
            return None
        return FeatureShift(sum(found.values()) / len(found), max(found, key=found.__getitem__))


@dataclass(frozen=True, kw_only=True)
class Shift(Rule):
    """An alarm that asks for nothing but to be told: features, predictions or their certainty have moved.

    Features are compared with the source's BatchNorm moments, predictions with those of the first `memory` images. An
    alarm is given once; it is armed again when what it was for has gone back below four fifths of its limit.
    """

    features: float = 0.05
    """Divergence from the source, in nats per channel."""
    predictions: float = 0.25
    """Share of predictions that would have to be of other classes to be spread as at the start."""
    entropy: float = 0.15
    """Rise of the mean entropy of answers, in parts of the greatest."""
    memory: float = 256.0
    """Images after which one counts e times less."""

    def __post_init__(self) -> None:
        check_float("features", self.features, 1e-6)
        check_float("predictions", self.predictions, 1e-6, 1)
        check_float("entropy", self.entropy, 1e-6, 1)
        check_float("memory", self.memory, 1)

    def init(self, classes: int) -> nn.Module:
        """Class shares and entropy of the first images and of the last, and which alarms were given."""
        zero = torch.zeros(classes, dtype=torch.float64)
        start = {"start": zero, "start_entropy": zero[:1].clone(), "started": zero[:1].clone()}
        now = {"now": zero.clone(), "now_entropy": zero[:1].clone(), "told": torch.zeros(3, dtype=torch.bool)}
        return buffers(**start, **now)

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Measure, and give an alarm where a limit is passed."""
        n, named = len(signs.probs), signs.named.double()
        if signs.features is not None:
            numbers["feature_shift"] = signs.features.size
        if float(state.started) < self.memory:
            state.start.add_(named)
            state.start_entropy.add_(n * signs.entropy)
            state.started.add_(n)
        fade(state.now, named, n, self.memory)
        fade(state.now_entropy, torch.tensor([n * signs.entropy], dtype=torch.float64), n, self.memory)
        return self._alarm(signs, state, numbers)

    def _alarm(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        start, now = state.start / state.started, state.now / state.now.sum()
        before, entropy = float(state.start_entropy / state.started), float(state.now_entropy / state.now.sum())
        numbers["prediction_shift"] = float((start - now).abs().sum() / 2)
        numbers["entropy"] = entropy
        # Two samples of the same classes differ, too: by this much in the mean.
        counts = 1 / float(state.started) + 1 / min(2 * self.memory, float(state.now.sum()))
        chance = float((start * (1 - start) * counts).sqrt().sum()) / math.sqrt(2 * math.pi)
        moved = signs.features
        checks = (
            (0.0 if moved is None else moved.size / self.features,
             "" if moved is None else f"features are {moved.size:.2f} nats per channel from the source's BatchNorm "
             f"moments, most in {moved.layer!r}"),
            (numbers["prediction_shift"] / max(self.predictions, 3 * chance),
             f"{numbers['prediction_shift']:.0%} of the predictions are of other classes than at the start"),
            ((entropy - before) / self.entropy,
             f"answers are less sure: an entropy of {entropy:.2f} of the greatest, at the start {before:.2f}"),
        )  # fmt: skip
        reasons = []
        for i, (size, reason) in enumerate(checks):
            if size > 1 and not bool(state.told[i]):
                reasons.append(reason)
            if reason:
                state.told[i] = size > 1 or (bool(state.told[i]) and size > 0.8)
        return Action("drift", "; ".join(reasons)) if reasons else None
