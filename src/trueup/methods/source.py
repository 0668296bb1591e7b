"""The source model as it is: the row to beat."""

from dataclasses import dataclass

from trueup.core.method import Info, Method
from trueup.core.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Source(Method):
    """No adaptation: the paper's ERM row."""

    features_only = True
    info = Info(
        name="source",
        title="No adaptation",
        paper="Vapnik, Statistical Learning Theory, 1998 (ERM)",
        tasks=("classification", "segmentation"),
        passes="1 forward",
        memory="nothing",
        works="Always, as the model that one has; the measure of all others.",
        breaks="Does not follow any shift.",
    )
