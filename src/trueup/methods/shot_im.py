"""SHOT-IM: information maximisation with the classifier frozen."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trueup.losses import entropy, negative_diversity
from trueup.methods.base import GradientMethod, Info, Output, Params, SplitModel, register


@register
@dataclass(frozen=True, kw_only=True)
class ShotIm(GradientMethod):
    """L = mean_i H(p_i) + Σ_k p̄_k log p̄_k: each prediction certain, the mean prediction p̄ diverse."""

    params: Params = "backbone"

    info = Info(
        name="shot-im",
        title="SHOT-IM",
        paper="Liang et al., Do We Really Need to Access the Source Data?, ICML 2020",
        tasks=("classification", "segmentation"),
        passes="1 forward, 1 backward",
        works="Balanced streams with large batches: among the best on the embedded digits.",
        breaks="Streams with rare classes or sorted by class: predictions are spread over all classes anyway.",
    )

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return the mean entropy minus the entropy of the mean."""
        return entropy(out.logits).mean() + negative_diversity(out.logits)
