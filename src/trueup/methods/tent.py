"""Tent: minimise the entropy of predictions through the affine parameters of normalisation layers."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trueup.losses import entropy
from trueup.methods.base import GradientMethod, Info, Output, Params, SplitModel, register


@register
@dataclass(frozen=True, kw_only=True)
class Tent(GradientMethod):
    """L = mean_i H(p_i)."""

    lr: float = 1e-3
    params: Params = "norm"

    info = Info(
        name="tent",
        title="Tent",
        paper="Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021",
        tasks=("classification", "segmentation"),
        passes="1 forward, 1 backward",
        settings="ImageNet-C: SGD with lr=2.5e-4 and momentum 0.9, batches of 64 (mr-eggplant/EATA), where this is "
        "Adam.",
        works="Mild shifts with large, mixed batches; needs little memory, as only norms are updated.",
        breaks="Long streams and streams sorted by class: predictions collapse onto few classes.",
    )

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return the mean entropy of the batch."""
        return entropy(out.logits).mean()
