"""Pseudo-labels: train on the model's own confident predictions."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from trueup.core.method import GradientMethod, Info
from trueup.core.registry import register
from trueup.model.split_model import Output, SplitModel
from trueup.validate import check_float


@register
@dataclass(frozen=True, kw_only=True)
class Pl(GradientMethod):
    """L = mean CE(p_i, argmax p_i) over the samples whose confidence is above the threshold."""

    threshold: float = 0.9
    """Confidence above which a prediction is taken for a label."""

    info = Info(
        name="pl",
        title="Pseudo-labelling",
        paper="Lee, Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method, ICML workshop 2013",
        tasks=("classification", "segmentation"),
        passes="1 forward, 1 backward",
        memory="nothing",
        works="Where confident predictions are right.",
        breaks="Where they are not: confident mistakes are learnt, with many classes until nothing else is left.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("threshold", self.threshold, 0, 1)

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """Cross-entropy with the confident predictions; None where there is none."""
        confidence, label = F.softmax(out.logits.detach(), dim=1).max(dim=1)
        confident = confidence > self.threshold
        if not bool(confident.any()):
            return None  # Differs: published code steps all the same, along Adam's momentum
        return F.cross_entropy(out.logits, label, reduction="none")[confident].mean()
