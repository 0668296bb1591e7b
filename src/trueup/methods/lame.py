"""LAME: correct the predictions of a batch so that similar features agree; the model does not change."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.methods.base import Info, Method, Output, SplitModel, register
from trueup.validate import check_bool, check_choice, check_int


@register
@dataclass(frozen=True, kw_only=True)
class Lame(Method):
    """The fixed point of Y = softmax(log s + W Y), for an affinity W between the images of a batch."""

    affinity: str = "knn"
    """W: "knn" (1 for the nearest neighbours), "rbf" (Gaussian of the distance), "linear" (cosine)."""
    neighbors: int = 5
    """Neighbours for "knn". For "rbf" the width is the mean distance to this neighbour, counting the image itself."""
    symmetric: bool = False
    """Make "knn" symmetric: the mean of W and its transpose."""

    features_only = True
    info = Info(
        name="lame",
        title="LAME",
        paper="Boudiaf et al., Parameter-Free Online Test-Time Adaptation, CVPR 2022",
        needs=("head",),
        unfit="it compares all pairs of a batch, and the pairs of half a million pixels fit into no memory",
        lost="the agreement of similar images in a batch",
        settings='affinity="rbf" for CIFAR-10-C and ImageNet-C (mariodoebler/test-time-adaptation).',
        works="Batches in which consecutive images share a class: video, bursts.",
        breaks="Shuffled streams: worse than the source there.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("affinity", self.affinity, ("knn", "rbf", "linear"))
        check_int("neighbors", self.neighbors, 1)
        check_bool("symmetric", self.symmetric)

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return log-probabilities; those of the model for a batch of one image."""
        if len(out.logits) == 1:  # Differs: published code divides 0 by 0
            return F.log_softmax(out.logits, dim=1)
        features = F.normalize(out.features, p=2, dim=1)
        return propagate((F.softmax(out.logits, dim=1) + 1e-10).log(), self.weights(features))

    def weights(self, features: Tensor) -> Tensor:
        """Return the affinity matrix W (N, N) of unit features."""
        if self.affinity == "linear":
            return features @ features.T
        distance = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
        n = len(features)
        if self.affinity == "rbf":
            nearest = distance.topk(min(self.neighbors, n), dim=1, largest=False).values
            # Differs: clamped, so that the width is not 0 for identical images.
            sigma = nearest[:, -1].mean().clamp(min=1e-6)
            return torch.exp(-distance.square() / (2 * sigma.square()))
        nearest = distance.fill_diagonal_(torch.inf).topk(min(self.neighbors, n - 1), dim=1, largest=False).indices
        weights = torch.zeros_like(distance).scatter_(1, nearest, 1.0)
        return (weights + weights.T) / 2 if self.symmetric else weights


def propagate(log_s: Tensor, weights: Tensor, iterations: int = 100) -> Tensor:
    """Iterate log Y = log_softmax(log s + W Y) until the energy converges."""
    log_y, before = F.log_softmax(log_s, dim=1), torch.inf
    for i in range(iterations):
        log_y = F.log_softmax(log_s + weights @ log_y.exp(), dim=1)
        energy = float(energy_of(log_s, weights, log_y))
        if i > 1 and abs(energy - before) <= 1e-8 * abs(before):
            break
        before = energy
    return log_y


def energy_of(log_s: Tensor, weights: Tensor, log_y: Tensor) -> Tensor:
    """Return E(Y) = Σ Y (-log s) - Y (W Y) + Y log Y."""
    y = log_y.exp()
    return (y * (-log_s - weights @ y + y.clamp(min=1e-20).log())).sum()
