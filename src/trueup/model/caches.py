"""What modules keep of a forward for all that follow, such as a table of biases in eval mode: forgotten before each.

It holds the weights and the graph of the batch that it was made for, and nothing of what was learnt since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trueup.model.heads import call_model

_INTERNAL = set(vars(nn.Module()))  # what every module has: parameters, buffers, hooks


class _Missing:
    """There is no such attribute. The class itself stands for that: it is the same in all copies."""


@dataclass(frozen=True)
class Caches:
    """Attributes of a model's modules, and what they were before its first forward."""

    places: tuple[tuple[str, str], ...] = ()
    before: tuple[Any, ...] = ()

    def held(self, model: nn.Module) -> tuple[Any, ...]:
        """What they are now."""
        return tuple(_copied(vars(model.get_submodule(path)).get(name, _Missing)) for path, name in self.places)

    def put(self, model: nn.Module, values: tuple[Any, ...]) -> None:
        """Let them be so again."""
        for (path, name), value in zip(self.places, values, strict=True):
            module = model.get_submodule(path)
            if value is not _Missing:
                setattr(module, name, _copied(value))
            elif name in vars(module):
                delattr(module, name)

    def forget(self, model: nn.Module) -> None:
        """As before the first forward."""
        self.put(model, self.before)


def find_caches(model: nn.Module, x: Tensor) -> Caches:
    """What a model keeps: results that a second forward finds and does not make anew. It is spoilt, so pass a copy.

    What a forward hands on by attributes, or keeps of the last image of a stream, is made anew by each.
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


def _attributes(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _INTERNAL:
                yield (path, name), _copied(value)


def _copied(value: Any) -> Any:
    """With a list or a dict of its own."""
    return value.copy() if type(value) in (dict, list) else value


def _same_result(first: Any, second: Any) -> bool:
    """Whether a result with a graph is in both, and is one tensor."""
    graphs = [{id(t) for t in _tensors(value) if t.grad_fn is not None} for value in (first, second)]
    return bool(graphs[0] & graphs[1])


def _tensors(value: Any) -> list[Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, Tensor)]
