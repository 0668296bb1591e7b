"""Rules for guards: ours, published ones, and the base of your own."""

from trueup.guard.drift_alarm import Shift
from trueup.guard.published_rules import PUBLISHED, Asr, Cotta, RDumb, Roid, Sar
from trueup.guard.rules import (
    RULES,
    Action,
    Agreement,
    BatchSignals,
    Concentration,
    Diversity,
    Drift,
    Rule,
    Spike,
    buffers,
)

Signs = BatchSignals  # its name until version 0.2

__all__ = [
    "PUBLISHED",
    "RULES",
    "Action",
    "Agreement",
    "Asr",
    "BatchSignals",
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
