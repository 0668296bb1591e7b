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
from trueup.augment import Pixels
from trueup.core import files
from trueup.core.copying import copy_model, follow_parameters, kept_tensors, look_for_caches, move_state, put
from trueup.core.describe import describe
from trueup.core.engine import Engine
from trueup.core.guard import Guard, Health
from trueup.core.heads import look_for_head
from trueup.core.inputs import check_input, check_logits, check_model, check_values
from trueup.core.keeper import Keeper
from trueup.core.labels import PerLabel
from trueup.core.method import GradientMethod, Method, flag, whole
from trueup.core.moments import all_or_nothing
from trueup.core.params import select
from trueup.core.preparing import prepare
from trueup.core.randomness import RandomStream
from trueup.core.registry import suited
from trueup.core.robust import LEAST
from trueup.core.sharpness import backward, second_loss
from trueup.core.snapshot import capture, restore
from trueup.core.split import Output, SplitModel
from trueup.core.steps import decides, step_if_finite
from trueup.core.tuning import tuned
from trueup.core.watch import Watch

log = logging.getLogger("trueup")


class Adapter(nn.Module):
    """A model that predicts and then adapts, batch by batch: `logits = adapter(x)`."""

    def __init__(
        self, model: nn.Module, method: Method, *, head: str | None = None,
        output: Callable[[Any], Tensor] | None = None, example: Tensor | None = None, multilabel: bool = False,
        seed: int = 0, given: Mapping[str, Any] | None = None, guard: Guard | None = None, pixels: Pixels | None = None,
        engine: Engine | None = None,
    ) -> None:  # fmt: skip
        """given: the hyper-parameters that the method was made with by name; then it may turn out to be for pixels."""
        super().__init__()
        check_model(model)
        if isinstance(model, Adapter):
            raise TypeError("model is an adapter already; adapt model.unwrap() or the source model")
        whole("seed", seed, 0)
        flag("multilabel", multilabel)
        self.method, self.multilabel, self._given = method, multilabel, given
        self._watch = None if guard is None else Watch(guard)
        self._keeper: Keeper | None = None
        self._hooks: Method | PerLabel = method
        self.task: str | None = None
        self.net = SplitModel(copy_model(model).requires_grad_(False), output=output, norm=method.norm)
        self.net.multilabel, self.net.pixels, self.training = multilabel, pixels, False
        self.net.use(engine or Engine())
        self.state = nn.Module()
        self.batches = 0
        self._head, self._digest, self._built, self._prepared = head, "", False, False
        self._warned: set[str] = set()
        self._flags = {name: p.requires_grad for name, p in model.named_parameters()}
        self._random = RandomStream(seed)
        self._optimizer: torch.optim.Optimizer | None = None
        self._source: dict[str, Tensor] = {}
        self._fresh: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no submodule
        if example is not None:
            with torch.inference_mode(False):
                self._probe(self._checked(example))

    # The flow

    def forward(self, x: Tensor) -> Tensor:
        """Predict a batch, then adapt to it. Returns detached logits, at least float32.

        With a guard a row that holds NaN, infinite or huge values is answered by zeros, and disturbs no other.
        """
        with torch.inference_mode(False):
            x = self._checked(x, rows=self._watch is None)
            answers = self._answer(x) if self._watch is None else self._watch.answer(self, x)
            self.batches += 1
            if self._keeper is not None:
                self._keeper.tick(self)
        return answers

    __call__: Callable[..., Tensor]

    def _answer(self, x: Tensor) -> Tensor:
        if not self._built:
            self._probe(x)
        look_for_caches(self, x)
        if "prepare" in self.method.info.needs and not self._prepared:
            self._warn_once("%s was not prepared; it runs without its source data", self.method.info.name)
        with self._random.drawing(x.device):
            n = self._rows(len(x))
            if n == len(x):
                return self._take(x)
            answers = []
            with all_or_nothing(self):
                while len(x):
                    answers.append(self._take(x[:n]))
                    x = x[n:]
                    n = self._rows(len(x)) if len(x) else 0
        return torch.cat(answers)

    def _rows(self, waiting: int) -> int:
        """How many rows to take next; while nothing is learnt, as at the beginning: no update comes nearer."""
        frozen = self._watch is not None and self._watch.frozen
        n = self._hooks.rows(self._fresh[0] if frozen else self.state, waiting)
        if not 1 <= n <= waiting:
            raise ValueError(f"{self.method.info.name}.rows took {n} of {waiting} waiting rows")
        return n

    def _take(self, x: Tensor) -> Tensor:
        method, net = self._hooks, self.net
        again, learns = self.method.episodic, self._watch is None or not self._watch.frozen
        # Robust statistics answer; learning is a second pass, with the statistics of a batch that has enough images.
        twice = self._optimizer is not None and net.twice
        # The policy holds until after backward, for models that recompute their activations there.
        with torch.set_grad_enabled(self._optimizer is not None and learns and not twice), net.normalizing(len(x)):
            with nullcontext() if learns else net.reading():
                first = method.forward(net, x, self.state)
            if learns and not twice:
                again |= self._learn(x, first)
        if learns and twice and len(fit := x[net.usual_rows(len(x))]) >= (1 if self.method.many_views else LEAST):
            with torch.enable_grad(), net.learning(), net.normalizing(len(fit)):
                again |= self._learn(fit, method.forward(net, fit, self.state))
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            if learns:
                net.settle()
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
                with net.reading():
                    out = method.forward(net, x, state)
            with exact():
                self._update(out)
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
        again = partial(second_loss, self._hooks, self.net, self.state, out)
        if (loss := backward(loss, parameters, self.method.radius, again, self.net.scale)) is None:
            optimizer.zero_grad(set_to_none=True)
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        size = torch.nn.utils.get_total_norm([loss.detach(), *grads])
        if self._watch is None and devices.waits(size) and decides(optimizer):
            self.net.steps.taken(step_if_finite(optimizer, size))
        elif not bool(size.isfinite()):
            self.net.steps.left_out()
            if self._watch is not None:
                self._watch.stuck(self)
        elif self._watch is None or not self._watch.refuses(self, float(loss.detach()), float(size)):
            optimizer.step()
            self.net.steps.taken()
            if self._watch is not None:
                self._watch.stepped(self)
        torch.clear_autocast_cache()  # it holds copies of the weights as they were
        optimizer.zero_grad(set_to_none=True)

    @property
    def updates(self) -> int:
        """How many steps were taken; on a device that decides on them by itself, to ask is to wait for it."""
        return self.net.steps.count

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)

    def _checked(self, x: Tensor, *, rows: bool = True) -> Tensor:
        check_input(x, self.net.model, rows=rows)
        return x.clone() if x.is_inference() else x.detach()

    # Building and state

    def _probe(self, x: Tensor) -> None:
        """Find the head with a batch, then build. A copy is probed: some models change themselves as they run."""
        check_values(x)
        strict, least = "head" in self.method.info.needs, 1 if self.multilabel else 2
        needed = strict or getattr(self.method, "params", None) in ("head", "backbone")
        with self._random.drawing(x.device), torch.no_grad():
            head, logits = look_for_head(
                copy_model(self.net.model), x[:2], self._head, self.net.output, least, strict=strict, needed=needed
            )
        check_logits(logits, multilabel=self.multilabel)
        self._build(head, logits.shape[1], "classification" if logits.ndim == 2 else "segmentation", x)
        look_for_caches(self, x)

    def _build(self, head: str | None, channels: int, task: str, x: Tensor | None = None) -> None:
        """Make the state of a fresh adapter; with a batch, measure what the engine leaves open."""
        net, method = self.net, suited(self.method, self._given, task)
        selected = select(net.model, method.params, head) if isinstance(method, GradientMethod) else {}
        self.method, self.task = method, task
        self._hooks = PerLabel(method, channels) if self.multilabel else method
        net.attach(head, channels, dense=task == "segmentation")
        net.selected = selected
        net.model.requires_grad_(False)
        for p in selected.values():
            p.requires_grad_(True)
        if x is not None and net.engine.open:
            with self._random.drawing(x.device):
                net.use(tuned(net, x, learns=bool(selected)))
        self._source = {n: t.detach().clone() for n, t in {**selected, **dict(net.model.named_buffers())}.items()}
        self._fresh = (self._init(),)
        self._built = True
        self.reset()

    def _init(self) -> nn.Module:
        """The method's state before any batch; the model must be at its source."""
        self._random.restart()
        device = next((t.device for t in (*self.net.parameters(), *self.net.buffers())), torch.device("cpu"))
        with self._random.drawing(device), torch.no_grad(), torch.autocast(device.type, enabled=False):
            return self._hooks.init(self.net).eval()

    def prepare(self, loader: Iterable[Any]) -> None:
        """Let a method that wants source data see some before deployment: batches x, or (x, y) whose y is ignored."""
        prepare(self, loader)

    def reset(self) -> None:
        """Back to the fresh adapter, bit by bit: weights, statistics, memory, optimiser, random stream, guard."""
        self._random.restart()
        self.batches = 0
        self.net.steps.restart()
        if self._watch is not None:
            self._watch.restart()
        if self._built:
            self._restart()

    def _restart(self, state: nn.Module | None = None) -> None:
        """The model at its source, with the state of a fresh adapter or a copy of this one."""
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in self._watched().items():
                put(self.net.model, name, tensor, self._source[name])
            self.net.restart()
            torch.clear_autocast_cache()
            self.state = copy.deepcopy(state or self._fresh[0])
        if isinstance(self.method, GradientMethod):
            named = [*self.net.selected.items(), *((f"state.{n}", p) for n, p in self.state.named_parameters())]
            named = [(name, p) for name, p in named if p.requires_grad]
            self._optimizer = self.method.optimizer(named) if named else None

    def _watched(self) -> dict[str, Tensor]:
        """What of the model may change: the selected parameters and the buffers of statistics."""
        tensors: dict[str, Tensor] = {**dict(self.net.model.named_parameters()), **dict(self.net.model.named_buffers())}
        return {name: tensors[name] for name in self._source}

    @property
    def health(self) -> Health:
        """The guard's view of the adapter: state, reason, numbers, counts of events. Needs `guard=True`."""
        if self._watch is None:
            raise ValueError("this adapter has no guard: make it with adapt(..., guard=True)")
        return self._watch.health

    def save(self, path: str | Path) -> None:
        """Write what adaptation has changed, with what `load` needs to refuse a foreign state."""
        if self.method.info.images:
            self._warn_once(
                "a state of %s holds images of the stream: guard it as you guard them", self.method.info.name
            )
        files.write(path, *capture(self))

    def load(self, path: str | Path) -> None:
        """Continue from a saved state, bit by bit; a foreign or damaged file is refused and changes nothing."""
        with torch.inference_mode(False):
            restore(self, *files.read(path), path)

    def checkpoint(self, folder: str | Path, *, every: int = 100, keep: int = 3) -> int:
        """Write the state to a folder after every so many batches, and keep the last few.

        If the folder holds states already, the newest whole one is taken up. Returns how many batches it has seen.
        """
        keeper = Keeper(Path(folder), every, keep)
        with torch.inference_mode(False):
            seen = self.batches if keeper.resume(self) else 0
        self._keeper = keeper
        return seen

    # A good citizen

    def unwrap(self) -> nn.Module:
        """The adapted model as a plain module, in eval mode, with its own copy of the weights.

        Its BatchNorm layers use running statistics: those estimated with norm="ema" or "robust", else the source's.
        """
        model = copy_model(self.net.plain())
        for name, p in model.named_parameters():
            p.requires_grad_(self._flags[name])
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that goes on alone; what a model has kept of its last forward is cut from the graph."""
        memo.update(kept_tensors(self))
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        with torch.inference_mode(False):
            twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def train(self, mode: bool = True) -> Self:
        """Changes nothing: an adapter predicts and adapts in one mode."""
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.net._apply(fn)  # type: ignore[no-untyped-call]
        self._source = {name: fn(t) for name, t in self._source.items()}
        if self._watch is not None:
            self._watch.move(fn)
        self._digest = ""
        for module in (self.state, *self._fresh):
            move_state(module, fn)
        follow_parameters(self._optimizer)
        return self

    __repr__ = describe
