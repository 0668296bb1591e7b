"""A model compiled by torch.compile, with the inputs and outputs of one of its layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from trueup.model.calls import call_model
from trueup.model.recompute import replaced_forward

Calls = list[tuple[Tensor, Tensor]]


class CompiledModel:
    """A model that is compiled when it first runs; copies compile again."""

    def __init__(self) -> None:
        self._function: Callable[..., tuple[Any, Calls]] | None = None
        self._recording: Callable[..., Any] | None = None
        self._calls: Calls = []

    def __call__(self, model: nn.Module, layer: nn.Module | None, x: Tensor) -> tuple[Any, Calls]:
        """Return the model's output and the calls of a layer."""
        if self._function is None:
            self._make(model, layer)
        assert self._function is not None
        self._calls.clear()  # a forward that failed has left some
        # The same function each time: another would be compiled anew.
        with nullcontext() if layer is None or self._recording is None else replaced_forward(layer, self._recording):
            answer: tuple[Any, Calls] = call_model(self._function, x)
        return answer

    def _make(self, model: nn.Module, layer: nn.Module | None) -> None:
        calls = self._calls
        if layer is not None:
            forward = layer.forward

            def recording(x: Tensor) -> Tensor:
                out: Tensor = forward(x)
                calls.append((x, out))
                return out

            self._recording = recording

        def run(*args: Any, **kwargs: Any) -> tuple[Any, Calls]:
            answer = model(*args, **kwargs)
            recorded = list(calls)
            calls.clear()  # dynamo specialises on the length of the list, so it must always start empty
            return answer, recorded

        # A code object of its own: dynamo limits recompilations per code object, which all models would share.
        code = run.__code__.replace()
        self._function = torch.compile(FunctionType(code, globals(), run.__name__, None, run.__closure__))

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave compiled code out of files and copies."""
        return CompiledModel, ()
