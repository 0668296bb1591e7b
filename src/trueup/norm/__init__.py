"""Normalisation policies by name. To add one: a class in a file of this folder, and an entry in POLICIES."""

from __future__ import annotations

from trueup.norm.ema import EmaPolicy
from trueup.norm.instance import InstancePolicy
from trueup.norm.policy import BatchPolicy, MixPolicy, NormPolicy, PriorPolicy, SourcePolicy
from trueup.norm.robust import RobustPolicy

POLICIES: dict[str, type[NormPolicy]] = {
    "source": SourcePolicy,
    "batch": BatchPolicy,
    "ema": EmaPolicy,
    "mix": MixPolicy,
    "prior": PriorPolicy,
    "instance": InstancePolicy,
    "robust": RobustPolicy,
}
NUMBERS = {name: policy.default for name, policy in POLICIES.items() if policy.default is not None}
"""Policies that may have a number behind a colon, as in "ema:0.05", and the number if it is left out."""


def parse_norm(norm: str) -> tuple[str, float]:
    """Return a policy's name and number; raise a ValueError if there is no such policy."""
    name, colon, number = norm.partition(":") if isinstance(norm, str) else ("", "", "")
    if name not in POLICIES or (colon and name not in NUMBERS):
        names = ", ".join(repr(name) for name in POLICIES)
        raise ValueError(
            f"norm={norm!r} must be one of {names}, where {', '.join(NUMBERS)} may have a number: 'ema:0.05'"
        )
    try:
        value = float(number) if colon else NUMBERS.get(name, 0.0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= POLICIES[name].largest:
        raise ValueError(f"norm={norm!r}: {number!r} is not a number that {name!r} can have, such as {NUMBERS[name]:g}")
    return name, value


def make_policy(norm: str) -> NormPolicy:
    """Return a new policy; its `restart` must be called before it can remember anything."""
    name, number = parse_norm(norm)
    return POLICIES[name](norm, number)
