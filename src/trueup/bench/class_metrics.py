"""Metrics of classification: pure functions of probabilities (N, C) and labels (N,)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Probs = NDArray[np.float64]
Labels = NDArray[np.int64]


def accuracy(probs: Probs, labels: Labels) -> float:
    """Return the share of correct predictions."""
    return float(np.mean(probs.argmax(axis=1) == labels))


def per_class(probs: Probs, labels: Labels, classes: int) -> list[float | None]:
    """Return the accuracy of each class; None for a class without images."""
    right = probs.argmax(axis=1) == labels
    return [float(right[labels == k].mean()) if (labels == k).any() else None for k in range(classes)]


def calibration_error(probs: Probs, labels: Labels, bins: int = 15) -> float:
    """Return the expected calibration error: |accuracy - confidence| in equal-width bins, weighted by size."""
    confidence, right = probs.max(axis=1), probs.argmax(axis=1) == labels
    which = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = [abs(float(right[which == b].sum()) - float(confidence[which == b].sum())) for b in range(bins)]
    return sum(gaps) / len(labels)


def negative_log_likelihood(probs: Probs, labels: Labels) -> float:
    """Return the mean of -log p of the true class; p is clipped at 1e-12."""
    return float(-np.log(np.clip(probs[np.arange(len(labels)), labels], 1e-12, None)).mean())


def measure_classes(probs: Probs, labels: Labels) -> dict[str, Any]:
    """Return all metrics of a run."""
    each = per_class(probs, labels, probs.shape[1])
    defined = [value for value in each if value is not None]
    return {
        "accuracy": accuracy(probs, labels),
        "macro": sum(defined) / len(defined),
        "per_class": each,
        "ece": calibration_error(probs, labels),
        "nll": negative_log_likelihood(probs, labels),
        "images": len(labels),
    }
