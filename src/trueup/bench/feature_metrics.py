"""Alignment and uniformity of features (Wang & Isola, 2020), on which the paper's argument rests; and who listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.core.listening import heard
from trueup.core.method import Method
from trueup.model.split_model import Output, SplitModel

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
MOST = 2000  # images whose features are kept
WINDOWS = 8  # parts of a stream, for what changes along it
SHOWN, PLANE = 500, 50  # images and dimensions that a trace keeps


def to_unit_sphere(features: Floats) -> Floats:
    """Features on the unit sphere; one of zeros stays there."""
    scaled: Floats = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    return scaled


def alignment(features: Floats, labels: Indices, classes: int) -> list[float | None]:
    """The mean squared distance of pairs of each class on the sphere; None for a class without a pair. Low is good."""
    z, each = to_unit_sphere(features), list[float | None]()
    for k in range(classes):
        part = z[labels == k]
        n = len(part)
        # The sum of all cosines of pairs is in the length of the sum.
        cosines = (float(np.square(part.sum(axis=0)).sum()) - float(np.square(part).sum())) / max(n * (n - 1), 1)
        each.append(2 - 2 * cosines if n > 1 else None)
    return each


def uniformity(features: Floats) -> float | None:
    """log of the mean of exp(-2 d²) over all pairs on the sphere; None without a pair. Low is good: spread out."""
    n = len(features)
    return float(np.log(_potential(features).sum() / (n * (n - 1)))) if n > 1 else None


def uniformity_per_class(features: Floats, labels: Indices, classes: int) -> list[float | None]:
    """The same over pairs of which the first is of a class and the second any other; None for a class without one."""
    sums, n = _potential(features).sum(axis=1), len(features)
    means = [sums[labels == k] / (n - 1) if n > 1 else sums[:0] for k in range(classes)]
    return [float(np.log(some.mean())) if len(some) else None for some in means]


def _potential(features: Floats) -> Floats:
    """exp(-2 d²) of every two features on the sphere; of one with itself 0."""
    z = to_unit_sphere(features)
    found: Floats = np.exp(-4 * (1 - z @ z.T))
    np.fill_diagonal(found, 0.0)
    return found


def separation(features: Floats, labels: Indices) -> float | None:
    """The mean squared distance of pairs of one class over that of pairs of two classes; None without either."""
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
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def measure_features(features: Floats, labels: Indices, at: Indices, classes: int) -> dict[str, Any]:
    """Both of all features, of each class, and of parts of the stream; `at` are their places in it."""
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
    """Features on the sphere in their main directions, as many as a trace keeps."""
    z = to_unit_sphere(features)
    z = z - z.mean(axis=0)
    if z.shape[1] > PLANE:
        _, _, directions = np.linalg.svd(z, full_matrices=False)
        z = z @ directions[:PLANE].T
    small: NDArray[np.float16] = z.astype(np.float16)
    return small


@dataclass
class FeatureRecorder:
    """Keeps the features that answers are made of, of images spread evenly over a stream of `total`."""

    total: int
    heard: list[Tensor] = field(default_factory=list)
    """Of the batch that is being answered."""
    kept: list[Floats] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    seen: int = 0

    def __post_init__(self) -> None:
        count = min(self.total, MOST)
        self.wanted = {i * self.total // count for i in range(count)}

    def to(self, method: Method) -> Method:
        """The same method, heard: the features that its answers are made of are noted, and nothing else changes."""

        def hear(net: SplitModel, out: Output, answer: Tensor) -> None:
            if out.features.ndim == 2 and out.features is not out.logits:  # they are the same where there is no head
                self.heard.append(out.features.detach())

        return heard(method, hear)

    def take(self, own: NDArray[np.bool_]) -> None:
        """After a batch: keep what is wanted of its genuine rows, if it was heard row by row."""
        rows = sum(map(len, self.heard))
        places = [(row, self.seen + i) for i, row in enumerate(np.flatnonzero(own))]
        wanted = [(row, place) for row, place in places if place in self.wanted]
        if rows == len(own) and wanted:
            chosen = torch.cat(self.heard)[[row for row, _ in wanted]].double().cpu().numpy()
            good = np.isfinite(chosen).all(axis=1)
            self.kept.append(chosen[good])
            self.at += [place for (_, place), fine in zip(wanted, good, strict=True) if fine]
        self.seen += len(places)
        self.heard.clear()

    def results(self, labels: Indices, classes: int) -> dict[str, Any]:
        """Alignment and uniformity of what was heard; nothing if nothing was. `labels` are those of the stream."""
        if not self.at:
            return {}
        at = np.array(self.at)
        return measure_features(np.concatenate(self.kept), labels[at], at, classes)

    def trace(self) -> dict[str, NDArray[Any]]:
        """Some of the features, as a trace keeps them, and where in the stream they are."""
        if not self.at:
            return {}
        few = np.unique(np.linspace(0, len(self.at) - 1, min(SHOWN, len(self.at))).astype(int))
        return {
            "sample": np.array(self.at, dtype=np.int32)[few],
            "features": project_for_trace(np.concatenate(self.kept)[few]),
        }
