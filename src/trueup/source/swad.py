"""SWAD: the average of the weights along the flat part of training, found by the validation loss.

Cha et al., SWAD: Domain Generalization by Seeking Flat Minima, NeurIPS 2021.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


class Swad:
    """Feed it the weights after every step (`step`) and the loss at every validation (`validate`)."""

    def __init__(self, converge: int = 3, tolerate: int = 6, tolerance: float = 0.3) -> None:
        self.converge, self.tolerate, self.tolerance = converge, tolerate, tolerance
        self.losses: list[float] = []
        self.threshold: float | None = None  # None until the start is found
        self.start: int | None = None
        self.end: int | None = None  # the last segment of the average, once training has passed its flat part
        self.segment, self.steps = Weights(), 0  # the mean of the weights since the last validation
        self.waiting: deque[Weights] = deque()  # segments that may still turn out to lie before start or after the end
        self.total, self.count = Weights(), 0  # the average so far

    @torch.no_grad()
    def step(self, weights: Mapping[str, Tensor]) -> None:
        """Take one step's weights into the running mean of the segment."""
        self.steps += 1
        _move(self.segment, weights, 1 / self.steps)

    def validate(self, loss: float) -> bool:
        """Close the segment with its validation loss; True once the average is complete and training may end."""
        self.losses.append(loss)
        self.waiting.append(self.segment)
        self.segment, self.steps = Weights(), 0
        if self.threshold is None:
            last = self.losses[-self.converge :]
            if len(last) == self.converge and last[0] == min(last):
                self.start = len(self.losses) - self.converge
                self.threshold = (1 + self.tolerance) * sum(last) / self.converge
            elif len(self.waiting) == self.converge:
                self.waiting.popleft()
        elif self._passed(self.threshold):
            self.end = len(self.losses) - 1 - self.tolerate
        while self.threshold is not None and len(self.waiting) > self.tolerate:
            self._take(self.waiting.popleft())
        return self.end is not None

    def _passed(self, threshold: float) -> bool:
        """Whether the last losses, all after the start, lie above the threshold."""
        return len(self.losses) - self.tolerate > (self.start or 0) and min(self.losses[-self.tolerate :]) > threshold

    def average(self) -> Weights:
        """The mean over the segments from start to end, as it stands now."""
        if not self.losses:
            raise ValueError("SWAD needs at least one validation; train longer, or validate more often (every=)")
        if self.end is not None:
            return self.total
        result, count = {name: t.clone() for name, t in self.total.items()}, self.count
        for segment in self.waiting if self.threshold is not None else [self.waiting[-1]]:
            count += 1
            _move(result, segment, 1 / count)
        return result

    @torch.no_grad()
    def _take(self, segment: Weights) -> None:
        self.count += 1
        _move(self.total, segment, 1 / self.count)

    # State as plain tensors and plain values, for a training that is continued

    def tensors(self) -> Weights:
        """Every tensor, by name."""
        parts = {"segment": self.segment, "total": self.total, **{f"waiting{i}": w for i, w in enumerate(self.waiting)}}
        return {f"{part}.{name}": t for part, weights in parts.items() for name, t in weights.items()}

    def values(self) -> dict[str, Any]:
        """Everything else."""
        names = ("losses", "threshold", "start", "end", "steps", "count")
        return {name: getattr(self, name) for name in names} | {"waiting": len(self.waiting)}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from what `tensors` and `values` gave."""
        for name in ("losses", "threshold", "start", "end", "steps", "count"):
            setattr(self, name, values[name])
        self.segment, self.total = _part(tensors, "segment."), _part(tensors, "total.")
        self.waiting = deque(_part(tensors, f"waiting{i}.") for i in range(values["waiting"]))


def _move(mean: Weights, to: Mapping[str, Tensor], part: float) -> None:
    """Move a mean a part of the way to new values; part 1 makes it a copy of them."""
    for name, tensor in to.items():
        if part == 1:
            mean[name] = tensor.detach().clone()
        else:
            mean[name].lerp_(tensor.detach(), part)


def _part(tensors: Mapping[str, Tensor], start: str) -> Weights:
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
