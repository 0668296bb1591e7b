"""The base class of `Adapter`: construction, reset, saving, copies, export."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from trueup.core.autosave import Autosave
from trueup.core.building import make_ready, prepare
from trueup.core.copying import calling, fork, move
from trueup.core.effects import check_effect
from trueup.core.export import plain_copy
from trueup.core.files import digest
from trueup.core.isolation import CallLock, RandomStream, Scratch, Undo, serialized
from trueup.core.method import GradientMethod, Method
from trueup.core.multilabel import PerLabel
from trueup.core.saving import load, save
from trueup.core.state import AdapterState, Progress, named_tensors
from trueup.guard.config import Guard, Health, plain_health
from trueup.guard.monitor import Monitor
from trueup.model.calls import Batch, read_images
from trueup.model.copy_model import check_model, copy_model, kept_tensors
from trueup.model.runner import RunSettings
from trueup.model.split_model import Output, SplitModel
from trueup.validate import check_bool, check_int
from trueup.views import Normalization

log = logging.getLogger("trueup")


class AdapterBase(nn.Module):
    """Base of `Adapter`: its parts, and what users call between batches."""

    method: Method
    hooks: Method | PerLabel
    """The method, or one for each label of a multi-label model."""
    task: str | None
    net: SplitModel
    state: nn.Module
    """Memory of the method."""
    optimizer: torch.optim.Optimizer | None
    monitor: Monitor | None
    built: bool
    """True once a batch or a file has shown the head and the task, and the fresh state is made."""
    fresh: AdapterState
    """The state before the first batch; only a built adapter has one."""
    kept: list[AdapterState]
    """The last good states, the older first; the guard says when to keep one."""
    last_numbers: dict[str, Tensor]
    """Entropy and agreement of the last batch; only without a guard."""
    undo: Undo | None
    autosave: Autosave | None
    forward_observers: list[Callable[[SplitModel, Output], None]]
    """Called after each forward pass, before the network learns from the batch."""
    answer_observers: list[Callable[[SplitModel, Output, Tensor], None]]
    """Called after each prediction with the pass that it comes from; the network may have learnt by then."""

    def __init__(
        self, model: nn.Module, method: Method, *, head: str | None = None,
        output: Callable[[Any], Tensor] | str | None = None, example: Any = None, multilabel: bool = False,
        seed: int = 0, hyper: Mapping[str, Any] | None = None, guard: Guard | None = None, every: int = 1,
        normalization: Normalization | None = None, settings: RunSettings | None = None,
    ) -> None:  # fmt: skip
        """hyper: those of a method that was given by name, to build its class for segmentation if that is the task."""
        super().__init__()
        check_model(model)
        if isinstance(model, AdapterBase):
            raise TypeError("model is an adapter already; adapt model.unwrap() or the source model")
        check_int("seed", seed, 0)
        check_int("every", every, 1)
        check_bool("multilabel", multilabel)
        self.method, self.hyper, self.multilabel, self.head_name, self.every = method, hyper, multilabel, head, every
        self.hooks, self.task = method, None
        self.flags = {name: p.requires_grad for name, p in model.named_parameters()}
        source = copy_model(model).requires_grad_(False)
        self.net = SplitModel(
            source, output=output, norm=method.norm, multilabel=multilabel, normalization=normalization
        )
        self.net.use(settings or RunSettings())
        check_effect(model, method)
        self.state, self.optimizer, self.random = nn.Module(), None, RandomStream(seed)
        self.monitor = None if guard is None else Monitor(guard)
        self.batches = self.images = 0
        self.kept, self.last_numbers = [], {}
        self.undo = self.autosave = None
        self.built = self.prepared = self.paused = self.training = False
        self.forward_observers, self.answer_observers = [], []
        self.lock, self.scratch, self.digest = CallLock(), Scratch(), ""
        self._warned: set[str] = set()
        if example is not None:
            with torch.inference_mode(False):
                x = read_images(self.net.model, (example,), {})
                with calling(self, x) if isinstance(x, Batch) else nullcontext():
                    make_ready(self, x)

    @property
    def source(self) -> dict[str, Tensor]:
        """The source's values of all tensors of the model that may change."""
        return self.fresh.weights if self.built else {}

    @property
    def updates(self) -> int:
        """The number of optimiser steps; reading it may synchronise with the device."""
        return self.net.runner.steps.count

    @property
    def health(self) -> Health:
        """The guard's view of the adapter: state, reason, numbers, events; without a guard, counts and last numbers."""
        if self.monitor is not None:
            return self.monitor.health
        return plain_health(self.images, self.batches, self.updates, self.last_numbers)

    def warn_once(self, message: str, *values: object) -> None:
        """Log a warning the first time."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)

    # Parts of the state

    def mutable_tensors(self) -> dict[str, Tensor]:
        """Return what may change of the model: the selected parameters and all buffers."""
        tensors = named_tensors(self.net.model)
        return {name: tensors[name] for name in self.source}

    def make_memory(self) -> nn.Module:
        """Return the method's state before any batch; the model must have the source's weights."""
        self.random.restart()
        device = next((t.device for t in (*self.net.parameters(), *self.net.buffers())), torch.device("cpu"))
        with self.random.drawing(device), torch.no_grad(), torch.autocast(device.type, enabled=False):
            return self.hooks.init(self.net).eval()

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        """Return a new optimiser of the selected parameters and those of the method's state."""
        if not isinstance(self.method, GradientMethod):
            return None
        named = [*self.net.selected.items(), *((f"state.{n}", p) for n, p in self.state.named_parameters())]
        named = [(name, p) for name, p in named if p.requires_grad]
        return self.method.optimizer(named) if named else None

    def source_digest(self) -> str:
        """Return the SHA-256 of the source model, computed once."""
        if not self.digest:
            buffers = {} if self.built else dict(self.net.model.named_buffers())  # once built they are in the source
            self.digest = digest({**dict(self.net.model.named_parameters()), **buffers, **self.source})
        return self.digest

    # What users call

    @serialized
    def reset(self) -> None:
        """Reset to the fresh state, bit-exactly: weights, statistics, memory, optimiser, random stream, guard."""
        if self.built:
            self.fresh.apply(self)
        else:
            Progress().apply(self)

    @serialized
    def prepare(self, loader: Iterable[Any]) -> None:
        """Show source data to a method that needs it, before deployment: batches x, or (x, y) whose y is ignored."""
        with torch.inference_mode(False):
            prepare(self, loader)

    def pause(self) -> None:
        """Predict without adapting until `resume`; this switch is not saved."""
        self.paused = True

    def resume(self) -> None:
        """Adapt again."""
        self.paused = False

    @serialized
    def save(self, path: str | Path) -> None:
        """Write what adaptation has changed, with what `load` needs to refuse a foreign state."""
        save(self, path)

    @serialized
    def load(self, path: str | Path) -> None:
        """Continue from a saved state, bit by bit; a foreign or damaged file is refused and changes nothing."""
        load(self, path)

    @serialized
    def checkpoint(self, folder: str | Path, *, every: int = 100, keep: int = 3) -> int:
        """Save a state to a folder after every so many batches, keep the last few, and resume from the newest.

        Returns the number of batches that the resumed state has seen.
        """
        autosave = Autosave(Path(folder), every, keep)
        with torch.inference_mode(False):
            seen = self.batches if autosave.resume(self) else 0
        self.autosave = autosave
        return seen

    @serialized
    def fork(self) -> Self:
        """Copy this adapter for another stream; both share the storage of all weights that the method never updates."""
        return fork(self)

    @serialized
    def unwrap(self, *, statistics: str = "adapted") -> nn.Module:
        """Return the adapted model as a plain module in eval mode, to export it.

        Its BatchNorm layers get the statistics that they normalised with: the policy's estimates, or those of the
        batches, pooled; with statistics="source" those of the source. A warning names what else a method adds.
        """
        return plain_copy(self, statistics)

    @serialized
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent copy; tensors that the model has cached are detached."""
        memo.update({**kept_tensors(self), id(self.forward_observers): [], id(self.answer_observers): []})
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        with torch.inference_mode(False):
            twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return copy.deepcopy(self).__dict__  # a copy, so that other threads need not wait for pickle

    def train(self, mode: bool = True) -> Self:
        """Change nothing: an adapter predicts and adapts in one mode."""
        return self

    @serialized
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        move(self, fn)
        return self

    def __repr__(self) -> str:
        """Return the method with its hyper-parameters, the number of updated values, the head and the guard's state."""
        hyper = ", ".join(f"{name}={value!r}" for name, value in self.method.hyperparameters().items())
        method = f"{type(self.method).__name__}({hyper})"
        guard = "" if self.monitor is None else f", guard: {self.monitor.health.state}"
        if not self.built:
            return f"{method}, waiting for its first batch{guard}"
        total = sum(p.numel() for p in self.net.model.parameters())
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        updated = {id(p) for group in groups for p in group["params"]}  # an optimiser may skip selected parameters
        count = sum(p.numel() for p in self.net.selected.values() if id(p) in updated)
        head = f"head {self.net.head!r}" if self.net.head is not None else "no head"
        labels = f", {self.net.channels} labels" if self.multilabel else ""
        return f"{method}, updates {_short(count)} of {_short(total)} values, {head}{labels}{guard}"


def _short(count: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)
