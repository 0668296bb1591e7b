"""Rules for guards: ours, published ones, and the base of your own."""

from trueup.core.published import PUBLISHED, Asr, Cotta, RDumb, Roid, Sar
from trueup.core.rules import RULES, Action, Agreement, Concentration, Diversity, Drift, Rule, Signs, Spike, buffers
from trueup.core.shift import Shift

__all__ = [
    "PUBLISHED",
    "RULES",
    "Action",
    "Agreement",
    "Asr",
    "Concentration",
    "Cotta",
    "Diversity",
    "Drift",
    "RDumb",
    "Roid",
    "Rule",
    "Sar",
    "Shift",
    "Signs",
    "Spike",
    "buffers",
]
