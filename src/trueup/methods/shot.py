"""SHOT online: information maximisation and pseudo-labels with the classifier frozen."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from trueup.core.method import Info
from trueup.core.registry import register
from trueup.methods.shot_im import ShotIm
from trueup.model.split_model import Output, SplitModel
from trueup.validate import check_float


@register
@dataclass(frozen=True, kw_only=True)
class Shot(ShotIm):
    """L = L_im + β · mean CE(p_i, argmax p_i) over confident samples, with SHOT-IM's L_im; as T3A's library has it."""

    # Differs: official SHOT runs for epochs over all target data, with pseudo-labels from class centroids of it.
    # Differs: T3A's library keeps the source's BatchNorm statistics, norm="source"; here the batch's, as in shot-im.
    threshold: float = 0.9
    """Confidence above which a prediction is taken for a label."""
    label_weight: float = 0.1
    """β: weight of the cross-entropy with pseudo-labels."""

    info = Info(
        name="shot",
        title="SHOT, online",
        paper="Liang et al., Do We Really Need to Access the Source Data?, ICML 2020",
        tasks=("classification", "segmentation"),
        passes="1 forward, 1 backward",
        works="Balanced streams with large batches: certain predictions, spread over all classes.",
        breaks="Streams where classes are rare or come one after another: predictions are spread all the same.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("threshold", self.threshold, 0, 1)
        check_float("label_weight", self.label_weight, 0)

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """SHOT-IM's loss alone where no prediction is confident."""
        loss = super().loss(net, out, state)
        confidence, label = F.softmax(out.logits.detach(), dim=1).max(dim=1)
        confident = confidence > self.threshold
        if not bool(confident.any()):
            return loss
        return loss + self.label_weight * F.cross_entropy(out.logits, label, reduction="none")[confident].mean()
