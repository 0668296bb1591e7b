"""Rules for guards: the default ones, published ones, and the base class for your own."""

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

Signs = BatchSignals  # the name until version 0.2

__all__ = [
    "PUBLISHED", "RULES", "Action", "Agreement", "Asr", "BatchSignals", "Concentration", "Cotta", "Diversity", "Drift",
    "RDumb", "Roid", "Rule", "Sar", "Shift", "Signs", "Spike", "buffers",
]  # fmt: skip
