"""The contract: what must hold for every method, each check with its own oracle.

`check_method(MyMethod)` runs them all. With pytest, parametrise over `CHECKS` for one test per check.
"""

from trueup.testing.case import CHECKS, check_method
from trueup.testing.checks import answers, manners, state  # noqa: F401  (each adds its checks)

__all__ = ["CHECKS", "check_method"]
