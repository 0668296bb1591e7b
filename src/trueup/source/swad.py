"""SWAD: the average of the weights over the flat part of training, found by the validation loss.

Cha et al., SWAD: Domain Generalization by Seeking Flat Minima, NeurIPS 2021.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.source.external_checkpoints import take_prefix

Weights = dict[str, Tensor]
VALUES = ("losses", "threshold", "start", "end", "steps", "count")  # plain values that a file holds


class Swad:
    """The running average: call `step` with the weights of every step and `validate` with every validation loss."""

    def __init__(self, converge: int = 3, tolerate: int = 6, tolerance: float = 0.3) -> None:
        self.converge, self.tolerate, self.tolerance = converge, tolerate, tolerance
        self.losses: list[float] = []
        self.threshold: float | None = None  # None until the start is found
        self.start: int | None = None
        self.end: int | None = None  # the last segment of the average, once the flat part is over
        self.segment, self.steps = Weights(), 0  # the mean of the weights since the last validation
        self.waiting: deque[Weights] = deque()  # segments that may still be before the start or after the end
        self.total, self.count = Weights(), 0  # the average so far

    def step(self, weights: Mapping[str, Tensor]) -> None:
        """Add the weights of a step to the mean of the segment."""
        self.steps += 1
        _move(self.segment, weights, 1 / self.steps)

    def validate(self, loss: float) -> bool:
        """Close the segment with its validation loss; return True if the average is complete and training may end."""
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
            self.count += 1
            _move(self.total, self.waiting.popleft(), 1 / self.count)
        return self.end is not None

    def _passed(self, threshold: float) -> bool:
        """Return True if the last losses, all after the start, are above the threshold."""
        return len(self.losses) - self.tolerate > (self.start or 0) and min(self.losses[-self.tolerate :]) > threshold

    def average(self) -> Weights:
        """Return the current mean over the segments from start to end."""
        if not self.losses:
            raise ValueError("SWAD needs at least one validation; train longer, or validate more often (every=)")
        if self.end is not None:
            return self.total
        result, count = {name: t.clone() for name, t in self.total.items()}, self.count
        for segment in self.waiting if self.threshold is not None else [self.waiting[-1]]:
            count += 1
            _move(result, segment, 1 / count)
        return result

    # State as tensors and plain values, to resume a training

    def tensors(self) -> Weights:
        """Return all tensors, by name."""
        parts = {"segment": self.segment, "total": self.total, **{f"waiting{i}": w for i, w in enumerate(self.waiting)}}
        return {f"{part}.{name}": t for part, weights in parts.items() for name, t in weights.items()}

    def values(self) -> dict[str, Any]:
        """Return all other state."""
        return {name: getattr(self, name) for name in VALUES} | {"waiting": len(self.waiting)}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the state from `tensors` and `values`."""
        for name in VALUES:
            setattr(self, name, values[name])
        self.segment, self.total = take_prefix(tensors, "segment."), take_prefix(tensors, "total.")
        self.waiting = deque(take_prefix(tensors, f"waiting{i}.") for i in range(values["waiting"]))


@torch.no_grad()
def _move(mean: Weights, to: Mapping[str, Tensor], part: float) -> None:
    """Move a mean towards new values by a factor; 1 makes it a copy of them."""
    for name, tensor in to.items():
        if part == 1:
            mean[name] = tensor.detach().clone()
        else:
            mean[name].lerp_(tensor.detach(), part)
