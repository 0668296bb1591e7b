"""A drift alarm: compares features with the source's BatchNorm moments, predictions with those of the first images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.guard.rules import Action, BatchSignals, Rule, add_decayed, buffers
from trueup.hooks import hooked
from trueup.norm.policy import batch_moments, batchnorms
from trueup.validate import check_float

SeenMoments = list[tuple[_BatchNorm, Tensor, Tensor, int]]
"""A BatchNorm layer, the mean and variance of its input, and the number of images."""

MIN_POOLED = 64  # images to pool moments over before they are compared


class FeatureShift(NamedTuple):
    """Divergence of features from the source, in nats per channel, and the layer where it is largest."""

    size: float
    layer: str


@contextmanager
def watching_moments(model: nn.Module) -> Iterator[SeenMoments]:
    """Collect the moments of the inputs of a model's BatchNorm layers."""
    seen: SeenMoments = []

    def collect(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, _BatchNorm)
        seen.append((layer, *batch_moments(args[0].detach()), len(args[0])))

    with hooked(batchnorms(model), before=collect):
        yield seen


class PooledMoments(nn.Module):
    """Moments of the features before each BatchNorm layer, over recent images: the weight of older ones decays."""

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

    @torch.no_grad()
    def add(self, model: nn.Module, seen: SeenMoments, images: int) -> None:
        """Add the moments of a batch, clear the list, and let older moments decay.

        images: number of images so far. If a layer ran several times, the first call counts: the others may be views,
        stored images, or a comparison with the source.
        """
        decay = math.exp(-(images - float(self.at)) / self.memory)
        self.at.fill_(images)
        for t in (self.count, self.first, self.second):
            t.mul_(decay)
        calls = {layer: (mean, variance, n) for layer, mean, variance, n in reversed(seen)}
        seen.clear()
        for i, layer, rows in _rows(model):
            if layer in calls:
                mean, variance, n = calls[layer]
                mean, variance = mean.double().to(self.first.device), variance.double().to(self.first.device)
                self.count[i] += n
                self.first[rows] += n * mean
                self.second[rows] += n * (variance + mean.square())

    @torch.no_grad()
    def shift(self, model: nn.Module, source: Mapping[str, Tensor]) -> FeatureShift | None:
        """Return the mean divergence from the source over layers and channels, taken as normal distributions.

        For a channel with pooled moments m, v and the source's M, V it is ((v + (m - M)²) / V - 1 - ln(v / V)) / 2.
        """
        found: dict[str, float] = {}
        names = {layer: path for path, layer in model.named_modules()}
        for i, layer, rows in _rows(model):
            if float(self.count[i]) < min(MIN_POOLED, self.memory / 2) * (1 - math.exp(-1)):
                continue
            prefix, eps = f"{names[layer]}." if names[layer] else "", layer.eps
            mean = self.first[rows] / self.count[i]
            variance = (self.second[rows] / self.count[i] - mean.square()).clamp(min=0) + eps
            source_variance = source[f"{prefix}running_var"].double().to(mean.device) + eps
            distance = (mean - source[f"{prefix}running_mean"].double().to(mean.device)).square()
            divergence = ((variance + distance) / source_variance - 1 - (variance / source_variance).log()) / 2
            found[names[layer]] = float(divergence.mean())
        if not found:
            return None
        return FeatureShift(sum(found.values()) / len(found), max(found, key=found.__getitem__))


def _rows(model: nn.Module) -> Iterator[tuple[int, _BatchNorm, slice]]:
    """Yield the number of each BatchNorm layer, the layer, and its part of the buffers."""
    start = 0
    for i, layer in enumerate(batchnorms(model)):
        yield i, layer, slice(start, start + layer.num_features)
        start += layer.num_features


@dataclass(frozen=True, kw_only=True)
class Shift(Rule):
    """A drift alarm for features, predictions and their entropy; it reports, and requests nothing else.

    Features are compared with the source's BatchNorm moments, predictions with those of the first `memory` images. Each
    alarm is reported once, and again only after its value has fallen below 80 % of the limit.
    """

    features: float = 0.05
    """Limit of the divergence of features from the source, in nats per channel."""
    predictions: float = 0.25
    """Limit of the total variation distance of predicted classes from those at the start."""
    entropy: float = 0.15
    """Limit of the rise of the mean entropy, as a fraction of its maximum."""
    memory: float = 256.0
    """Images after which the weight of an image has decayed by a factor of e."""

    def __post_init__(self) -> None:
        check_float("features", self.features, 1e-6)
        check_float("predictions", self.predictions, 1e-6, 1)
        check_float("entropy", self.entropy, 1e-6, 1)
        check_float("memory", self.memory, 1)

    def init(self, classes: int) -> nn.Module:
        """Return class counts and entropy of the first and of recent images, and which alarms were reported."""
        zero = torch.zeros(classes, dtype=torch.float64)
        start = {"start": zero, "start_entropy": zero[:1].clone(), "started": zero[:1].clone()}
        now = {"now": zero.clone(), "now_entropy": zero[:1].clone(), "told": torch.zeros(3, dtype=torch.bool)}
        return buffers(**start, **now)

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Measure the shifts, and report those beyond their limits."""
        n, counts = len(signals.probs), signals.class_counts.double()
        if signals.features is not None:
            numbers["feature_shift"] = signals.features.size
        if float(state.started) < self.memory:
            state.start.add_(counts)
            state.start_entropy.add_(n * signals.entropy)
            state.started.add_(n)
        add_decayed(state.now, counts, n, self.memory)
        add_decayed(state.now_entropy, torch.tensor([n * signals.entropy], dtype=torch.float64), n, self.memory)
        return self._alarm(signals, state, numbers)

    def _alarm(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        start, now = state.start / state.started, state.now / state.now.sum()
        before, entropy = float(state.start_entropy / state.started), float(state.now_entropy / state.now.sum())
        numbers["prediction_shift"] = float((start - now).abs().sum() / 2)
        numbers["entropy"] = entropy
        # Expected difference of two samples from the same distribution of classes.
        scale = 1 / float(state.started) + 1 / min(2 * self.memory, float(state.now.sum()))
        chance = float((start * (1 - start) * scale).sqrt().sum()) / math.sqrt(2 * math.pi)
        moved = signals.features
        checks = (
            (0.0 if moved is None else moved.size / self.features,
             "" if moved is None else f"features are {moved.size:.2f} nats per channel from the source's BatchNorm "
             f"moments, most in {moved.layer!r}"),
            (numbers["prediction_shift"] / max(self.predictions, 3 * chance),
             f"{numbers['prediction_shift']:.0%} of the predictions are of other classes than at the start"),
            ((entropy - before) / self.entropy,
             f"predictions are less certain: entropy {entropy:.2f} of the maximum, at the start {before:.2f}"),
        )  # fmt: skip
        reasons = []
        for i, (size, reason) in enumerate(checks):
            if size > 1 and not bool(state.told[i]):
                reasons.append(reason)
            if reason:
                state.told[i] = size > 1 or (bool(state.told[i]) and size > 0.8)
        return Action("drift", "; ".join(reasons)) if reasons else None
