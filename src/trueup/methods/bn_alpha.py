"""α-BN: BatchNorm statistics of the source, mixed with a fixed share of the batch's."""

from dataclasses import dataclass

from trueup.core.method import Info
from trueup.core.registry import register
from trueup.methods.bn import Bn


@register
@dataclass(frozen=True, kw_only=True)
class BnAlpha(Bn):
    """Mean and variance are (1 - α) source + α batch, with α = 0.1 in `norm="mix:0.1"`; no parameter changes."""

    # Differs: the batch's variance is biased, as in training; published code uses the unbiased one.
    norm: str = "mix:0.1"

    info = Info(
        name="bn-alpha",
        title="α-BN",
        paper="You et al., Test-time Batch Statistics Calibration for Covariate Shift, 2021",
        tasks=("classification", "segmentation"),
        works="Small batches, single images and mild shifts: most of the statistics are the source's.",
        breaks="Corrects only a tenth of a strong shift; a larger α is noisy with small batches.",
    )
