"""Multi-label models: each label is a problem of two classes of its own, solved side by side by the same method."""

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
    """The hooks of a method, run for each label with a state of its own. The loss is the mean over the labels."""

    method: Method
    labels: int

    def __post_init__(self) -> None:
        if "one class" in self.method.info.needs:
            name = self.method.info.name
            raise ValueError(f"multilabel=True: {name} tells images apart by their one class; use tsd, tent or eta")

    def init(self, net: SplitModel) -> nn.ModuleList:
        """One state for each label."""
        return nn.ModuleList(self.method.init(net.of_label(k)) for k in range(self.labels))

    def prepare(self, net: SplitModel, loader: Iterable[Tensor], state: Any) -> None:
        """The same source images for each label."""
        batches = list(loader)
        for k in range(self.labels):
            self.method.prepare(net.of_label(k), batches, state[k])

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """One forward pass, seen by each label."""
        out = self.method.forward(net, x, state)
        out.memo["labels"] = [out.of_label(k) for k in range(self.labels)]
        return out

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        """Each label remembers."""
        for k, seen in enumerate(out.memo["labels"]):
            self.method.observe(net.of_label(k), seen, state[k])

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """The mean over the labels; one that has nothing to learn counts as zero."""
        if "first" in out.memo:
            for seen, before in zip(out.memo["labels"], out.memo["first"]["labels"], strict=True):
                seen.memo["first"] = before.memo
        each = [self.method.loss(net.of_label(k), seen, state[k]) for k, seen in enumerate(out.memo["labels"])]
        losses = [loss for loss in each if loss is not None]
        return torch.stack(losses).sum() / self.labels if losses else None

    def after(self, net: SplitModel, out: Output, state: Any) -> Literal["reset"] | None:
        """Each label; any of them may ask to start afresh."""
        asked = [self.method.after(net.of_label(k), seen, state[k]) for k, seen in enumerate(out.memo["labels"])]
        return "reset" if "reset" in asked else None

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """One logit for each label: that of its presence less that of its absence."""
        each = [self.method.predict(net.of_label(k), seen, state[k]) for k, seen in enumerate(out.memo["labels"])]
        return torch.stack([two[:, 1] - two[:, 0] for two in each], dim=1)

    def rows(self, state: Any, n: int) -> int:
        """As the method says."""
        return self.method.rows(state[0], n)
