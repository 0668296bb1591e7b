"""The bank of pixels: per class a fixed number of entries, so that its memory never grows.

The newest entries stay, or those of lowest entropy. Entries carry the number of pixels that they stand for, because
each class is sampled alike however large it is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PixelBank(nn.Module):
    """Entries (unit feature, probabilities, entropy, weight) of each class, the newest first.

    `lowest` keeps the entries of lowest entropy instead of the newest, of equals the newest.
    """

    features: Tensor
    probs: Tensor
    entropy: Tensor
    weight: Tensor
    arrival: Tensor
    seen: Tensor

    def __init__(self, classes: int, dim: int, capacity: int, like: Tensor, *, lowest: bool = False) -> None:
        super().__init__()
        self.lowest = lowest
        dtype = torch.promote_types(like.dtype, torch.float32)

        def full(*shape: int, value: float = 0.0, dtype: torch.dtype = dtype) -> Tensor:
            return torch.full((classes, capacity, *shape), value, dtype=dtype, device=like.device)

        self.register_buffer("features", full(dim))
        self.register_buffer("probs", full(classes))
        self.register_buffer("entropy", full())
        self.register_buffer("weight", full())
        self.register_buffer("arrival", full(value=-1, dtype=torch.int64))  # -1: no entry yet
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64, device=like.device))

    @torch.no_grad()
    def insert(self, features: Tensor, probs: Tensor, labels: Tensor, entropy: Tensor, weight: Tensor) -> None:
        """Offer entries to their classes; features are brought to unit length."""
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
            if self.lowest:
                order = order[_or_last(both["entropy"], both["arrival"])[order].argsort(stable=True)]
            for name, values in both.items():
                getattr(self, name)[k] = values[order[: self.arrival.shape[1]]]

    def prototypes(self, part: float = 1.0) -> Tensor:
        """The mean of each class's features (C, D), of the part of them that has the lowest entropy, rounded up."""
        there = self.arrival >= 0
        wanted = (there.sum(dim=1, keepdim=True) * part).ceil()
        rank = _or_last(self.entropy, self.arrival).argsort(dim=1, stable=True).argsort(dim=1)
        chosen = (there & (rank < wanted)).to(self.features.dtype)
        return torch.einsum("ke,ked->kd", chosen, self.features) / wanted.clamp(min=1).to(self.features.dtype)

    @torch.no_grad()
    def neighbors(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k most similar entries of each query: similarities (N, k), probabilities (N, k, C), weights (N, k)."""
        there = self.arrival >= 0
        features, probs, weight = self.features[there], self.probs[there], self.weight[there]
        queries = F.normalize(queries.to(features.dtype), p=2, dim=1, eps=1e-12)
        similarity, rows = (queries @ features.T).topk(min(k, len(features)), dim=1)
        return similarity, probs[rows], weight[rows]


def _or_last(entropy: Tensor, arrival: Tensor) -> Tensor:
    """The entropy of entries, infinite where there is none."""
    return entropy.masked_fill(arrival < 0, torch.inf)


def draw_pixels(label: Tensor, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """At most so many pixels of each image and class in (N, P), drawn at random: image, pixel, what each stands for."""
    draw, parts = torch.rand(label.shape, device=label.device), []
    for k in label.flatten().bincount().nonzero().flatten().tolist():
        mine = label == k
        drawn = draw.masked_fill(~mine, -1).topk(min(samples, label.shape[1]), dim=1)
        image, slot = (drawn.values >= 0).nonzero(as_tuple=True)
        count = mine.sum(dim=1)[image]
        parts.append((image, drawn.indices[image, slot], count / count.clamp(max=samples)))
    image, pixel, share = (torch.cat(part) for part in zip(*parts, strict=True))
    return image, pixel, share
