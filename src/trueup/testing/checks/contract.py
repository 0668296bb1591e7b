"""The list of checks, and how to run them all."""

from collections.abc import Callable
from typing import Any

from trueup.core.method import Method
from trueup.testing.case import Case, SkipCheck, kinds

Check = Callable[[Case], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Add a function to the contract under its own name."""
    CHECKS[function.__name__] = function
    return function


def check_method(method: type[Method], **hyper: Any) -> None:
    """Run every check on a method, for each of its tasks; an AssertionError names those that fail."""
    failures = []
    for kind in kinds(method):
        for name, check in CHECKS.items():
            try:
                check(Case(method, hyper, kind))
            except SkipCheck:
                continue
            except Exception as error:
                failures.append(f"{name} ({kind}): {type(error).__name__}: {error}")
    assert not failures, f"{method.__name__} breaks the contract:\n" + "\n".join(failures)
