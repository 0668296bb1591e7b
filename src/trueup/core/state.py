"""The state of an adapter: captured, applied, and as named tensors.

Resetting, rolling back, saving and loading are each one call of `AdapterState`; `isolation.py` undoes a failed batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trueup.core.identity import brief
from trueup.core.isolation import expect_update
from trueup.core.optimizer_state import Scalars, join_state, split_state
from trueup.guard.marks import Marks
from trueup.model.split_model import SplitModel
from trueup.norm.policy import BatchPolicy, never_narrower

if TYPE_CHECKING:
    from trueup.core.lifecycle import AdapterBase


@dataclass
class AdapterState:
    """Everything that adapting changes.

    With `progress` it also holds counts, the random stream and the guard's marks; without, only what was learnt.
    """

    weights: dict[str, Tensor]
    """Of the model: the selected parameters, and all buffers."""
    memory: nn.Module
    """The state of the method."""
    policy: dict[str, Tensor]
    """Buffers of the normalisation policy; empty at the start."""
    optimizer: dict[str, Any]
    """The state dict of the optimiser; empty at the start."""
    progress: Progress | None = None

    @classmethod
    def view(cls, adapter: AdapterBase) -> AdapterState:
        """Return what has been learnt so far, with the adapter's own tensors."""
        optimizer = {} if adapter.optimizer is None else adapter.optimizer.state_dict()
        return cls(adapter.mutable_tensors(), adapter.state, adapter.net.policy.state_dict(), optimizer)

    @classmethod
    @torch.no_grad()
    def capture(cls, adapter: AdapterBase) -> AdapterState:
        """Copy what has been learnt so far."""
        now = cls.view(adapter)
        weights = {name: t.detach().clone() for name, t in now.weights.items()}
        policy = {name: t.clone() for name, t in now.policy.items()}
        return cls(weights, copy.deepcopy(now.memory), policy, copy.deepcopy(now.optimizer))

    def apply(self, adapter: AdapterBase, *, progress: bool = True) -> None:
        """Give an adapter a copy of this state; without `progress` its counts, random stream and guard stay."""
        expect_update(adapter)
        with torch.inference_mode(False), torch.no_grad():
            _assign_weights(adapter, adapter.fresh.weights)
            adapter.net.restart()  # a policy starts from the source's statistics
            _assign_weights(adapter, self.weights)
            if self.policy:
                adapter.net.policy.load_state_dict(self.policy)
            adapter.state = copy.deepcopy(self.memory)
            adapter.optimizer = adapter.make_optimizer()
            if adapter.optimizer is not None and self.optimizer:
                adapter.optimizer.load_state_dict(copy.deepcopy(self.optimizer))  # else it would share the tensors
            torch.clear_autocast_cache()
        if progress and self.progress is not None:
            self.progress.apply(adapter)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow the model to its device or precision; the state of an optimiser follows when it is loaded."""
        self.weights = {name: fn(t) for name, t in self.weights.items()}
        move_memory(self.memory, fn)

    def to_tensors(self, source: dict[str, Tensor]) -> tuple[dict[str, Tensor], Scalars]:
        """Return named tensors, of the weights only those that differ from the source, and the optimiser's scalars."""
        tensors, scalars = split_state(self.optimizer.get("state", {}))
        named = {f"optimizer/{n}": t for n, t in tensors.items()}
        named |= {f"net/{n}": t for n, t in self.weights.items() if not torch.equal(t, source[n])}
        named |= {f"state/{n}": t for n, t in named_tensors(self.memory).items()}
        return named | {f"policy/{n}": t for n, t in self.policy.items()}, scalars

    @classmethod
    def from_tensors(
        cls, adapter: AdapterBase, tensors: dict[str, Tensor], scalars: Scalars, path: str | Path
    ) -> AdapterState:
        """Return the state that named tensors hold, checked against the adapter, which is not changed."""
        parts = split_by_part(tensors, "net", "state", "policy", "optimizer")
        complete(adapter, parts)
        check_fit("net", adapter.mutable_tensors(), parts["net"], path, whole=False)
        check_fit("state", named_tensors(adapter.fresh.memory), parts["state"], path)
        check_fit("policy", adapter.net.policy.state_dict(), parts["policy"], path)
        weights = {n: parts["net"].get(n, t).to(t.device, copy=True) for n, t in adapter.source.items()}
        memory = with_tensors(adapter.fresh.memory, parts["state"])
        optimizer = join_state(adapter.method, adapter.optimizer, parts["optimizer"], scalars)
        return cls(weights, memory, parts["policy"], optimizer)


@dataclass
class Progress:
    """The place of an adapter in its stream: counts, random stream, and what its guard remembers."""

    batches: int = 0
    images: int = 0
    updates: int = 0
    shrunk: int = 0
    random: dict[str, Tensor] = field(default_factory=dict)
    marks: Marks | None = None
    rules: dict[str, Tensor] = field(default_factory=dict)
    kept: list[AdapterState] = field(default_factory=list)

    @torch.no_grad()
    def apply(self, adapter: AdapterBase) -> None:
        """Put an adapter in this place."""
        adapter.random.restart(self.random)
        adapter.batches, adapter.images, adapter.last_numbers = self.batches, self.images, {}
        adapter.net.runner.steps.count, adapter.net.runner.steps.shrunk = self.updates, self.shrunk
        adapter.kept = list(self.kept)
        if adapter.monitor is not None:
            adapter.monitor.load(self.marks, self.rules)


def assign_tensor(model: nn.Module, name: str, target: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer of a model a value: in place, or anew if a buffer has changed its shape."""
    if target.shape != value.shape:
        prefix, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(prefix), leaf, value.to(target.device, copy=True))
    elif not torch.equal(target, value.to(target.device)):  # an equal one may be a view that cannot be written to
        target.copy_(value)


def _assign_weights(adapter: AdapterBase, weights: dict[str, Tensor]) -> None:
    for name, target in adapter.mutable_tensors().items():
        assign_tensor(adapter.net.model, name, target, weights[name])


def with_tensors(fresh: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Return a copy of a method's fresh state with these tensors; buffers may have another length."""
    memory = copy.deepcopy(fresh)
    mine = named_tensors(memory)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if isinstance(mine[name], nn.Parameter):
                mine[name].copy_(tensor)
            else:
                prefix, _, leaf = name.rpartition(".")
                setattr(memory.get_submodule(prefix), leaf, tensor.to(mine[name].device, copy=True))
    for module in memory.modules():
        verify = getattr(module, "verify", None)
        if verify is not None:
            verify()
    return memory


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def split_by_part(tensors: dict[str, Tensor], *names: str) -> dict[str, dict[str, Tensor]]:
    """Group tensors by the first part of their names; a KeyError for a part that is not listed."""
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = tensor
    return parts


def complete(adapter: AdapterBase, parts: dict[str, dict[str, Tensor]]) -> None:
    """Fill in, as in a fresh adapter, the statistics for unwrap() that older files do not have."""
    if not parts.get("policy") and isinstance(adapter.net.policy, BatchPolicy):
        parts["policy"] = {n: torch.zeros_like(t) for n, t in adapter.net.policy.state_dict().items()}
    added = {
        f"{path}.{name}": t
        for path, module in adapter.fresh.memory.named_modules()
        if isinstance(module, BatchPolicy)
        for name, t in module.named_buffers()
    }
    for part in ("state", "fresh"):
        if parts.get(part):
            parts[part] = {**added, **parts[part]}


def check_fit(
    part: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], path: str | Path, *, whole: bool = True
) -> None:
    """Refuse tensors whose names, dtypes or shapes do not fit; buffers may have another length."""
    if theirs.keys() - ours.keys() or (whole and ours.keys() - theirs.keys()):
        names = sorted(ours.keys() ^ theirs.keys())
        raise ValueError(f"{path} does not fit: its {part} differs in {brief(names)}")
    for name, tensor in theirs.items():
        mine = ours[name]
        same = tensor.shape == mine.shape if isinstance(mine, nn.Parameter) else tensor.ndim == mine.ndim
        if not same or tensor.dtype != mine.dtype:
            raise ValueError(f"{path} does not fit: {part} {name} is {tuple(tensor.shape)} {tensor.dtype}")


def move_memory(memory: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Move a method's state like the model, but never to a lower precision; networks in it move like the model."""
    inside = {m for net in memory.modules() if isinstance(net, SplitModel) for m in net.modules()}

    for module in memory.modules():
        module._apply(fn if module in inside else never_narrower(fn), recurse=False)
