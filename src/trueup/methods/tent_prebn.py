"""Tent-BN: a BatchNorm layer of its own before the classifier, trained by the entropy of predictions."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.core.method import GradientMethod, Info
from trueup.core.registry import register
from trueup.losses import entropy
from trueup.model.params import Params
from trueup.model.split_model import Output, SplitModel


@register
@dataclass(frozen=True, kw_only=True)
class TentPrebn(GradientMethod):
    """L = mean_i H(h(γ ẑ_i + β)), with ẑ the features less the batch's mean, over its deviation; γ and β learn."""

    norm: str = "source"
    lr: float = 5e-5
    params: Params = "none"

    info = Info(
        name="tent-prebn",
        title="Tent-BN",
        paper="Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain "
        "Generalization, NeurIPS 2021",
        needs=("head",),
        unfit="a pixel's answer is resized and sometimes blended after the head, which a new layer cannot redo",
        passes="1 forward, 1 backward of the head",
        lost="its normalisation layer before the head",
        memory="two values per feature",
        works="Models without BatchNorm, and large balanced batches, whose features it centres and scales anew.",
        breaks="The answers change before anything is learnt: small or one-sided batches are standardised, too.",
    )

    def init(self, net: SplitModel) -> nn.Module:
        """γ = 1 and β = 0, one for each feature."""
        weight = net.weight.detach()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        state = nn.Module()
        state.weight = nn.Parameter(torch.ones(weight.shape[1], dtype=dtype, device=weight.device))
        state.bias = nn.Parameter(torch.zeros_like(state.weight))
        return state

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """The answers are worked out here, before the step; a multi-label model has a state for each label."""
        out = net(x, update=True)
        views = [(net, state)]
        if isinstance(state, nn.ModuleList):
            views = [(net.of_label(k), part) for k, part in enumerate(state)]
        if len(x) > 1:  # Differs: published code fails for one image, which has no deviation; it is answered as it is
            out.memo["answers"] = [view.classify(_standardised(out.features, part)) for view, part in views]
        return out

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """The mean entropy of the batch; None for one image."""
        return entropy(self.predict(net, out, state)).mean() if "answers" in out.memo else None

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """The head's answers to the standardised features."""
        answers: list[Tensor] | None = out.memo.get("answers")
        return out.logits if answers is None else answers[net.label or 0]


def _standardised(features: Tensor, layer: Any) -> Tensor:
    """BatchNorm with the batch's mean and biased variance, and no running estimates."""
    return F.batch_norm(features, None, None, layer.weight.to(features), layer.bias.to(features), training=True)
