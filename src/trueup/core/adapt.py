"""`trueup.adapt`: the front door."""

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
    compile: bool = False,  # noqa: A002  (what torch calls it)
    memory: str = "usual",
    **hyper: Any,
) -> Adapter:
    """Wrap a trained classifier or segmenter so that it adapts itself to what it is shown. The model is never touched.

    method: a name (see `list_methods()`) with hyper-parameters as keywords, or a Method.
    preset: "safe" for settings that hold up on bad streams, and a guard; what is given beside it wins.
    guard: watch the adapter and take it back when it goes astray; True, or a Guard. For "source" a drift alarm.
    head: the name of the last linear layer, where the probe cannot find it.
    output: a function from what the model returns to its logits, or the name of the key or attribute that holds them.
    example: a batch to find the head with now; otherwise the first batch serves.
    multilabel: each output is a label of its own (sigmoid), not one class of several (softmax).
    mean, std: how images were normalised, for methods that look at views of them; without, no view is clipped.
    seed: of the adapter's own random stream.
    every: adapt on every so many batches only; `rotta`, `note` and `rdumb` have an `every` of their own.
    precision: "bf16" or "fp16" for autocast, or "auto" to measure on the first batch whether it is faster here.
    channels_last: lay out convolutions with channels last; "auto" measures; None does so with memory="low".
    compile: let torch.compile make a graph of the network when it first runs.
    memory: "low" works out activations again in backward, and keeps features in half precision.
    """
    every = hyper.pop("every", 1) if not _has_every(method) else 1
    method, guard, given = _resolved(method, preset, guard, hyper)
    return Adapter(
        model, method, guard=_usual_guard(method) if guard is True else guard or None, head=head, output=output,
        example=example, multilabel=multilabel, seed=seed, given=given, pixels=make_normalization(mean, std),
        engine=RunSettings(precision=precision, channels_last=channels_last, compile=compile, memory=memory),
        every=every,
    )  # fmt: skip


def _usual_guard(method: Method) -> Guard:
    """Return the guard for `guard=True`: where nothing adapts, it is a drift alarm alone."""
    return Guard(rules=(Shift(),)) if method.info.name == "source" else Guard()


def _has_every(method: str | Method) -> bool:
    """Return whether `every` is a hyper-parameter of a method given by its name; else it is the adapter's."""
    return isinstance(method, str) and "every" in {field.name for field in dataclasses.fields(get_method(method))}


def _resolved(
    method: str | Method, preset: str | None, guard: bool | Guard | None, hyper: dict[str, Any]
) -> tuple[Method, bool | Guard | None, Mapping[str, Any] | None]:
    """The method itself, the guard, and the hyper-parameters if the method was given by its name."""
    given: Mapping[str, Any] | None = None
    if preset is not None:
        if not isinstance(method, str):
            raise TypeError(f"a preset goes with the name of a method, not with {type(method).__name__}(...)")
        hyper, guard = with_preset(preset, hyper), True if guard is None else guard
    if isinstance(method, str):
        method, given = make_method(method, hyper), hyper
    elif not isinstance(method, Method):
        raise TypeError(f"method must be a name or a Method, not {type(method).__name__}")
    elif hyper:
        raise TypeError(f"hyper-parameters go into {type(method).__name__}(...): {', '.join(hyper)}")
    if not isinstance(guard, bool | Guard | None):
        raise TypeError(f"guard must be True, False or a Guard, not {type(guard).__name__}")
    return method, guard, given
