"""A model's answer as logits, and its head: the last linear layer whose output they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class HeadNotFoundError(ValueError):
    """No linear layer's output is the model's logits."""


def run(model: Callable[[Tensor], Any], x: Tensor) -> Any:
    """The model's answer; what torch says of an unfit input becomes a ValueError that shows the input."""
    try:
        return model(x.clone())  # a model may change its input in place
    except (RuntimeError, IndexError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        shape = tuple(x.shape[1:])
        raise ValueError(f"the model cannot take images of shape {shape}, {x.dtype} on {x.device}: {error}") from error


def as_logits(answer: Any, output: Callable[[Any], Tensor] | None, rows: int, least: int = 2) -> Tensor:
    """The logits in what a model returned: a tensor, a dict's "out" or "logits", an object's `.logits`."""
    if output is not None:
        answer = output(answer)
    elif isinstance(answer, dict) and ("out" in answer or "logits" in answer):
        answer = answer["out"] if "out" in answer else answer["logits"]
    elif not isinstance(answer, Tensor):
        answer = getattr(answer, "logits", answer)
    if not isinstance(answer, Tensor):
        raise ValueError(
            f"the model returned {type(answer).__name__}; pass output=, a function from what it returns to the logits"
        )
    if answer.ndim < 2 or len(answer) != rows or answer.shape[1] < least or not answer.is_floating_point():
        hint = "; multilabel=True if each channel is a label of its own" if answer.ndim > 1 == answer.shape[1] else ""
        raise ValueError(
            f"for {rows} inputs the model returned {tuple(answer.shape)} {answer.dtype}; "
            f"logits must be floating point of shape ({rows}, classes, ...) with at least two classes{hint}"
        )
    return answer


@torch.no_grad()
def find_head(
    model: nn.Module,
    x: Tensor,
    *,
    name: str | None = None,
    output: Callable[[Any], Tensor] | None = None,
    strict: bool = True,
    least: int = 2,
) -> tuple[str, Tensor]:
    """Probe a model with x: the name of its head, the last linear layer whose output is the logits, and the logits.

    With `name` that layer is checked instead of searched for; `strict=False` lets it be one whose features cannot be
    used, because it sees maps where the model gives one answer per image. `least` is the fewest outputs it may have.
    """
    layers: dict[nn.Module, str] = {module: path for path, module in model.named_modules() if isinstance(module, HEADS)}
    if name is not None and name not in layers.values():
        last = ", ".join(list(layers.values())[-3:])
        raise HeadNotFoundError(f"head={name!r} is no linear or convolution layer of the model; its last are: {last}")
    calls, logits = _watch(model, x, layers, output, least)
    paths = [path for path, *_ in calls]
    for path, layer, inp, out in reversed(calls):
        fits = _width(layer) == logits.shape[1] and (_aligned(layer, inp, out, logits) or not (strict or name is None))
        found = path == name if name is not None else paths.count(path) == 1 and _becomes(out, logits)
        if fits and found:
            return path, logits
    if name is not None:
        shapes = [tuple(out.shape) for path, _, _, out in calls if path == name] or "nothing"
        raise HeadNotFoundError(f"head={name!r} gives {shapes} for logits {tuple(logits.shape)}: it cannot be the head")
    named = [path for path, layer, *_ in calls if _width(layer) == logits.shape[1]] or paths[-3:]
    raise HeadNotFoundError(
        f"no linear layer's output is the model's logits (something follows it, or several are combined); "
        f"candidates: {', '.join(dict.fromkeys(named)) or 'none'}; name one with head=, if it sees one feature vector "
        f"per image"
    )


def look_for_head(
    model: nn.Module, x: Tensor, name: str | None, output: Callable[[Any], Tensor] | None, least: int, *, needed: bool,
    strict: bool,
) -> tuple[str | None, Tensor]:  # fmt: skip
    """The name of the head and the logits; no name where there is none and none is needed."""
    try:
        return find_head(model, x, name=name, output=output, strict=strict, least=least)
    except HeadNotFoundError:
        if name is not None or needed:
            raise
        return None, as_logits(run(model, x), output, rows=len(x), least=least)


def _watch(
    model: nn.Module, x: Tensor, layers: dict[nn.Module, str], output: Callable[[Any], Tensor] | None, least: int
) -> tuple[list[tuple[str, nn.Module, Tensor, Tensor]], Tensor]:
    """One forward: what went in and out of the layers, in the order of their calls, and the logits."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def note(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if args:  # a copy, so that what is done to the output in place afterwards shows
            calls.append((layers[layer], layer, args[0], out.clone()))

    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        return calls, as_logits(run(model, x), output, rows=len(x), least=least)
    finally:
        for handle in handles:
            handle.remove()


def _width(layer: nn.Module) -> int:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _aligned(layer: nn.Module, inp: Tensor, out: Tensor, logits: Tensor) -> bool:
    """Whether the layer sees one feature vector per image where there is one answer per image, else a map of them."""
    if getattr(layer, "groups", 1) > 1:
        return False
    if logits.ndim > 2:
        return inp.ndim == out.ndim == logits.ndim and inp.shape[2:] == out.shape[2:]
    features, scores = rows_of(inp, out)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return features.shape == (len(logits), weight.shape[1]) and scores.shape == logits.shape


def _becomes(out: Tensor, logits: Tensor) -> bool:
    """Whether the logits are this output, flattened or resized."""
    if out.numel() == logits.numel():
        return torch.equal(out.reshape(logits.shape), logits)
    if out.ndim != 4 or logits.ndim != 4 or out.shape[:2] != logits.shape[:2]:
        return False
    coarse = torch.finfo(out.dtype).eps > 1e-5 or torch.finfo(logits.dtype).eps > 1e-5  # under autocast
    size, out, logits = logits.shape[2:], out.float(), logits.float()
    resized = [F.interpolate(out, size=size, mode="nearest")]
    resized += [F.interpolate(out, size=size, mode="bilinear", align_corners=corners) for corners in (False, True)]
    rtol, atol = (2e-2, 1e-2) if coarse else (1e-4, 1e-5)
    return any(torch.allclose(each, logits, rtol=rtol, atol=atol) for each in resized)


def rows_of(features: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Drop spatial axes of size one on both sides of the head: (N, D, 1, 1) and (N, 1, 1, D) become (N, D)."""
    if features.numel() == len(features) * max(features.shape[1:]) and scores.numel() == len(scores) * max(
        scores.shape[1:]
    ):
        return features.flatten(1), scores.flatten(1)
    return features, scores
