"""SHOT online: information maximisation and pseudo-labels with the classifier frozen."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from trueup.losses import pseudo_label_loss
from trueup.methods.base import Output, SplitModel, register
from trueup.methods.shot_im import ShotIm
from trueup.validate import check_float


@register
@dataclass(frozen=True, kw_only=True)
class Shot(ShotIm):
    """L = L_im + β · mean CE(p_i, argmax p_i) over confident samples, with SHOT-IM's L_im, as in T3A's code."""

    # Differs: official SHOT trains for epochs on all target data, with pseudo-labels from its class centroids.
    # Differs: T3A's code uses the source's BatchNorm statistics, norm="source"; here the batch's, as in shot-im.
    threshold: float = 0.9
    """Predictions of higher confidence become labels."""
    label_weight: float = 0.1
    """β: weight of the cross-entropy with pseudo-labels."""

    info = replace(ShotIm.info, name="shot", title="SHOT, online", works="Balanced streams with large batches.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("threshold", self.threshold, 0, 1)
        check_float("label_weight", self.label_weight, 0)

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return SHOT-IM's loss, plus the cross-entropy with confident predictions if there are any."""
        loss, labelled = super().loss(net, out, state), pseudo_label_loss(out.logits, self.threshold)
        return loss if labelled is None else loss + self.label_weight * labelled
