"""Tensors that modules cache between eval forwards, such as a table of biases; they are cleared before each forward.

A cached tensor keeps an old graph and was computed with old weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trueup.model.calls import call_model

_INTERNAL = set(vars(nn.Module()))  # attributes of every module: parameters, buffers, hooks


class _Missing:
    """A sentinel for a missing attribute; the class itself is used, because it survives copies."""


@dataclass(frozen=True)
class Caches:
    """Attributes of a model's modules that cache tensors, with their values before the first forward."""

    places: tuple[tuple[str, str], ...] = ()
    initial: tuple[Any, ...] = ()

    def values(self, model: nn.Module) -> tuple[Any, ...]:
        """Return the attributes as they are now."""
        return tuple(_copied(vars(model.get_submodule(path)).get(name, _Missing)) for path, name in self.places)

    def assign(self, model: nn.Module, values: tuple[Any, ...]) -> None:
        """Set the attributes."""
        for (path, name), value in zip(self.places, values, strict=True):
            module = model.get_submodule(path)
            if value is not _Missing:
                setattr(module, name, _copied(value))
            elif name in vars(module):
                delattr(module, name)

    def clear(self, model: nn.Module) -> None:
        """Set the attributes as they were before the first forward."""
        self.assign(model, self.initial)


def find_caches(model: nn.Module, x: Tensor) -> Caches:
    """Detect caches by running the model twice: tensors with a graph that both forwards hold.

    All other tensors are made anew by each forward. Pass a copy: it is changed.
    """
    for p in model.parameters():
        if p.is_floating_point():
            p.requires_grad_(True)
    before = dict(_attributes(model))
    with torch.enable_grad():
        call_model(model, x)
        first = dict(_attributes(model))
        call_model(model, x)
    second = dict(_attributes(model))
    places = tuple(place for place, value in second.items() if _same_result(first.get(place), value))
    return Caches(places, tuple(before.get(place, _Missing) for place in places))


def held_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Return the tensors in attributes of modules, by identity."""
    return {id(t): t for _, value in _attributes(model) for t in _tensors(value)}


def _attributes(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _INTERNAL:
                yield (path, name), _copied(value)


def _copied(value: Any) -> Any:
    """Copy a list or a dict, not its members."""
    return value.copy() if type(value) in (dict, list) else value


def _same_result(first: Any, second: Any) -> bool:
    """Return whether one tensor with a graph is in both values."""
    graphs = [{id(t) for t in _tensors(value) if t.grad_fn is not None} for value in (first, second)]
    return bool(graphs[0] & graphs[1])


def _tensors(value: Any) -> list[Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, Tensor)]
