"""`trueup.adapt`, the entry point."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trueup.core.adapter import Adapter
from trueup.core.method import Method
from trueup.core.presets import with_preset
from trueup.core.registry import get_method, make_method
from trueup.guard.config import Guard
from trueup.guard.drift_alarm import Shift
from trueup.model.runner import RunSettings
from trueup.views import make_normalization


def adapt(
    model: nn.Module,
    method: str | Method = "tsd",
    *,
    preset: str | None = None,
    guard: bool | Guard | None = None,
    head: str | None = None,
    output: Callable[[Any], Tensor] | str | None = None,
    example: Any = None,
    multilabel: bool = False,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    seed: int = 0,
    precision: str = "float32",
    channels_last: bool | str | None = None,
    compile: bool = False,  # noqa: A002  (torch's name)
    memory: str = "usual",
    **hyper: Any,
) -> Adapter:
    """Wrap a trained classifier or segmenter so that it adapts to the images it predicts. The model is copied.

    method: a name (see `list_methods()`) with hyper-parameters as keywords, or a Method.
    preset: "safe" for difficult streams: robust statistics and a guard; explicit arguments take precedence.
    guard: monitor the adapter and undo harmful updates; True, or a Guard. With "source", True is a drift alarm.
    head: the name of the last linear layer, if it cannot be found automatically.
    output: a function from the model's output to its logits, or the key or attribute of the output that holds them.
    example: a batch to find the head with now, instead of at the first call.
    multilabel: the outputs are independent labels (sigmoid), not exclusive classes (softmax).
    mean, std: with which your images were normalised; views are clipped with them. If omitted, views are not clipped.
    seed: seed of the adapter's own random stream.
    every: adapt on every n-th batch only; `rotta`, `note` and `rdumb` have an `every` of their own.
    precision: "bf16" or "fp16" for autocast, or "auto" to measure on the first batch whether it is faster.
    channels_last: use the channels-last memory layout; "auto" measures; None uses it with memory="low".
    compile: compile the network with torch.compile when it first runs.
    memory: "low" recomputes activations in backward, and stores features in half precision.
    """
    every = 1 if _has_every(method) else hyper.pop("every", 1)
    method, guard, given = _resolve(method, preset, guard, hyper)
    return Adapter(
        model, method, guard=_default_guard(method) if guard is True else guard or None, head=head, output=output,
        example=example, multilabel=multilabel, seed=seed, hyper=given, normalization=make_normalization(mean, std),
        settings=RunSettings(precision=precision, channels_last=channels_last, compile=compile, memory=memory),
        every=every,
    )  # fmt: skip


def _default_guard(method: Method) -> Guard:
    """Return the guard for `guard=True`: only a drift alarm if nothing adapts."""
    return Guard(rules=(Shift(),)) if method.info.name == "source" else Guard()


def _has_every(method: str | Method) -> bool:
    """Return True if `every` is a hyper-parameter of a method given by name; otherwise it is the adapter's."""
    return isinstance(method, str) and "every" in {field.name for field in dataclasses.fields(get_method(method))}


def _resolve(
    method: str | Method, preset: str | None, guard: bool | Guard | None, hyper: dict[str, Any]
) -> tuple[Method, bool | Guard | None, Mapping[str, Any] | None]:
    """Return the method, the guard, and the hyper-parameters if the method was given by name."""
    given: Mapping[str, Any] | None = None
    if preset is not None:
        if not isinstance(method, str):
            raise TypeError(f"a preset needs the name of a method, not {type(method).__name__}(...)")
        hyper = with_preset(preset, hyper)
        guard = True if guard is None else guard
    if isinstance(method, str):
        method, given = make_method(method, hyper), hyper
    elif not isinstance(method, Method):
        raise TypeError(f"method must be a name or a Method, not {type(method).__name__}")
    elif hyper:
        raise TypeError(f"hyper-parameters go into {type(method).__name__}(...): {', '.join(hyper)}")
    if not isinstance(guard, bool | Guard | None):
        raise TypeError(f"guard must be True, False or a Guard, not {type(guard).__name__}")
    return method, guard, given
