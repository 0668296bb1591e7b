"""BatchNorm adaptation: statistics of the test batch instead of the source's."""

from dataclasses import dataclass

from trueup.methods.base import Info, Method, register


@register
@dataclass(frozen=True, kw_only=True)
class Bn(Method):
    """Normalise with the statistics of the test batch; no parameter changes."""

    norm: str = "batch"

    features_only = True
    info = Info(
        name="bn",
        title="BatchNorm adaptation",
        paper="Schneider et al., Improving robustness against common corruptions by covariate shift adaptation, 2020",
        tasks=("classification", "segmentation"),
        works="Shifts in colour, contrast or noise, with batches of 32 or more images of mixed classes.",
        breaks="Single images, small batches and batches of one class: their statistics are unreliable.",
    )
