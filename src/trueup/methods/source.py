"""The source model without adaptation: the baseline."""

from dataclasses import dataclass

from trueup.methods.base import Info, Method, register


@register
@dataclass(frozen=True, kw_only=True)
class Source(Method):
    """No adaptation: the ERM row of the TSD paper."""

    features_only = True
    info = Info(
        name="source",
        title="No adaptation",
        paper="Vapnik, Statistical Learning Theory, 1998 (ERM)",
        tasks=("classification", "segmentation"),
        works="Always: the baseline for all other methods.",
        breaks="Does not adapt to any shift.",
    )
