"""The execution of a model: precision, memory layout, graphs, recomputation, caches and the form of its calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trueup.finite import NotFiniteError, check_values, usable
from trueup.model.caches import Caches
from trueup.model.calls import Batch, Signature, as_logits, call_model, output_function
from trueup.model.recompute import NotRecomputableError, RecomputedBlocks, recomputing, replaced_forward
from trueup.norm.policy import NormPolicy, SourcePolicy
from trueup.validate import check_bool, check_choice

log = logging.getLogger("trueup")

T = TypeVar("T")
Calls = list[tuple[Tensor, Tensor]]  # inputs and outputs of a layer

PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 2.0**12  # in fp16, so that small gradients are not rounded to zero


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings for running a model; they change time, memory and roundings, and nothing else."""

    precision: str = "float32"
    """"float32" (the model's own, with autocast as it is set outside), "bf16" or "fp16" (autocast), or "auto"."""
    channels_last: bool | str | None = None
    """Memory layout of convolutions; "auto" measures. None: the model's own; with memory="low" channels
    last, if the model supports it, because convolutions then make no copies."""
    compile: bool = False
    """True to compile the model with torch.compile."""
    memory: str = "usual"
    """"low": recompute activations in backward, block by block, and keep features in half precision."""
    measured: tuple[str, ...] = ()
    """Names of settings that were measured; a saved state brings its own values of these."""

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, (*PRECISIONS, "auto"))
        if not isinstance(self.channels_last, bool | None) and self.channels_last != "auto":
            raise ValueError(f"channels_last={self.channels_last!r} must be True, False or 'auto'")
        check_bool("compile", self.compile)
        check_choice("memory", self.memory, ("usual", "low"))
        if self.compile and self.memory == "low":
            raise ValueError("compile=True and memory='low' do not go together: leave one out")
        if self.channels_last is None and self.memory == "usual":
            object.__setattr__(self, "channels_last", False)

    @property
    def unresolved(self) -> tuple[str, ...]:
        """Names of the settings that are still to be measured with a batch."""
        return tuple(name for name in ("precision", "channels_last") if getattr(self, name) in ("auto", None))

    def check_policy(self, policy: NormPolicy) -> None:
        """Refuse a normalisation policy that these settings cannot follow."""
        norm = policy.norm
        if self.compile and not policy.compilable:
            raise ValueError(f"compile=True goes with norm='source' or 'batch', not with norm={norm!r}: leave one out")
        if self.memory == "low" and not policy.recomputable:
            raise ValueError(f"memory='low' does not go with norm={norm!r}, whose estimates move after a forward")

    def autocast(self, device: str) -> AbstractContextManager[object]:
        """Return the context in which the model runs in this precision."""
        dtype = PRECISIONS.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


@contextmanager
def recording_calls(layer: nn.Module | None) -> Iterator[Calls]:
    """Collect the inputs and outputs of a layer, call by call."""
    calls: Calls = []
    if layer is None:
        yield calls
        return
    with layer.register_forward_hook(lambda _, args, out: calls.append((args[0], out))):
        yield calls


class CompiledModel:
    """A model that is compiled when it first runs; copies compile again."""

    def __init__(self) -> None:
        self._function: Callable[..., tuple[Any, Calls]] | None = None
        self._recording: Callable[..., Any] | None = None
        self._calls: Calls = []

    def __call__(self, model: nn.Module, layer: nn.Module | None, x: Tensor) -> tuple[Any, Calls]:
        """Return the model's output and the calls of a layer."""
        function = self._function or self._compile(model, layer)
        self._calls.clear()  # a forward that failed has left some
        # The same function each time: another would be compiled anew.
        with nullcontext() if layer is None or self._recording is None else replaced_forward(layer, self._recording):
            output: tuple[Any, Calls] = call_model(function, x)
        return output

    def _compile(self, model: nn.Module, layer: nn.Module | None) -> Callable[..., tuple[Any, Calls]]:
        calls = self._calls
        if layer is not None:
            forward = layer.forward

            def recording(x: Tensor) -> Tensor:
                out: Tensor = forward(x)
                calls.append((x, out))
                return out

            self._recording = recording

        def run(*args: Any, **kwargs: Any) -> tuple[Any, Calls]:
            output, recorded = model(*args, **kwargs), list(calls)
            calls.clear()  # dynamo specialises on the length of the list, so it must always start empty
            return output, recorded

        # A code object of its own: dynamo limits recompilations per code object, which all models would share.
        code = run.__code__.replace()
        self._function = torch.compile(FunctionType(code, globals(), run.__name__, None, run.__closure__))
        return self._function

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave compiled code out of files and copies."""
        return CompiledModel, ()


class Steps:
    """A count of optimiser steps. Steps skipped on a device become known when the host next waits for it."""

    def __init__(self) -> None:
        self._count = 0
        self._skipped: Tensor | None = None  # how many of them a device skipped, not read yet
        self.shrunk = 0  # how often the loss scale was reduced

    @property
    def count(self) -> int:
        """The number of steps taken; reading it may wait for a device."""
        if self._skipped is not None:
            self._subtract(float(self._skipped))
        return self._count

    @count.setter
    def count(self, count: int) -> None:
        """Set the count, with no step left to read."""
        self._count, self._skipped = count, None

    def scale(self, usual: float) -> float:
        """Return the loss scale: less, each time that a gradient was not finite."""
        return max(1.0, usual * 0.25**self.shrunk)

    def left_out(self, count: int = 1) -> None:
        """Note that so many gradients were not finite."""
        self.shrunk = min(self.shrunk + count, 8)
        log.warning("the gradient is not finite; %d update%s left out", count, " is" if count == 1 else "s are")

    def taken(self, skipped: Tensor | None = None) -> None:
        """Count a step, unless `skipped`, if given, turns out to be 1."""
        self._count += 1
        if skipped is not None:
            self._skipped = skipped if self._skipped is None else self._skipped + skipped

    def look(self, finite: Tensor) -> bool:
        """Read a truth value and, in the same wait for the device, how many steps were skipped."""
        if self._skipped is None:
            return bool(finite)
        good, skipped = torch.stack([finite.to(self._skipped), self._skipped]).tolist()
        self._subtract(skipped)
        return bool(good)

    def _subtract(self, skipped: float) -> None:
        self._skipped = None
        if skipped:
            self._count -= int(skipped)
            self.left_out(int(skipped))


class Runner:
    """A runner of one model, under settings that may change, with the count of optimiser steps."""

    def __init__(self, model: nn.Module, output: Callable[[Any], Tensor] | str | None) -> None:
        self.model = model
        self.output = output_function(output)
        self.settings = RunSettings()
        self.steps = Steps()
        self.signature: Signature | None = None  # of the calls in this batch, if the model takes more than one tensor
        self.caches: Caches | None = None  # unknown before the first batch
        self.blocks = RecomputedBlocks()
        self._graph: CompiledModel | None = None
        self._channels_last: set[str] = set()  # names of weights that were laid out with channels last
        self._recomputes = self._warned = False

    def use(self, settings: RunSettings, policy: NormPolicy) -> None:
        """Run the model with these settings from now on."""
        settings.check_policy(policy)
        self.settings = settings
        self._graph = CompiledModel() if settings.compile else None
        self._lay_out()

    def _lay_out(self) -> None:
        """Give the weights of convolutions the memory layout of the settings."""
        if self.settings.channels_last is True:
            for name, p in self.model.named_parameters():
                if p.ndim == 4 and not p.is_contiguous(memory_format=torch.channels_last):
                    p.data = p.data.contiguous(memory_format=torch.channels_last)
                    self._channels_last.add(name)
            return
        while self._channels_last:
            p = self.model.get_parameter(self._channels_last.pop())
            p.data = p.data.contiguous(memory_format=torch.contiguous_format)

    @property
    def low_memory(self) -> bool:
        """True if memory is saved at the cost of time."""
        return self.settings.memory == "low"

    @property
    def loss_scale(self) -> float:
        """The factor of a loss in backward, against underflow of its gradient in fp16."""
        return self.steps.scale(LOSS_SCALE if self.settings.precision == "fp16" else 1.0)

    def backward(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Compute the gradient of a loss."""
        scale = self.loss_scale
        (loss * scale if scale != 1 else loss).backward()
        for p in parameters if scale != 1 else ():
            if p.grad is not None:
                p.grad.div_(scale)

    def uses_graph(self, rows: int, policy: NormPolicy) -> bool:
        """Return whether a batch runs compiled: very small ones need hooks that set their statistics."""
        if self._graph is None:
            return False
        enough = isinstance(policy, SourcePolicy) or rows >= policy.fewest
        if not enough and not self._warned:
            log.info("batches of less than %d images run without a graph, unless with norm='source'", policy.fewest)
            self._warned = True
        return enough

    def run(self, x: Tensor, head: nn.Module | None, policy: NormPolicy, min_channels: int) -> tuple[Tensor, Calls]:
        """Return the model's logits, and the inputs and outputs of its head."""
        images = x
        if self.settings.channels_last is True and x.ndim == 4:
            images = x.contiguous(memory_format=torch.channels_last)
            images = x.with_images(images) if isinstance(x, Batch) else images
        with self.settings.autocast(x.device.type):
            if self._graph is not None and self.uses_graph(len(x), policy):
                output, calls = self._graph(self.model, head, images)
            else:
                with recording_calls(head) as calls:
                    output = call_model(self.without_caches(), images)
        return as_logits(output, self.output, rows=len(x), min_channels=min_channels), calls

    def without_caches(self) -> nn.Module:
        """Return the model, cleared of tensors that it cached in earlier forwards."""
        if self.caches is not None and self.caches.places:
            self.caches.clear(self.model)
        return self.model

    def check_finite(self, x: Tensor, features: Tensor, logits: Tensor) -> None:
        """Refuse an output that is not finite; one wait for the device, shared with the outcome of earlier steps."""
        finite = (_norm(features) + _norm(logits)).isfinite()
        if not self.steps.look(finite if x.is_cpu else finite & usable(x)):
            check_values(x)
            raise NotFiniteError(
                "the model's answer to this batch is not finite: the values are too large, "
                "or adaptation went astray (reset() goes back, a smaller lr helps)"
            )

    @contextmanager
    def recomputing(self, head: str | None) -> Iterator[None]:
        """With low memory, let blocks keep only their inputs and recompute the rest in backward."""
        if not self.low_memory or self._recomputes:
            yield
            return
        self._recomputes = True
        try:
            with recomputing(self.model, head, self.blocks, self.caches or Caches()):
                yield
        finally:
            self._recomputes = False

    def run_with_retry(self, forward: Callable[[], T], head: str | None, policy: NormPolicy) -> T:
        """Call a forward; if blocks turn out not to be recomputable, call it again from the same buffers."""
        if not self.low_memory or not torch.is_grad_enabled():
            return forward()
        buffers = [(part, name, t.clone()) for part in (self.model, policy) for name, t in part.named_buffers()]
        try:
            with self.recomputing(head), self.blocks.watched(once=policy.moves_in_forward):
                return forward()
        except NotRecomputableError as error:
            self.blocks.unfit |= error.blocks
        for part, name, t in buffers:
            part.get_buffer(name).copy_(t)
        return self.run_with_retry(forward, head, policy)


def _norm(values: Tensor) -> Tensor:
    """Return the norm of all values: if it is finite, their sums and the norms of parts are, too."""
    norm: Tensor = torch.linalg.vector_norm(values.detach())
    return norm
