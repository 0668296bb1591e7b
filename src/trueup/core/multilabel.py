"""Multi-label models: the same method solves a two-class problem for each label."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trueup.core.method import Method
from trueup.model.split_model import Output, SplitModel


@dataclass(frozen=True)
class PerLabel:
    """The hooks of a method, run for each label with its own state; the loss is the mean over labels."""

    method: Method
    labels: int

    def __post_init__(self) -> None:
        if "one class" in self.method.info.needs:
            name = self.method.info.name
            raise ValueError(f"multilabel=True: {name} needs one class per image; use tsd, tent or eta")

    def init(self, net: SplitModel) -> nn.ModuleList:
        """Return one state for each label."""
        return nn.ModuleList(self.method.init(net.of_label(k)) for k in range(self.labels))

    def prepare(self, net: SplitModel, loader: Iterable[Tensor], state: Any) -> None:
        """Prepare each label with the same source images, which are held in memory meanwhile."""
        batches = list(loader)
        for k in range(self.labels):
            self.method.prepare(net.of_label(k), batches, state[k])

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Run one forward pass for all labels."""
        out = self.method.forward(net, x, state)
        out.memo["labels"] = [out.of_label(k) for k in range(self.labels)]
        return out

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        """Let each label observe its part of the output."""
        for k, part in enumerate(out.memo["labels"]):
            self.method.observe(net.of_label(k), part, state[k])

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """Return the mean over labels; a label without a loss counts as zero."""
        if "first" in out.memo:
            for part, first in zip(out.memo["labels"], out.memo["first"]["labels"], strict=True):
                part.memo["first"] = first.memo
        each = [self.method.loss(net.of_label(k), part, state[k]) for k, part in enumerate(out.memo["labels"])]
        losses = [loss for loss in each if loss is not None]
        return torch.stack(losses).sum() / self.labels if losses else None

    def after(self, net: SplitModel, out: Output, state: Any) -> Literal["reset"] | None:
        """Update each label's state; any label may ask for a reset."""
        requests = [self.method.after(net.of_label(k), part, state[k]) for k, part in enumerate(out.memo["labels"])]
        return "reset" if "reset" in requests else None

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return one logit per label: its presence minus its absence."""
        each = [self.method.predict(net.of_label(k), part, state[k]) for k, part in enumerate(out.memo["labels"])]
        return torch.stack([two[:, 1] - two[:, 0] for two in each], dim=1)

    def rows(self, state: Any, n: int) -> int:
        """Ask the method."""
        return self.method.rows(state[0], n)
