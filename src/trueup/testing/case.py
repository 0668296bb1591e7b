"""A method under test: how the checks make adapters, streams and comparisons."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trueup.core.adapter import Adapter, adapt
from trueup.core.method import GradientMethod, Method
from trueup.core.snapshot import capture
from trueup.testing import toys


class SkipCheck(Exception):  # noqa: N818  (it is no error)
    """A check that has nothing to check in this method; says why."""


@dataclass(frozen=True)
class Case:
    """A method's class, and hyper-parameters to test it with where the defaults do not suit a tiny model."""

    method: type[Method]
    hyper: dict[str, Any] = field(default_factory=dict)

    def adapter(self, model: nn.Module | None = None, *, example: Tensor | None = None, **hyper: Any) -> Adapter:
        """A new adapter of a tiny trained model; prepared, if the method asks for it."""
        adapter = adapt(model or toys.convnet(), self.method(**{**self.hyper, **hyper}), example=example)
        if "prepare" in self.method.info.needs:
            dtype = next(adapter.net.model.parameters()).dtype
            adapter.prepare([toys.images(32, seed=s)[0].to(dtype) for s in (1, 2)])
        return adapter

    def has(self, name: str) -> bool:
        """Whether the method has this hyper-parameter."""
        return name in self.method.__dataclass_fields__

    @property
    def learns(self) -> bool:
        """Whether the method takes gradient steps."""
        return issubclass(self.method, GradientMethod)


def stream(batches: int, size: int = 24, *, seed: int = 0, shift: float = 1.0) -> list[Tensor]:
    """Shifted batches without labels."""
    return [toys.images(size, seed=50_000 + 1000 * seed + i, shift=shift)[0] for i in range(batches)]


def play(adapter: Adapter, xs: list[Tensor]) -> list[Tensor]:
    """The adapter's answers to a stream."""
    return [adapter(x) for x in xs]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Equal to the bit."""
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def difference(a: Adapter, b: Adapter) -> list[str]:
    """In what two adapters differ, down to the bit: weights, statistics, memory, optimiser, random stream, counters."""
    (left, here), (right, there) = (_whole(x) for x in (a, b))
    names = left.keys() ^ right.keys()
    names |= {n for n in left.keys() & right.keys() if not torch.equal(left[n], right[n])}
    names |= {key for key in here if here[key] != there[key]}
    return sorted(names)


def _whole(adapter: Adapter) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not adapter._built:
        return dict(adapter.state_dict()), {"batches": adapter.batches}
    tensors, header = capture(adapter)
    model = adapter.net.model
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {**tensors, **{f"model/{n}": t.detach() for n, t in everything.items()}}, header


def frozen(adapter: Adapter) -> Adapter:
    """A copy to compare with later."""
    return copy.deepcopy(adapter)


def storages(tensors: Iterator[Tensor] | list[Tensor]) -> list[int]:
    """Where tensors keep their values; empty ones keep none."""
    return [t.untyped_storage().data_ptr() for t in tensors if t.numel()]


def frozen_tensors(adapter: Adapter) -> list[Tensor]:
    """Copies of all tensors of model and state."""
    return [t.detach().clone() for part in (adapter.net, adapter.state) for t in (*part.parameters(), *part.buffers())]
