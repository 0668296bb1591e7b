"""Isolation of a batch: calls take turns, a failure leaves no trace, random numbers are the adapter's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from trueup.memory.bank import Journal, Journaled
from trueup.model.split_model import SplitModel

if TYPE_CHECKING:
    from trueup.core.lifecycle import AdapterBase

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound="AdapterBase")


# Torch's generators are global: only one thread at a time may swap in a stream, so all adapters take turns.
_GENERATORS = threading.RLock()

# Attributes of an adapter that a batch or a load may rebind.
_VALUES = ("batches", "images", "last_numbers", "optimizer", "kept", "fresh", "prepared")


class CallLock:
    """A re-entrant lock; a copy or pickle of it is a new one."""

    def __init__(self) -> None:
        self.held = threading.RLock()

    @property
    def taken(self) -> bool:
        """True if a call further out in this thread holds it."""
        return bool(self.held._is_owned())  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Make a free lock for the copy."""
        return CallLock, ()


def serialized(call: Callable[Concatenate[A, P], R]) -> Callable[Concatenate[A, P], R]:
    """Let an adapter run this method in one thread at a time; afterwards send pending notifications."""

    @wraps(call)
    def alone(self: A, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with self.lock.held:
                return call(self, *args, **kwargs)
        finally:
            if self.monitor is not None and self.monitor.pending and not self.lock.taken:
                self.monitor.guard.tell(self.monitor.pending)

    return alone


@contextmanager
def all_or_nothing(adapter: AdapterBase) -> Iterator[None]:
    """Roll the adapter back bit-exactly if the block raises."""
    undo = adapter.undo = Undo(adapter)
    try:
        undo.capture()
        yield
    except BaseException:
        uninterrupted(undo.roll_back)
        raise
    finally:
        adapter.undo = None
        undo.close()


def uninterrupted(restore: Callable[[], None]) -> None:
    """Restore something, again from the start if a second Ctrl-C interrupts it."""
    while True:
        try:
            return restore()
        except KeyboardInterrupt:
            continue


def restore_dicts(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Give each dict its old contents, the second of its pair."""
    for target, values in pairs:
        target.update(values)
        for name in target.keys() - values.keys():
            del target[name]


class Undo:
    """The adapter as it was before a batch.

    Buffers and plain values are copied at once. Parameters and the state of the optimiser may be large, so they are
    copied by `before_update`: after backward, when the activations are gone. Memories with many entries keep a journal.
    """

    def __init__(self, adapter: AdapterBase) -> None:
        self._adapter = adapter
        self._scratch = Scratch() if adapter.net.runner.low_memory else adapter.scratch
        self._captured = False
        self._update: _Update | None = None
        self._journaled: list[Journaled] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave no trace in a copy of the adapter."""
        return type(None), ()

    def capture(self) -> None:
        """Copy what a batch may change apart from parameters; before the adapter is built there is nothing to copy."""
        adapter, monitor = self._adapter, self._adapter.monitor
        if not adapter.built:
            return
        self._plain = [(part, dict(part)) for net in networks(adapter) for part in net.registries()]
        self._adapter_values = {name: vars(adapter)[name] for name in _VALUES}
        self._state, self._random = adapter.state, adapter.random.states
        self._monitor = None if monitor is None else monitor.snapshot()
        self._hooks = {m: b for net in networks(adapter) for m in net.model.modules() if any(b := _get_hooks(m))}
        parts = (adapter.net.model, adapter.net.policy, adapter.state, *(() if monitor is None else (monitor.memory,)))
        slots = []
        for module in (m for part in parts for m in part.modules()):
            spared = module.large if isinstance(module, Journaled) else ()
            slots += [(module._buffers, name, name not in spared) for name in module._buffers]
            if isinstance(module, Journaled):
                self._journaled.append(module)
                module.journal = Journal()
        self._buffers = [(registry, name, registry[name]) for registry, name, _ in slots]
        own = [t for registry, name, copied in slots if copied and (t := registry[name]) is not None]
        self._values = _Copies(own, "buffers", self._scratch)
        self._captured = True

    def before_update(self) -> None:
        """Copy the parameters that may change and the state of their optimiser, once in a batch."""
        if self._captured and self._update is None:
            self._update = _Update(self._adapter, self._scratch)

    @torch.no_grad()
    def roll_back(self) -> None:
        """Put everything back; the batch can then be tried again."""
        adapter, monitor = self._adapter, self._adapter.monitor
        if not self._captured:
            return
        for module in self._journaled:
            assert module.journal is not None
            module.journal.undo()
        for registry, name, tensor in self._buffers:
            registry[name] = tensor
        self._values.put_back()
        restore_dicts(self._plain)
        adapter.state, adapter.random.states = self._state, self._random
        vars(adapter).update(self._adapter_values)
        if self._update is not None:
            self._update.put_back()
        for p in adapter.net.selected.values():
            p.grad = None
        if monitor is not None and self._monitor is not None:
            monitor.put_back(self._monitor)
        for net in networks(adapter):
            for layer in net.model.modules():
                _set_hooks(layer, self._hooks.get(layer, ({}, {}, None)))
        torch.clear_autocast_cache()

    def close(self) -> None:
        """Stop keeping journals."""
        for module in self._journaled:
            module.journal = None


def expect_update(adapter: AdapterBase) -> None:
    """Prepare for undoing a change of parameters, if this batch can be undone."""
    if adapter.undo is not None:
        adapter.undo.before_update()


class Scratch:
    """Memory for copies that is used again with every batch; new memory takes five times as long to write to.

    Only on the CPU: other devices have allocators that keep memory themselves.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.dtype], Tensor] = {}

    def block(self, use: str, like: Tensor, length: int) -> Tensor:
        """Return uninitialised memory of this length; each use has one block."""
        if like.device.type != "cpu":
            return like.new_empty(length)
        block = self._blocks.get((use, like.dtype), like.new_empty(0))
        self._blocks[use, like.dtype] = block = block if len(block) >= length else like.new_empty(length)
        return block[:length]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Give a copy none of it."""
        return Scratch, ()


class _Copies:
    """Values of tensors, to write back into the same tensors."""

    def __init__(self, tensors: list[Tensor], use: str, scratch: Scratch) -> None:
        self._tensors = [t.detach() for t in tensors]
        self._values = list(self._tensors)
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, t in enumerate(self._tensors):
            if _is_compact(t):
                groups.setdefault((t.dtype, t.device), []).append(i)
            else:
                self._values[i] = t.clone()
        for members in groups.values():
            sizes = [self._tensors[i].numel() for i in members]
            block = scratch.block(use, self._tensors[members[0]], sum(sizes))
            for i, part in zip(members, block.split(sizes), strict=True):
                t = self._tensors[i]
                self._values[i] = part.as_strided(t.shape, t.stride(), part.storage_offset()).copy_(t)

    @torch.no_grad()
    def put_back(self) -> None:
        """Write back what has changed; what has not may be a view that cannot be written to."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            if not torch.equal(tensor, value):
                tensor.copy_(value)


def _is_compact(t: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps."""
    return t.is_contiguous() or (t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last))


class _Update:
    """The parameters that a batch may move, and the state of the optimiser."""

    def __init__(self, adapter: AdapterBase, scratch: Scratch) -> None:
        nets = networks(adapter)
        inside = {id(p) for net in nets for p in net.parameters()}
        moving = [p for net in nets for p in net.selected.values()]
        moving += [p for p in adapter.state.parameters() if id(p) not in inside]
        optimizer = self._optimizer = adapter.optimizer
        self._state: dict[Tensor, dict[str, Any]] = {}
        if optimizer is not None:
            self._state = {p: dict(values) for p, values in optimizer.state.items()}
            self._groups = [dict(group) for group in optimizer.param_groups]
        kept = [v for values in self._state.values() for v in values.values() if isinstance(v, Tensor)]
        self._copies = _Copies([*moving, *kept], "update", scratch)

    def put_back(self) -> None:
        """Restore all of it."""
        self._copies.put_back()
        if self._optimizer is not None:
            self._optimizer.state.clear()
            self._optimizer.state.update({p: dict(values) for p, values in self._state.items()})
            for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update(values)


def networks(adapter: AdapterBase, *, fresh: bool = False) -> list[SplitModel]:
    """Return the model and the networks in the method's state, such as a teacher; `fresh`: also in its fresh state."""
    memories = [adapter.state, adapter.fresh.memory] if fresh and adapter.built else [adapter.state]
    return [adapter.net, *(net for memory in memories for net in memory.modules() if isinstance(net, SplitModel))]


def _get_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any], Any]:
    """Return the hooks of a module and its replaced forward, if it has one."""
    return dict(module._forward_hooks), dict(module._forward_pre_hooks), vars(module).get("forward")


def _set_hooks(module: nn.Module, before: tuple[dict[int, Any], dict[int, Any], Any]) -> None:
    for hooks, old in zip((module._forward_hooks, module._forward_pre_hooks), before, strict=False):
        hooks.clear()
        hooks.update(old)
    if before[2] is not None:
        module.forward = before[2]
    else:
        vars(module).pop("forward", None)


class RandomStream:
    """Generator states of the CPU and of the device in use, swapped in during a `with` block."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.states: dict[str, Tensor] = {}
        self._active: list[torch.device] = []

    @contextmanager
    def drawing(self, device: torch.device) -> Iterator[None]:
        """Draw random numbers from this stream within the block; adapters in other threads wait."""
        with _GENERATORS:
            yield from self._drawing(device)

    def _drawing(self, device: torch.device) -> Iterator[None]:
        devices = [torch.device("cpu")] + ([device] if device.type != "cpu" else [])
        before = [_get(d) for d in devices]
        try:
            for d in devices:
                _set(d, self.states.get(d.type, self._start(d)))
            self._active = devices
            yield
            self.states = {d.type: _get(d) for d in devices}  # skipped after a failure, which is rolled back
        finally:
            self._active = []
            for d, state in zip(devices, before, strict=True):
                _set(d, state)

    def restart(self, states: dict[str, Tensor] | None = None) -> None:
        """Restart from the seed, or from saved generator states."""
        self.states = dict(states or {})
        for device in self._active:
            _set(device, self.states.get(device.type, self._start(device)))

    def _start(self, device: torch.device) -> Tensor:
        return torch.Generator(device).manual_seed(self.seed).get_state()


def _get(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restore the generators at the end of the block."""
    devices = [torch.device("cpu")] + ([device] if device.type != "cpu" else [])
    with _GENERATORS:
        states = [_get(d) for d in devices]
        try:
            yield
        finally:
            for d, state in zip(devices, states, strict=True):
                _set(d, state)
