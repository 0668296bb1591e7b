"""The search for a model's head: the last linear layer whose output is the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trueup.hooks import hooked
from trueup.model.calls import Batch, as_logits, call_model
from trueup.model.head_errors import Call, explain_missing_head, makes_logits, refuse_features
from trueup.model.head_errors import HeadNotFoundError as HeadNotFoundError  # imported from here by others
from trueup.model.probabilities import NotLogitsError, refuse_probabilities
from trueup.model.readout import HEADS, is_affine, linear_sums, same_pixels, weight_of, width_of
from trueup.model.split_model import rows_of

T = TypeVar("T")


@torch.no_grad()
def find_head(
    model: nn.Module, x: Tensor, *, name: str | None = None, output: Callable[[Any], Tensor] | None = None,
    strict: bool = True, min_channels: int = 2,
) -> tuple[str, Tensor]:  # fmt: skip
    """Return the name of the head, the last linear layer whose output is the logits, and the logits for x.

    Where no single layer's output is, a module of linear layers may be the head: a residual sum. With `name` that layer
    is checked instead of searched for; `strict=False` also accepts one whose inputs are maps. `min_channels` is the
    smallest number of outputs.
    """
    layers: dict[nn.Module, str] = {module: path for path, module in model.named_modules() if isinstance(module, HEADS)}
    sums = linear_sums(model)
    if name is not None and name not in (*layers.values(), *sums.values()):
        last = ", ".join(list(layers.values())[-3:])
        raise HeadNotFoundError(f"head={name!r} is no linear or convolution layer of the model; its last are: {last}")
    calls, logits = _record_calls(model, x, layers, output, min_channels)
    paths = [path for path, *_ in calls]
    for path, layer, inp, out in reversed(calls):
        loose = name is not None and not strict
        fits = width_of(layer) == logits.shape[1] and (_aligned(layer, inp, out, logits) or loose)
        found = path == name if name is not None else paths.count(path) == 1 and makes_logits(out, logits, output)
        if fits and found:
            return path, logits
    if sums and (name is None or name in sums.values()):
        for path, module, inp, out in _record_calls(model, x, sums, output, min_channels)[0]:
            found = path == name if name is not None else makes_logits(out, logits, output)
            if found and _is_linear_sum(module, inp, out, logits):
                return path, logits
    if name is not None:
        shapes = [tuple(out.shape) for path, _, _, out in calls if path == name] or "nothing"
        raise HeadNotFoundError(f"head={name!r} gives {shapes} for logits {tuple(logits.shape)}: it cannot be the head")
    reason = explain_missing_head(model, lambda: call_model(model, x), calls, logits)
    raise HeadNotFoundError(f"no linear layer's output is the model's logits: {reason}; {_candidates(calls, logits)}")


def _candidates(calls: list[Call], logits: Tensor) -> str:
    """Say which layers may be named as the head: those of its width, if possible with one feature vector per image."""
    wide = [call for call in calls if width_of(call[1]) == logits.shape[1] and len(call[3]) == len(logits)]
    last = [path for path, *_ in calls[-2:]]
    usable = [path for path, layer, inp, out in wide if _aligned(layer, inp, out, logits)]
    usable = usable or [path for path, *_ in wide if path in last]
    if not usable:
        return "candidates: none"
    shown = ", ".join(list(dict.fromkeys(usable))[-5:])
    return f"candidates: {shown}; name one with head=, if it sees one feature vector per image"


def look_for_head(
    make_copy: Callable[[], nn.Module], x: Tensor, name: str | None, output: Callable[[Any], Tensor] | None,
    min_channels: int, *, needed: bool, strict: bool,
) -> tuple[str | None, Tensor]:  # fmt: skip
    """Return the name of the head and the logits; the name is None if there is no head and none is needed.

    `make_copy` makes copies of the model to probe. Features and probabilities are refused.
    """

    def probe(part: Tensor) -> tuple[str | None, Tensor]:
        model = make_copy()
        try:
            return find_head(model, part, name=name, output=output, strict=strict, min_channels=min_channels)
        except HeadNotFoundError:
            if name is not None:
                raise
            logits = as_logits(call_model(model, part), output, rows=len(part), min_channels=min_channels)
            refuse_probabilities(answer, logits, output_given=output is not None)
            if output is None:
                refuse_features(model, lambda: call_model(model, part), len(part))
            if needed:
                raise
            return None, logits

    def answer() -> Tensor:
        return as_logits(call_model(make_copy(), x), output, rows=len(x), min_channels=min_channels)

    head, logits = with_few_images(probe, x)
    if name is not None:  # only its shape was checked, not that its output is the logits
        refuse_probabilities(answer, logits, output_given=output is not None)
    return head, logits


def with_few_images(probe: Callable[[Tensor], T], x: Tensor) -> T:
    """Probe with two images; use the whole batch if that fails, as its size may be fixed."""
    if len(x) > 2 and not (isinstance(x, Batch) and x.others):
        try:
            return probe(x[:2])
        except (HeadNotFoundError, NotLogitsError):
            raise
        except Exception:  # retried with the whole batch
            pass
    return probe(x)


def _record_calls(
    model: nn.Module, x: Tensor, layers: dict[nn.Module, str], output: Callable[[Any], Tensor] | None, min_channels: int
) -> tuple[list[Call], Tensor]:
    """Run a model once: return the inputs and outputs of layers, in the order of their calls, and the logits."""
    calls: list[Call] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        alone = isinstance(layer, HEADS) or (len(args) == 1 and not kwargs)  # a module may need more than its input
        if args and alone and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            # a copy, so that later changes of the output in place can be seen
            calls.append((layers[layer], layer, args[0], out.clone()))

    with hooked(layers, after=note, with_kwargs=True):
        return calls, as_logits(call_model(model, x), output, rows=len(x), min_channels=min_channels)


def _aligned(layer: nn.Module, inp: Tensor, out: Tensor, logits: Tensor) -> bool:
    """Return whether the layer sees one feature vector per image or, where pixels are classified, a map of them."""
    if getattr(layer, "groups", 1) > 1:
        return False
    if logits.ndim > 2:
        return out.ndim == logits.ndim and same_pixels(layer, inp, out)
    features, scores = rows_of(inp, out)
    weight = weight_of(layer)
    return features.shape == (len(logits), weight.shape[1]) and scores.shape == logits.shape


def _is_linear_sum(module: nn.Module, inp: Tensor, out: Tensor, logits: Tensor) -> bool:
    """Return whether a module of linear layers is one linear map from features to scores on the same grid."""
    same = inp.ndim == out.ndim == logits.ndim and inp.shape[2:] == out.shape[2:] and out.shape[1] == logits.shape[1]
    if not same or not is_affine(module, inp):
        return False
    try:
        return weight_of(module).shape == (out.shape[1], inp.shape[1])
    except RuntimeError:  # it wants maps of another size, or its layers do not run in the order in which they stand
        return False
