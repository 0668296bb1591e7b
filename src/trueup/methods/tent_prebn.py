"""Tent-BN: a new BatchNorm layer before the classifier, trained by the entropy of predictions."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.losses import entropy
from trueup.methods.base import GradientMethod, Info, Output, Params, SplitModel, register


@register
@dataclass(frozen=True, kw_only=True)
class TentPrebn(GradientMethod):
    """L = mean_i H(h(γ ẑ_i + β)), with ẑ the features standardised over the batch; γ and β are trained."""

    norm: str = "source"
    lr: float = 5e-5
    params: Params = "none"

    info = Info(
        name="tent-prebn",
        title="Tent-BN",
        paper="Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain "
        "Generalization, NeurIPS 2021",
        needs=("head",),
        unfit="pixel logits are resized and sometimes blended after the head, which a new layer cannot repeat",
        passes="1 forward, 1 backward of the head",
        lost="its normalisation layer before the head",
        memory="two values per feature",
        works="Models without BatchNorm, with large balanced batches, whose features it standardises.",
        breaks="Small or imbalanced batches: standardising them changes predictions before anything is learnt.",
    )

    def init(self, net: SplitModel) -> nn.Module:
        """Return γ = 1 and β = 0 for each feature."""
        weight = net.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return nn.BatchNorm1d(weight.shape[1], track_running_stats=False, dtype=dtype, device=weight.device)

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Compute predictions here, before the step; a multi-label model has a state for each label."""
        out = net(x, update=True)
        heads = [(net, state)]
        if isinstance(state, nn.ModuleList):
            heads = [(net.of_label(k), layer) for k, layer in enumerate(state)]
        if len(x) > 1:  # Differs: published code fails for one image, which has no deviation; here it stays as it is
            out.memo["logits"] = [head.classify(_standardised(out.features, layer)) for head, layer in heads]
        return out

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """Return the mean entropy of the batch; None for one image."""
        return entropy(self.predict(net, out, state)).mean() if "logits" in out.memo else None

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return the head's logits for the standardised features."""
        logits: list[Tensor] | None = out.memo.get("logits")
        return out.logits if logits is None else logits[net.label or 0]


def _standardised(features: Tensor, layer: Any) -> Tensor:
    """Apply BatchNorm with the batch's mean and biased variance, without running estimates."""
    return F.batch_norm(features, None, None, layer.weight.to(features), layer.bias.to(features), training=True)
