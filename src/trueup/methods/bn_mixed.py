"""BatchNorm statistics of the source, mixed with the batch's: α-BN by a fixed share, the prior by numbers of images."""

from dataclasses import dataclass, replace

from trueup.methods.base import register
from trueup.methods.bn import Bn

# Differs: the batch's variance is biased, as in training; published code uses the unbiased one.


@register
@dataclass(frozen=True, kw_only=True)
class BnAlpha(Bn):
    """Mean and variance are (1 - α) source + α batch, with α = 0.1 in `norm="mix:0.1"`; no parameter changes."""

    norm: str = "mix:0.1"

    info = replace(
        Bn.info,
        name="bn-alpha",
        title="α-BN",
        paper="You et al., Test-time Batch Statistics Calibration for Covariate Shift, 2021",
        works="Small batches, single images and mild shifts: most of the statistics are the source's.",
        breaks="Corrects only a tenth of a strong shift; a larger α is noisy with small batches.",
    )


@register
@dataclass(frozen=True, kw_only=True)
class BnPrior(Bn):
    """Mean and variance are (N source + n batch) / (N + n) for n images, with N = 16 in `norm="prior:16"`."""

    norm: str = "prior:16"

    info = replace(
        Bn.info,
        name="bn-prior",
        title="BatchNorm adaptation with a prior",
        works="Batches of varying size: a single image hardly changes the statistics, a large batch sets them.",
        breaks="A large batch of few classes distorts the statistics as in `bn`.",
    )
