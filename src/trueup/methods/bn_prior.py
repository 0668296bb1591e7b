"""BatchNorm adaptation with a prior: source and batch statistics, weighted by their number of images."""

from dataclasses import dataclass

from trueup.core.method import Info
from trueup.core.registry import register
from trueup.methods.bn import Bn


@register
@dataclass(frozen=True, kw_only=True)
class BnPrior(Bn):
    """Mean and variance are (N source + n batch) / (N + n) for n images, with N = 16 in `norm="prior:16"`."""

    # Differs: the batch's variance is biased, as in training; published code uses the unbiased one.
    norm: str = "prior:16"

    info = Info(
        name="bn-prior",
        title="BatchNorm adaptation with a prior",
        paper="Schneider et al., Improving robustness against common corruptions by covariate shift adaptation, 2020",
        tasks=("classification", "segmentation"),
        works="Batches of varying size: a single image hardly changes the statistics, a large batch sets them.",
        breaks="A large batch of few classes distorts the statistics as in `bn`.",
    )
