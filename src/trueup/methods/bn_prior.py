"""BatchNorm statistics of source and batch, weighed by how many images each stands for."""

from dataclasses import dataclass

from trueup.core.method import Info
from trueup.core.registry import register
from trueup.methods.bn import Bn


@register
@dataclass(frozen=True, kw_only=True)
class BnPrior(Bn):
    """Mean and variance are (N source + n batch) / (N + n) for n images, with N = 16 in `norm="prior:16"`."""

    # Differs: the batch's variance is the biased one, as in training; published code mixes in the unbiased.
    norm: str = "prior:16"

    info = Info(
        name="bn-prior",
        title="BatchNorm adaptation with a prior",
        paper="Schneider et al., Improving robustness against common corruptions by covariate shift adaptation, 2020",
        tasks=("classification", "segmentation"),
        works="Batches of changing size: a single image hardly moves the statistics, a large batch sets them.",
        breaks="A large batch with few classes moves the statistics as `bn` does.",
    )
