"""Alignment and uniformity of features (Wang & Isola, 2020), which the paper's argument rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.model.split_model import Output, SplitModel

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
MOST = 2000  # images whose features are kept
WINDOWS = 8  # parts of a stream, to show the change along it
SHOWN, PLANE = 500, 50  # images and dimensions in a trace


def to_unit_sphere(features: Floats) -> Floats:
    """Scale features to unit length; zero vectors stay zero."""
    scaled: Floats = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    return scaled


def alignment(features: Floats, labels: Indices, classes: int) -> list[float | None]:
    """Return the mean squared distance within each class on the sphere; None without a pair. Lower is better."""
    z, each = to_unit_sphere(features), list[float | None]()
    for k in range(classes):
        part = z[labels == k]
        n = len(part)
        # The squared length of the sum is the sum of all pairwise cosines.
        cosines = (float(np.square(part.sum(axis=0)).sum()) - float(np.square(part).sum())) / max(n * (n - 1), 1)
        each.append(2 - 2 * cosines if n > 1 else None)
    return each


def uniformity(features: Floats) -> float | None:
    """Return log of the mean of exp(-2 d²) over all pairs on the sphere; None without a pair. Lower is better."""
    n = len(features)
    return float(np.log(_potential(features).sum() / (n * (n - 1)))) if n > 1 else None


def uniformity_per_class(features: Floats, labels: Indices, classes: int) -> list[float | None]:
    """Return the uniformity of pairs whose first image is of each class; None for a class without pairs."""
    sums, n = _potential(features).sum(axis=1), len(features)
    means = [sums[labels == k] / (n - 1) if n > 1 else sums[:0] for k in range(classes)]
    return [float(np.log(some.mean())) if len(some) else None for some in means]


def _potential(features: Floats) -> Floats:
    """Return exp(-2 d²) of all pairs of features on the sphere; 0 on the diagonal."""
    z = to_unit_sphere(features)
    found: Floats = np.exp(-4 * (1 - z @ z.T))
    np.fill_diagonal(found, 0.0)
    return found


def separation(features: Floats, labels: Indices) -> float | None:
    """Return the mean squared distance within classes over that between classes; None without either."""
    z = to_unit_sphere(features)
    squared = 2 - 2 * (z @ z.T)
    first, second = np.triu_indices(len(z), k=1)
    within = labels[first] == labels[second]
    if within.all() or not within.any():
        return None
    distances = squared[first, second]
    between = float(distances[~within].mean())
    return float(distances[within].mean()) / between if between > 1e-12 else None


def _mean(values: list[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def measure_features(features: Floats, labels: Indices, at: Indices, classes: int) -> dict[str, Any]:
    """Return alignment and uniformity overall, per class, and along the stream; `at`: positions in the stream."""
    each = alignment(features, labels, classes)
    parts = [part for part in np.array_split(np.arange(len(features)), WINDOWS) if len(part)]
    return {
        "alignment": _mean(each),
        "uniformity": uniformity(features),
        "separation": separation(features, labels),
        "alignment_per_class": each,
        "uniformity_per_class": uniformity_per_class(features, labels, classes),
        "along": {
            "images": [int(at[part[-1]]) + 1 for part in parts],
            "alignment": [_mean(alignment(features[part], labels[part], classes)) for part in parts],
            "uniformity": [uniformity(features[part]) for part in parts],
        },
    }


def project_for_trace(features: Floats) -> NDArray[np.float16]:
    """Project features on the sphere onto their first principal directions, to save space in a trace."""
    z = to_unit_sphere(features)
    z = z - z.mean(axis=0)
    if z.shape[1] > PLANE:
        _, _, directions = np.linalg.svd(z, full_matrices=False)
        z = z @ directions[:PLANE].T
    small: NDArray[np.float16] = z.astype(np.float16)
    return small


@dataclass
class FeatureRecorder:
    """Recorder of features behind an adapter's answers, for images spread evenly over a stream of `total`."""

    total: int
    batch: list[Tensor] = field(default_factory=list)  # features of the current batch
    kept: list[Floats] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    seen: int = 0

    def __post_init__(self) -> None:
        count = min(self.total, MOST)
        self.wanted = {i * self.total // count for i in range(count)}

    def observe(self, net: SplitModel, out: Output, answer: Tensor) -> None:
        """Record the features of an answer; an observer of adapters."""
        if out.features.ndim == 2 and out.features is not out.logits:  # equal if the model has no head
            self.batch.append(out.features.detach())

    def keep(self, own: NDArray[np.bool_]) -> None:
        """Keep the wanted genuine rows of the last batch, if every row was answered once."""
        positions = [(row, self.seen + i) for i, row in enumerate(np.flatnonzero(own))]
        wanted = [(row, position) for row, position in positions if position in self.wanted]
        if sum(map(len, self.batch)) == len(own) and wanted:
            chosen = torch.cat(self.batch)[[row for row, _ in wanted]].double().cpu().numpy()
            finite = np.isfinite(chosen).all(axis=1)
            self.kept.append(chosen[finite])
            self.at += [position for (_, position), fine in zip(wanted, finite, strict=True) if fine]
        self.seen += len(positions)
        self.batch.clear()

    def results(self, labels: Indices, classes: int) -> dict[str, Any]:
        """Return alignment and uniformity; empty if nothing was recorded. `labels` are those of the stream."""
        if not self.at:
            return {}
        at = np.array(self.at)
        return measure_features(np.concatenate(self.kept), labels[at], at, classes)

    def trace(self) -> dict[str, NDArray[Any]]:
        """Return a sample of the features and their positions in the stream."""
        if not self.at:
            return {}
        few = np.unique(np.linspace(0, len(self.at) - 1, min(SHOWN, len(self.at))).astype(int))
        return {
            "sample": np.array(self.at, dtype=np.int32)[few],
            "features": project_for_trace(np.concatenate(self.kept)[few]),
        }
