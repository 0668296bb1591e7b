"""Calls of a model: the images of a call, their checks, and the logits in the model's output.

A model may be called with one tensor, by keyword, with a dict, or with several tensors.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trueup.finite import check_values

_TORCH = str(Path(torch.__file__).parent / "_")[:-1]  # ends with a separator, so torchvision does not match
_OF_INPUT = re.compile(r"shape|\bsizes?\b|\bchannels?\b|\bdimensions?\b|\bdtype\b|\bheight\b|\bwidth\b", re.IGNORECASE)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor that has one row per image; number 0 is the images."""

    number: int


@dataclass(frozen=True)
class Signature:
    """The arguments of a call, with slots in the place of tensors that have one row per image."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    only_original: str = ""
    """Why the model can run on the user's inputs only, not on images that a method makes; "" if it can."""

    def fill(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with these tensors."""

        def filled(item: Any) -> Any:
            if isinstance(item, Slot):
                return tensors[item.number]
            return {key: filled(value) for key, value in item.items()} if isinstance(item, dict) else item

        return tuple(map(filled, self.args)), {name: filled(item) for name, item in self.kwargs.items()}


class Batch(Tensor):
    """Images with a signature and the other tensors of a call.

    Rows can be picked as from a tensor. All other operations see the images alone and return plain tensors.
    """

    signature: Signature
    others: tuple[Tensor, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(images: Tensor, others: tuple[Tensor, ...], signature: Signature) -> Batch:
        """Put images, their companions and the signature together."""
        batch = images.as_subclass(Batch)
        batch.others, batch.signature = others, signature
        return batch

    @property
    def images(self) -> Tensor:
        """The images as a plain tensor."""
        return self.as_subclass(Tensor)

    def with_images(self, images: Tensor) -> Batch:
        """Return the same call with these images."""
        return Batch.of(images, self.others, self.signature)

    def each(self, function: Any) -> Batch:
        """Apply a function to every tensor."""
        return Batch.of(function(self.images), tuple(map(function, self.others)), self.signature)

    def __getitem__(self, rows: Any) -> Tensor:
        """Pick rows of all tensors; with several indices, of the images alone."""
        return self.images[rows] if isinstance(rows, tuple) else self.each(lambda t: t[rows])

    def clone(self, **how: Any) -> Tensor:
        """Copy all tensors."""
        return self.each(lambda t: t.clone(**how))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert the images."""
        return self.with_images(self.images.to(*args, **kwargs))

    def detach(self) -> Tensor:
        """Cut all tensors from their graphs."""
        return self.each(lambda t: t.detach())


def arguments(x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a model is called for these images."""
    return x.signature.fill((x.images, *x.others)) if isinstance(x, Batch) else ((x,), {})


def read_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the images of a call: a plain tensor if it has nothing else, or a Batch.

    The images are `pixel_values`, or the first tensor of four or more dimensions, or the first of floating point.
    A tensor with as many rows goes along with them; everything else is handed to the model as it is. A dict whose keys
    are all parameters of the model's forward is passed as keywords.
    """
    plain = len(args) == 1 and not kwargs and not isinstance(args[0], Mapping)
    if plain and not (isinstance(args[0], Tensor) and args[0].dtype == torch.uint8):
        return cast(Tensor, args[0])  # its type is checked later
    inputs = args[0] if len(args) == 1 and not kwargs else None
    if isinstance(inputs, Mapping) and _accepts_keywords(model, inputs):
        args, kwargs = (), dict(inputs)
    found = dict(_tensors(args, kwargs))
    if not found:
        raise TypeError(f"no tensor among the inputs ({_shown(args, kwargs)}): pass a batch of images")
    first = _find_images(found)
    images = found[first]
    rows = [key for key, t in found.items() if t.ndim > 0 and images.ndim > 0 and len(t) == len(images)]
    rows = [first, *(key for key in rows if key != first)]
    slots = {key: Slot(i) for i, key in enumerate(rows)}

    def to_slots(path: tuple[Any, ...], item: Any) -> Any:
        if isinstance(item, Mapping):
            return {key: to_slots((*path, key), value) for key, value in item.items()}
        return slots.get(path, item.detach() if isinstance(item, Tensor) else item)

    signature = Signature(
        tuple(to_slots((i,), item) for i, item in enumerate(args)),
        {name: to_slots((name,), item) for name, item in kwargs.items()},
        _why_only_original([found[key] for key in rows]),
    )
    return Batch.of(images, tuple(found[key] for key in rows[1:]), signature)


def as_called(x: Tensor, signature: Signature | None) -> Tensor:
    """Return images as the model is called with them; refuse images made by a method if it cannot run on them."""
    if signature is None or isinstance(x, Batch):
        return x
    refuse_parts(signature)
    return Batch.of(x, (), signature)


def refuse_parts(signature: Signature) -> None:
    """Refuse a method that makes images of its own if the model runs on the user's inputs only."""
    if signature.only_original:
        raise ValueError(
            f"the method runs the model on views of images or on stored ones, and {signature.only_original}; "
            f"use a method that sees batches as they come, such as tsd or tent"
        )


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield all tensors of a call with their places, also those in dicts."""

    def inside(path: tuple[Any, ...], item: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        if isinstance(item, Tensor):
            yield path, item
        elif isinstance(item, Mapping):
            for key, value in item.items():
                yield from inside((*path, key), value)

    for name, item in (*enumerate(args), *kwargs.items()):
        yield from inside((name,), item)


def _find_images(found: dict[tuple[Any, ...], Tensor]) -> tuple[Any, ...]:
    """Return the place of the images among the tensors of a call."""
    named = [place for place in found if place[-1] == "pixel_values"]
    maps = [place for place, t in found.items() if t.ndim >= 4]
    floats = [place for place, t in found.items() if t.is_floating_point() and t.ndim >= 2]
    return next(iter((*named, *maps, *floats, *found)))


def _why_only_original(tensors: list[Tensor]) -> str:
    """Say why a model can run on the user's inputs only; "" if it can run on others."""
    if len(tensors) > 1:
        return f"this call has {len(tensors)} tensors, of which it knows the images alone"
    if tensors[0].dtype == torch.uint8:
        return "these are uint8: normalise images before the model for it, not inside"
    return ""


def _accepts_keywords(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    """Return whether all keys of a dict are parameters of a model's forward, or it takes keywords alone."""
    parameters = inspect.signature(model.forward).parameters
    if all(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return bool(parameters)
    return bool(inputs) and all(key in parameters for key in inputs)


def _shown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    items = [type(item).__name__ for item in args] + [f"{name}={type(v).__name__}" for name, v in kwargs.items()]
    return ", ".join(items) or "none"


def read_images(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: bool = True) -> Tensor:
    """Return the images of a call; refuse what the model cannot use; `rows`: also check the values of each row."""
    x = read_call(model, args, kwargs)
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, not {type(x).__name__}")
    if x.layout != torch.strided:
        raise ValueError(f"x has the layout {x.layout}: make it dense with x.to_dense()")
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected a batch with at least one image, (N, ...)")
    if not x.is_floating_point() and x.dtype != torch.uint8:  # uint8 is for models that normalise images themselves
        raise ValueError(f"x is {x.dtype}: convert and normalise it as in training, e.g. x.float() / 255")
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is not None:
        if x.device != weight.device:
            raise ValueError(f"x is on {x.device}, the model on {weight.device}: move one with .to(...)")
        if x.dtype not in (weight.dtype, torch.uint8) and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"x is {x.dtype}, the model {weight.dtype}: convert x with x.to({weight.dtype})")
    for i, other in enumerate(x.others if isinstance(x, Batch) else (), 2):
        if other.device != x.device:
            raise ValueError(f"input {i} is on {other.device}, the images on {x.device}: move one with .to(...)")
        if other.is_floating_point() and bool(other.isnan().any()):  # infinite values may mean something in a mask
            raise ValueError(f"input {i} has values that are NaN")
    if rows and x.is_cpu:  # on other devices it is checked after the forward, to wait only once
        check_values(x)
    return x.clone() if x.is_inference() else x.detach()


def call_model(model: Callable[..., Any], x: Tensor) -> Any:
    """Run a model; turn torch's errors about the input into a ValueError that shows its shape."""
    args, kwargs = arguments(x.clone())  # a model may change its input in place
    try:
        return model(*args, **kwargs)
    except (RuntimeError, IndexError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError) or raised_by_model(error):
            raise
        shape = tuple(x.shape[1:])
        way = "" if x.is_floating_point() else "; if it does not normalise images itself, pass x.float() / 255"
        raise ValueError(
            f"the model cannot take images of shape {shape}, {x.dtype} on {x.device}: {error}{way}"
        ) from error


def raised_by_model(error: Exception) -> bool:
    """Return whether an error is the model's own and must reach the user as it is.

    It is if a `raise` or `assert` outside of torch made it, unless it is a plain RuntimeError, IndexError or
    AssertionError that speaks of the input: of shape, size, channels, dimensions, height, width or dtype. A failing
    operation of torch has no `raise` in Python, or one in torch's own files.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if dis.opname[code.co_code[trace.tb_lasti]] != "RAISE_VARARGS" or code.co_filename.startswith(_TORCH):
        return False
    plain = type(error) in (RuntimeError, IndexError, AssertionError)
    return not (plain and _OF_INPUT.search(str(error)))


@dataclass(frozen=True)
class OutputKey:
    """The logits in a model's output, by key or attribute."""

    name: str

    def __call__(self, output: Any) -> Any:
        """Return the logits; refuse an output that lacks them."""
        if isinstance(output, Mapping) and self.name in output:
            return output[self.name]
        if not isinstance(output, Tensor | Mapping) and hasattr(output, self.name):
            return getattr(output, self.name)
        has = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise ValueError(
            f"output={self.name!r}: the model returned {type(output).__name__}{has}, which has no key or attribute of "
            f"this name; name another, or pass a function from the model's output to the logits"
        )


def output_function(output: Callable[[Any], Tensor] | str | None) -> Callable[[Any], Tensor] | None:
    """Return the function from a model's output to its logits: `output` itself, or one for the key it names."""
    if isinstance(output, str):
        return OutputKey(output)
    if output is not None and not callable(output):
        raise TypeError(
            f"output={output!r} must be a function from the model's output to the logits, or the name of the key or "
            f"attribute that holds them"
        )
    return output


def as_logits(answer: Any, output: Callable[[Any], Tensor] | None, rows: int, min_channels: int = 2) -> Tensor:
    """Return the logits in what a model returned: a tensor, a dict's "out" or "logits", an object's `.logits`."""
    if output is not None:
        answer = output(answer)
    elif isinstance(answer, dict) and ("out" in answer or "logits" in answer):
        answer = answer["out"] if "out" in answer else answer["logits"]
    elif not isinstance(answer, Tensor):
        answer = getattr(answer, "logits", answer)
    if not isinstance(answer, Tensor):
        raise ValueError(
            f"the model returned {type(answer).__name__}; pass output=, a function from the model's output to the "
            f"logits, or the name of the key or attribute that holds them"
        )
    if answer.ndim < 2 or len(answer) != rows or answer.shape[1] < min_channels or not answer.is_floating_point():
        single = answer.ndim > 1 and answer.shape[1] == 1
        hint = "; multilabel=True if each channel is a label of its own" if single else ""
        raise ValueError(
            f"for {rows} inputs the model returned {tuple(answer.shape)} {answer.dtype}; "
            f"logits must be floating point of shape ({rows}, classes, ...) with at least two classes{hint}"
        )
    return answer
