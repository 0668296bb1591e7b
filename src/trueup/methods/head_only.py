"""Tent-C and PL-C: Tent and pseudo-labels that train only the classifier."""

from dataclasses import dataclass, replace

from trueup.methods.base import Info, Params, register
from trueup.methods.pl import Pl
from trueup.methods.tent import Tent


@register
@dataclass(frozen=True, kw_only=True)
class TentClf(Tent):
    """Tent's L = mean_i H(p_i), with only the head trained; features are the source model's, as in T3A's code."""

    norm: str = "source"
    lr: float = 5e-5
    params: Params = "head"

    info = Info(
        name="tent-clf",
        title="Tent-C",
        paper="Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain "
        "Generalization, NeurIPS 2021",
        tasks=("classification", "segmentation"),
        passes="1 forward, 1 backward of the head",
        works="Cheap: no gradient through the backbone. Helps if features still separate the classes.",
        breaks="Larger weights alone lower the entropy: a long stream or a large lr ends with one class for all.",
    )


@register
@dataclass(frozen=True, kw_only=True)
class PlClf(Pl):
    """PL's loss, with only the head trained; features are the source model's, as in T3A's code."""

    norm: str = "source"
    lr: float = 5e-5
    params: Params = "head"

    info = replace(
        TentClf.info,
        name="pl-clf",
        title="PL-C",
        works="Cheap: no gradient through the backbone. Helps if confident predictions are right.",
        breaks="Confident mistakes are learnt; without confident predictions nothing changes.",
    )
