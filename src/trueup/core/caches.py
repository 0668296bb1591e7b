"""What modules keep of a forward for the next, such as a table of biases in eval mode: forgotten before each.

It holds the weights and the graph of the batch that it was made for, and nothing of what was learnt since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_INTERNAL = set(vars(nn.Module()))  # what every module has: parameters, buffers, hooks


class _Missing:
    """There was no such attribute. The class itself stands for that: it is the same in all copies."""


class Caches:
    """Attributes that hold results of a forward, found out by the first that has a gradient."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, Any]] | None = None  # a module, an attribute, what it was before

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Around the forward that shows what is kept."""
        if self._places is not None:
            yield
            return
        before = {(module, name): _copied(value) for module, name, value in _attributes(model)}
        yield
        made = [(module, name) for module, name, value in _attributes(model) if _has_graph(value)]
        self._places = [(*place, before.get(place, _Missing)) for place in made]

    def forget(self) -> None:
        """As before the first forward."""
        for module, name, value in self._places or ():
            if value is not _Missing:
                setattr(module, name, _copied(value))
            elif name in vars(module):
                delattr(module, name)


def _attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in _INTERNAL:
                yield module, name, value


def _copied(value: Any) -> Any:
    """With a list or a dict of its own."""
    return value.copy() if type(value) in (dict, list) else value


def _has_graph(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, Tensor) and v.grad_fn is not None for v in values)
