"""Every registered method keeps the shipped contract."""

import pytest

import trueup
from trueup.testing import CHECKS, Case, SkipCheck, kinds

# Strict: a check that starts to pass must leave this list.
EXPECTED_FAILURES = {
    ("lame", "not_worse_than_source"): "LAME assumes neighbours share a class; on i.i.d. batches it merges classes",
}


PAIRS = [
    (name, kind)
    for task in ("classification", "segmentation")
    for name in trueup.list_methods(task)
    for kind in kinds(trueup.get_method(name, task))
    if (kind == "classification") == (task == "classification")
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("name", "kind"), PAIRS, ids=lambda value: value)
def test_method_keeps_contract(name: str, kind: str, check: str, request: pytest.FixtureRequest) -> None:
    reason = EXPECTED_FAILURES.get((name, check))
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True))
    task = "classification" if kind == "classification" else "segmentation"
    try:
        CHECKS[check](Case(trueup.get_method(name, task), kind=kind))
    except SkipCheck as skip:
        pytest.skip(str(skip))
