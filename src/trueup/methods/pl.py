"""Pseudo-labels: train on the model's own confident predictions."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trueup.losses import pseudo_label_loss
from trueup.methods.base import GradientMethod, Info, Output, SplitModel, register
from trueup.validate import check_float


@register
@dataclass(frozen=True, kw_only=True)
class Pl(GradientMethod):
    """L = mean CE(p_i, argmax p_i) over the samples whose confidence is above the threshold."""

    threshold: float = 0.9
    """Predictions of higher confidence become labels."""

    info = Info(
        name="pl",
        title="Pseudo-labelling",
        paper="Lee, Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method, ICML workshop 2013",
        tasks=("classification", "segmentation"),
        passes="1 forward, 1 backward",
        works="Models whose confident predictions are right.",
        breaks="Confident mistakes are learnt and reinforced, most with many classes.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("threshold", self.threshold, 0, 1)

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """Return the cross-entropy with confident predictions; None if there are none."""
        # Differs: without confident predictions published code still steps, along Adam's momentum.
        return pseudo_label_loss(out.logits, self.threshold)
