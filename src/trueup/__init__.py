"""Trueup: test-time adaptation for PyTorch vision models.

>>> adapter = trueup.adapt(model, "tsd")
>>> logits = adapter(x)  # predicts, then adapts
"""

from trueup import methods  # noqa: F401  (registers them)
from trueup.core.adapter import Adapter, adapt
from trueup.core.method import GradientMethod, Info, Method
from trueup.core.registry import get_method, list_methods, register
from trueup.core.split import Output, SplitModel
from trueup.version import __version__

__all__ = [
    "Adapter",
    "GradientMethod",
    "Info",
    "Method",
    "Output",
    "SplitModel",
    "__version__",
    "adapt",
    "get_method",
    "list_methods",
    "register",
]
