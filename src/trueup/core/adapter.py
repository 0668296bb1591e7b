"""The adapter: the one flow, the only optimiser step, and all state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from trueup import devices
from trueup.core.autosave import Autosave
from trueup.core.building import build_for
from trueup.core.copying import assign_tensor, calling, copy_model, fork, kept_tensors, look_for_caches, move
from trueup.core.describe import describe
from trueup.core.effects import check_effect
from trueup.core.export import plain_copy
from trueup.core.frozen_source import Answer, source_logits
from trueup.core.method import GradientMethod, Method
from trueup.core.multilabel import PerLabel
from trueup.core.preparing import prepare
from trueup.core.random_stream import RandomStream
from trueup.core.second_pass import second_loss
from trueup.core.state import load, save
from trueup.core.undo import CallLock, Scratch, Undo, all_or_nothing, serialized
from trueup.guard.config import Guard, Health, last_numbers, plain_health
from trueup.guard.monitor import Monitor
from trueup.model.calls import read_call
from trueup.model.inputs import check_input, check_model
from trueup.model.runner import RunSettings
from trueup.model.split_model import Output, SplitModel
from trueup.model.steps import backward, decides, step_if_finite
from trueup.norm.robust import LEAST
from trueup.validate import check_bool, check_int
from trueup.views import Normalization

log = logging.getLogger("trueup")


class Adapter(nn.Module):
    """A model that predicts and then adapts, batch by batch: `logits = adapter(x)`."""

    def __init__(
        self, model: nn.Module, method: Method, *, head: str | None = None,
        output: Callable[[Any], Tensor] | str | None = None, example: Any = None, multilabel: bool = False,
        seed: int = 0, given: Mapping[str, Any] | None = None, guard: Guard | None = None, every: int = 1,
        pixels: Normalization | None = None, engine: RunSettings | None = None,
    ) -> None:  # fmt: skip
        """given: the hyper-parameters that the method was made with by name; then it may turn out to be for pixels."""
        super().__init__()
        check_model(model)
        if isinstance(model, Adapter):
            raise TypeError("model is an adapter already; adapt model.unwrap() or the source model")
        check_int("seed", seed, 0)
        check_int("every", every, 1)
        check_bool("multilabel", multilabel)
        self.method, self.multilabel, self._given, self.every, self.paused = method, multilabel, given, every, False
        self._watch, self._lock, self._scratch = None if guard is None else Monitor(guard), CallLock(), Scratch()
        self._undo: Undo | None = None
        self._keeper: Autosave | None = None
        self._hooks: Method | PerLabel = method
        self.task: str | None = None
        source = copy_model(model).requires_grad_(False)
        self.net = SplitModel(source, output=output, norm=method.norm, multilabel=multilabel, normalization=pixels)
        self.net.use(engine or RunSettings())
        check_effect(model, method)
        self.state, self.batches, self.images, self.training = nn.Module(), 0, 0, False
        self._last: dict[str, Tensor] = {}  # numbers of the last batch, without a guard
        self._head, self._digest, self._built, self._prepared = head, "", False, False
        self._warned: set[str] = set()
        self._flags = {name: p.requires_grad for name, p in model.named_parameters()}
        self._random = RandomStream(seed)
        self._optimizer: torch.optim.Optimizer | None = None
        self._source: dict[str, Tensor] = {}
        self._fresh: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no submodule
        if example is not None:
            with torch.inference_mode(False), calling(self, x := self._entered((example,))):
                build_for(self, x)

    @serialized
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Predict a batch, then adapt to it. Returns detached logits, at least float32.

        Call it as you call the model: `adapter(x)`, `adapter(pixel_values=x)`, with a dict or several tensors. With a
        guard a row that holds NaN, infinite or huge values is answered by zeros, and disturbs no other. Threads take
        turns. If anything is raised, also by Ctrl-C, the batch has happened as a whole or not at all.
        """
        with torch.inference_mode(False):
            x = self._entered(args, kwargs, rows=self._watch is None)
            with calling(self, x), all_or_nothing(self):
                answers = self._answer(x) if self._watch is None else self._watch.answer(self, x)
                self.batches, self.images = self.batches + 1, self.images + len(x)
                self._last = {} if self._watch is not None else last_numbers(answers, multilabel=self.multilabel)
            if self._keeper is not None:
                self._keeper.tick(self)
        return answers

    __call__: Callable[..., Tensor]

    def _answer(self, x: Tensor) -> Tensor:
        if not self._built:
            build_for(self, x)
        look_for_caches(self, x)
        if "prepare" in self.method.info.needs and not self._prepared:
            self._warn_once("%s was not prepared; it runs without its source data", self.method.info.name)
        with self._random.drawing(x.device):
            n = self._rows(len(x))
            if n == len(x):
                return self._take(x)
            answers = []
            while len(x):
                answers.append(self._take(x[:n]))
                x = x[n:]
                n = self._rows(len(x)) if len(x) else 0
        return torch.cat(answers)

    def _rows(self, waiting: int) -> int:
        """How many rows to take next; while nothing is learnt, as at the beginning: no update comes nearer."""
        n = self._hooks.rows(self.state if self._learns else self._fresh[0], waiting)
        if not 1 <= n <= waiting:
            raise ValueError(f"{self.method.info.name}.rows took {n} of {waiting} waiting rows")
        return n

    def _take(self, x: Tensor) -> Tensor:
        method, net = self._hooks, self.net
        again, learns = self.method.episodic, self._learns
        # Robust statistics answer; learning is a second pass, with the statistics of a batch that has enough images.
        twice = learns and self._optimizer is not None and net.policy.two_passes
        # The policy holds until after backward, for models that recompute their activations there.
        with torch.set_grad_enabled(self._optimizer is not None and learns and not twice), net.active(len(x)):
            with nullcontext() if learns else net.frozen_statistics():
                first = method.forward(net, x, self.state)
            if learns and not twice:
                again |= self._learn(x, first)
        if twice and len(fit := x[net.policy.inlier_rows(len(x))]) >= (1 if self.method.many_views else LEAST):
            with torch.enable_grad(), net.active(len(fit), learning=True):
                again |= self._learn(fit, method.forward(net, fit, self.state))
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            if learns:
                net.update_estimates()
            answer = method.predict(net, first, self.state).detach()
        if again:
            self._restart()
            self._random.restart()
        return answer if self._watch is None else self._watch.after(self, x, answer)

    def _learn(self, x: Tensor, out: Output) -> bool:
        """Observe, step, clean up; whether the method asks for a fresh start."""
        method, net, state, again = self._hooks, self.net, self.state, False
        # Only the model runs under the user's autocast; losses and memory do not.
        exact = partial(torch.autocast, x.device.type, enabled=False)
        with exact(), torch.no_grad():
            method.observe(net, out, state)
        for step in range(self.method.steps if isinstance(self.method, GradientMethod) else 1):
            if step > 0:
                with net.frozen_statistics():
                    out = method.forward(net, x, state)
            with exact():
                self._update(out)
            self._expect_update()
            if self._watch is not None and self._watch.frozen:
                break  # the step went wrong and was taken back
            with exact(), torch.no_grad():
                again |= method.after(net, out, state) == "reset"
        return again

    def _update(self, out: Output) -> None:
        """The only optimiser step."""
        optimizer = self._optimizer
        loss = None if optimizer is None else self._hooks.loss(self.net, out, self.state)
        if optimizer is None or loss is None:
            return
        if not loss.requires_grad:
            self._warn_once("the loss of %s does not depend on any selected parameter", self.method.info.name)
            return
        optimizer.zero_grad(set_to_none=True)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._expect_update(needed=self.method.radius > 0)  # then parameters move before the step
        again = partial(second_loss, self._hooks, self.net, self.state, out)
        if (loss := backward(loss, parameters, self.method.radius, again, self.net.runner.loss_scale)) is None:
            optimizer.zero_grad(set_to_none=True)
            return
        self._expect_update()
        grads = [p.grad for p in parameters if p.grad is not None]
        size = torch.nn.utils.get_total_norm([loss.detach(), *grads])
        if self._watch is None and devices.waits(size) and decides(optimizer):
            self.net.runner.steps.taken(step_if_finite(optimizer, size))
        elif not bool(size.isfinite()):
            self.net.runner.steps.left_out()
            if self._watch is not None:
                self._watch.stuck(self)
        elif self._watch is None or not self._watch.refuses(self, float(loss.detach()), float(size)):
            optimizer.step()
            self.net.runner.steps.taken()
            if self._watch is not None:
                self._watch.stepped(self)
        torch.clear_autocast_cache()  # it holds copies of the weights as they were
        optimizer.zero_grad(set_to_none=True)

    def _expect_update(self, needed: bool = True) -> None:
        """Let a batch that fails from here on be undone although parameters have moved."""
        if self._undo is not None and needed:
            self._undo.before_update()

    @property
    def _learns(self) -> bool:
        """True if this batch is learnt from: not while paused, between every k-th batch, or under suspicion."""
        return not (self.paused or self.batches % self.every or (self._watch is not None and self._watch.frozen))

    @property
    def updates(self) -> int:
        """How many steps were taken; on a device that decides on them by itself, to ask is to wait for it."""
        return self.net.runner.steps.count

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            log.warning(message, *values)
        self._warned.add(message)

    def _entered(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, rows: bool = True) -> Tensor:
        """The images of a call, checked."""
        x = read_call(self.net.model, args, kwargs or {})
        check_input(x, self.net.model, rows=rows)
        return x.clone() if x.is_inference() else x.detach()

    @serialized
    def prepare(self, loader: Iterable[Any]) -> None:
        """Let a method that wants source data see some before deployment: batches x, or (x, y) whose y is ignored."""
        prepare(self, loader)

    @serialized
    def reset(self) -> None:
        """Back to the fresh adapter, bit by bit: weights, statistics, memory, optimiser, random stream, guard."""
        self._random.restart()
        self.batches, self.images, self._last = 0, 0, {}
        self.net.runner.steps.restart()
        if self._watch is not None:
            self._watch.restart()
        if self._built:
            self._restart()

    def _restart(self, state: nn.Module | None = None) -> None:
        """The model at its source, with the state of a fresh adapter or a copy of this one."""
        self._expect_update()
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in self._mutable_tensors().items():
                assign_tensor(self.net.model, name, tensor, self._source[name])
            self.net.restart()
            torch.clear_autocast_cache()
            self.state = copy.deepcopy(state or self._fresh[0])
        if isinstance(self.method, GradientMethod):
            named = [*self.net.selected.items(), *((f"state.{n}", p) for n, p in self.state.named_parameters())]
            named = [(name, p) for name, p in named if p.requires_grad]
            self._optimizer = self.method.optimizer(named) if named else None

    def _mutable_tensors(self) -> dict[str, Tensor]:
        """What of the model may change: the selected parameters and the buffers of statistics."""
        tensors: dict[str, Tensor] = {**dict(self.net.model.named_parameters()), **dict(self.net.model.named_buffers())}
        return {name: tensors[name] for name in self._source}

    @property
    def health(self) -> Health:
        """The guard's view of the adapter: state, reason, numbers, counts of events; without a guard, the counts."""
        if self._watch is not None:
            return self._watch.health
        return plain_health(self.images, self.batches, self.updates, self._last)

    @serialized
    def frozen(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the answer of the frozen source to a batch; nothing changes."""
        with torch.inference_mode(False):
            return source_logits(self, self._entered(args, kwargs, rows=self._watch is None))

    @serialized
    def answer(self, *args: Any, **kwargs: Any) -> Answer:
        """Predict and adapt as a call does, with the frozen source's answer; without a guard `health` compares them."""
        source = self.frozen(*args, **kwargs)
        answer = Answer(self(*args, **kwargs), source)
        self._last = last_numbers(*answer, multilabel=self.multilabel)
        return answer

    def pause(self) -> None:
        """Only predict from now on, with what was learnt so far, until `resume`; a switch that no file keeps."""
        self.paused = True

    def resume(self) -> None:
        """Adapt again."""
        self.paused = False

    @serialized
    def fork(self) -> Self:
        """Copy this adapter for another stream; both share the memory of all weights that the method never updates."""
        return fork(self)

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
        """Write the last few states to a folder, and go on from the newest; return how many batches that has seen."""
        keeper = Autosave(Path(folder), every, keep)
        with torch.inference_mode(False):
            seen = self.batches if keeper.resume(self) else 0
        self._keeper = keeper
        return seen

    @serialized
    def unwrap(self, *, statistics: str = "adapted") -> nn.Module:
        """Return the adapted model as a plain module, in eval mode, with its own copy of the weights: to export it.

        Its BatchNorm layers get the statistics that they normalised with, pooled over the last batches; with
        statistics="source" those of the source. What a method adds to the weights is lost, and a warning names it.
        """
        return plain_copy(self, statistics)

    @serialized
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that goes on alone; what a model has kept of its last forward is cut from the graph."""
        memo.update(kept_tensors(self))
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        with torch.inference_mode(False):
            twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return copy.deepcopy(self).__dict__  # other threads go on while it is written

    def train(self, mode: bool = True) -> Self:
        """Changes nothing: an adapter predicts and adapts in one mode."""
        return self

    @serialized
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        move(self, fn)
        return self

    __repr__ = describe
