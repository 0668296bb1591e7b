"""α-BN: the source's statistics in BatchNorm layers, mixed with a fixed part of the batch's."""

from dataclasses import dataclass

from trueup.core.method import Info
from trueup.core.registry import register
from trueup.methods.bn import Bn


@register
@dataclass(frozen=True, kw_only=True)
class BnAlpha(Bn):
    """Mean and variance are (1 - α) source + α batch, with α = 0.1 in `norm="mix:0.1"`; no parameter changes."""

    # Differs: the batch's variance is the biased one, as in training; published code mixes in the unbiased.
    norm: str = "mix:0.1"

    info = Info(
        name="bn-alpha",
        title="α-BN",
        paper="You et al., Test-time Batch Statistics Calibration for Covariate Shift, 2021",
        tasks=("classification", "segmentation"),
        works="Small batches and mild shifts: the source's statistics carry it. Also for single images.",
        breaks="Corrects a strong shift only by a tenth; a larger part is noisy where batches are small.",
    )
