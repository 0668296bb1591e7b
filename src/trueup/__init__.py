"""Trueup: test-time adaptation for PyTorch vision models.

>>> adapter = trueup.adapt(model, "tsd")
>>> logits = adapter(x)  # predicts, then adapts
"""

from typing import Any

from trueup.startup import interruptible as _interruptible
from trueup.startup import is_command as _is_command
from trueup.version import __version__

with _interruptible(_is_command()):
    from trueup import methods as _methods  # noqa: F401  (registers them)
    from trueup import rules
    from trueup.core.adapt import adapt
    from trueup.core.adapter import Adapter
    from trueup.core.method import GradientMethod, Info, Method
    from trueup.core.registry import get_method, list_methods, register
    from trueup.guard.config import Event, Guard, Health
    from trueup.model.split_model import Output, SplitModel
    from trueup.model.zero_shot import zero_shot

__all__ = [
    "Adapter",
    "Event",
    "GradientMethod",
    "Guard",
    "Health",
    "Info",
    "Method",
    "Output",
    "SplitModel",
    "__version__",
    "adapt",
    "get_method",
    "list_methods",
    "register",
    "rules",
    "run",
    "streams",
    "zero_shot",
]


def __getattr__(name: str) -> Any:
    """`trueup.run` and `trueup.streams` belong to the benchmark; they bring what only it needs, so they wait."""
    if name == "run":
        try:
            from trueup.bench.sweep import run
        except ModuleNotFoundError as error:
            raise ImportError(f"trueup.run needs {error.name}: pip install 'trueup[bench]'", name=error.name) from error
        return run
    if name == "streams":
        from trueup.data import streams

        return streams
    raise AttributeError(f"module 'trueup' has no attribute {name!r}")
