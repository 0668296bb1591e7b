"""Settings of a guard that mean nothing."""

import dataclasses
from typing import Any

import pytest

import trueup
from trueup import Guard, rules
from trueup.testing import convnet


@pytest.mark.parametrize("name", ["window", "compare", "probation", "cap"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_counts_that_mean_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        Guard(**{name: value})


@pytest.mark.parametrize("value", [0, 0.5, float("nan"), float("inf"), "many", None])
def test_factors_that_mean_nothing_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="largest="):
        Guard(largest=value)


def test_guards_that_are_none_are_refused() -> None:
    for value in ([rules.Drift()], (rules.Drift,), rules.Drift(), ("sar",)):
        with pytest.raises(TypeError, match="rules must be a tuple of rules"):
            Guard(rules=value)
    for guard in (1, "safe", rules.RULES):
        with pytest.raises(TypeError, match="guard must be True, False or a Guard"):
            trueup.adapt(convnet(), "tent", guard=guard)
    with pytest.raises(ValueError, match=r"no preset is called 'save'\. There are: safe"):
        trueup.adapt(convnet(), "tent", preset="save")
    with pytest.raises(TypeError, match="a preset needs the name of a method"):
        trueup.adapt(convnet(), trueup.get_method("tent")(), preset="safe")
    with pytest.raises(TypeError, match="notify"):
        Guard(notify="me")
    assert dataclasses.replace(Guard(cap=5), window=8) == Guard(cap=5, window=8)
