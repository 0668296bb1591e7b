"""The bank of pixels: a fixed number of entries per class.

It keeps the newest entries, or those of lowest entropy. An entry's weight is the number of pixels it represents, as the
same number of pixels is sampled from small and large classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PixelBank(nn.Module):
    """Entries (unit feature, probabilities, entropy, weight) of each class, the newest first.

    `keep_lowest` keeps the entries of lowest entropy instead, the newest at equal entropy.
    """

    def __init__(self, classes: int, dim: int, capacity: int, like: Tensor, *, keep_lowest: bool = False) -> None:
        super().__init__()
        self.keep_lowest = keep_lowest
        dtype = torch.promote_types(like.dtype, torch.float32)

        def full(*shape: int, value: float = 0.0, dtype: torch.dtype = dtype) -> Tensor:
            return torch.full((classes, capacity, *shape), value, dtype=dtype, device=like.device)

        self.features = nn.Buffer(full(dim))
        self.probs = nn.Buffer(full(classes))
        self.entropy = nn.Buffer(full())
        self.weight = nn.Buffer(full())
        self.arrival = nn.Buffer(full(value=-1, dtype=torch.int64))  # -1: no entry
        self.seen: Tensor = nn.Buffer(torch.zeros(1, dtype=torch.int64, device=like.device))

    @torch.no_grad()
    def insert(self, features: Tensor, probs: Tensor, labels: Tensor, entropy: Tensor, weight: Tensor) -> None:
        """Offer entries to their classes; features are normalised."""
        arrival = self.seen + torch.arange(len(labels), device=labels.device)
        self.seen += len(labels)
        entries = {
            "features": F.normalize(features.to(self.features.dtype), p=2, dim=1, eps=1e-12),
            "probs": probs.to(self.probs.dtype),
            "entropy": entropy.to(self.entropy.dtype),
            "weight": weight.to(self.weight.dtype),
            "arrival": arrival,
        }
        for k in labels.unique().tolist():
            new = labels == k
            both = {name: torch.cat((values[new], getattr(self, name)[k])) for name, values in entries.items()}
            order = both["arrival"].argsort(descending=True)
            if self.keep_lowest:
                order = order[_sortable_entropy(both["entropy"], both["arrival"])[order].argsort(stable=True)]
            for name, values in both.items():
                getattr(self, name)[k] = values[order[: self.arrival.shape[1]]]

    def prototypes(self, fraction: float = 1.0) -> Tensor:
        """Return the mean feature of each class (C, D), over the `fraction` of lowest entropy, rounded up."""
        filled = self.arrival >= 0
        count = (filled.sum(dim=1, keepdim=True) * fraction).ceil()
        rank = _sortable_entropy(self.entropy, self.arrival).argsort(dim=1, stable=True).argsort(dim=1)
        chosen = (filled & (rank < count)).to(self.features.dtype)
        return torch.einsum("ke,ked->kd", chosen, self.features) / count.clamp(min=1).to(self.features.dtype)

    @torch.no_grad()
    def neighbors(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return similarities (N, k), probabilities (N, k, C) and weights (N, k) of the k most similar entries."""
        filled = self.arrival >= 0
        features, probs, weight = self.features[filled], self.probs[filled], self.weight[filled]
        queries = F.normalize(queries.to(features.dtype), p=2, dim=1, eps=1e-12)
        similarity, rows = (queries @ features.T).topk(min(k, len(features)), dim=1)
        return similarity, probs[rows], weight[rows]


def _sortable_entropy(entropy: Tensor, arrival: Tensor) -> Tensor:
    """Return the entropy of entries, infinity for empty places."""
    return entropy.masked_fill(arrival < 0, torch.inf)


def draw_pixels(labels: Tensor, per_class: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw up to `per_class` pixels of each image and class from labels (N, P): (image, pixel, pixels represented)."""
    random, parts = torch.rand(labels.shape, device=labels.device), []
    for k in labels.flatten().bincount().nonzero().flatten().tolist():
        of_class = labels == k
        drawn = random.masked_fill(~of_class, -1).topk(min(per_class, labels.shape[1]), dim=1)
        image, slot = (drawn.values >= 0).nonzero(as_tuple=True)
        count = of_class.sum(dim=1)[image]
        parts.append((image, drawn.indices[image, slot], count / count.clamp(max=per_class)))
    image, pixel, weight = (torch.cat(part) for part in zip(*parts, strict=True))
    return image, pixel, weight
