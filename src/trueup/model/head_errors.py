"""Explanations of why a model has no usable head, and refusal of models that return features instead of logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.hooks import hooked
from trueup.model.probabilities import NotLogitsError
from trueup.model.readout import CONVOLUTIONS, HEADS, TRANSPOSED

Call = tuple[str, nn.Module, Tensor, Tensor]
"""The name of a layer, the layer, what went into it and what came out of it."""

Place = tuple[int, int]
TracedCall = tuple[str, nn.Module, Place, Tensor, Place]
"""The name of a module, the module, where its input was, its output, and where that is."""

_CLASSIFIERS = {"fc", "head", "heads", "classifier", "classif", "last_linear", "linear", "logits"}
_SATURATED = 9.0  # beyond this a sigmoid in float32 cannot be inverted exactly


class HeadNotFoundError(ValueError):
    """No linear layer's output is the model's logits."""


def makes_logits(out: Tensor, logits: Tensor, output: Callable[[Any], Tensor] | None = None) -> bool:
    """Return whether the logits are this output, flattened, resized, or as log-probabilities.

    With `output`, which may undo a sigmoid, they need be equal only up to the rounding of probabilities.
    """
    coarse = torch.finfo(out.dtype).eps > 1e-5 or torch.finfo(logits.dtype).eps > 1e-5  # under autocast
    for candidate, exact in _resized(out, logits):
        rtol, atol = (0.0, 0.0) if exact else (2e-2, 1e-2) if coarse else (1e-4, 1e-5)
        if torch.equal(candidate, logits) if exact else torch.allclose(candidate, logits.float(), rtol=rtol, atol=atol):
            return True
        floor = -_SATURATED - math.log(logits.shape[1])
        ours, theirs = (t.float().clamp(min=floor) for t in (F.log_softmax(candidate.float(), dim=1), logits))
        if torch.allclose(ours, theirs, rtol=0.0, atol=2e-2 if coarse else 1e-4):
            return True
        if output is not None and not coarse and _undoes_sigmoid(candidate.float(), logits.float()):
            return True
    return False


def _undoes_sigmoid(out: Tensor, logits: Tensor) -> bool:
    """Return whether the logits are `out` up to the rounding of its sigmoid, which grows with the size of a logit."""
    ours, theirs = (t.clamp(-_SATURATED, _SATURATED) for t in (out, logits))
    rounding = 1e-5 + 8 * torch.finfo(torch.float32).eps * theirs.abs().exp()
    certain = theirs.abs() < _SATURATED
    return bool(((ours - theirs).abs() <= rounding).all()) and int(certain.sum()) >= logits.shape[1]


def _resized(out: Tensor, logits: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Yield an output in the shape of the logits, for each way of resizing, and whether that is exact."""
    if out.numel() == logits.numel():
        yield out.reshape(logits.shape), True
        return
    if out.ndim != logits.ndim or out.ndim not in (4, 5) or out.shape[:2] != logits.shape[:2]:
        return
    size, smooth = logits.shape[2:], "bilinear" if out.ndim == 4 else "trilinear"
    yield F.interpolate(out.float(), size=size, mode="nearest"), False
    for corners in (False, True):
        yield F.interpolate(out.float(), size=size, mode=smooth, align_corners=corners), False


def explain_missing_head(model: nn.Module, run: Callable[[], Any], calls: list[Call], logits: Tensor) -> str:
    """Say why none of these layers is the head. `run` runs the model once more."""
    if reason := _probabilities(calls, logits) or _combined(calls, logits):
        return reason
    if _cosine(model, run, logits):
        return "they are cosine similarities with fixed vectors; use trueup.zero_shot(model, text_features)"
    if any(hasattr(module, "_packed_params") for module in model.modules()):
        return "it has quantised layers, which have no weights that could be read or learnt; adapt the float model"
    return "something follows it, or several are combined"


def _probabilities(calls: list[Call], logits: Tensor) -> str:
    """Say that a softmax or sigmoid follows one of the layers; "" if none does."""
    if not bool(((logits >= 0) & (logits <= 1)).all()):
        return ""
    if any(makes_logits(out, logits.log()) for *_, out in calls):
        return "a softmax follows it; leave it out, or pass output=torch.log"
    undo = partial(torch.logit, eps=1e-6)
    if any(makes_logits(out, undo(logits.float()), undo) for *_, out in calls):
        return "a sigmoid follows it; leave it out, or pass output=functools.partial(torch.logit, eps=1e-6)"
    return ""


def _combined(calls: list[Call], logits: Tensor) -> str:
    """Say how the logits come from one of the layers, or from two; "" if that cannot be seen."""
    for path, layer, inp, out in reversed(calls):
        if makes_logits(out, logits):
            return _unusable(path, layer, inp, out, logits)
        if inp.shape == out.shape and _close(out + inp, logits):
            return f"a skip is added to {path!r} (a residual sum); put the sum into a module of its own"
        maps = (out, out.relu()) if logits.ndim == 2 < out.ndim else ()
        if any(_close(t.flatten(2).mean(dim=2), logits) for t in maps):
            return f"the map of {path!r} is pooled after it"
    fits = [(path, out) for path, _, _, out in calls if out.ndim == logits.ndim and out.shape[:2] == logits.shape[:2]]
    for (one, a), (two, b) in combinations(fits[-8:], 2):
        if a.shape == b.shape and any(_close(t, logits) or makes_logits(t, logits) for t in (a + b, (a + b) / 2)):
            return f"{one!r} and {two!r} are combined"
    return ""


def _close(out: Tensor, logits: Tensor) -> bool:
    """Return whether the logits are this output up to rounding."""
    return out.shape == logits.shape and torch.allclose(out, logits, rtol=1e-4, atol=1e-5)


def _unusable(path: str, layer: nn.Module, inp: Tensor, out: Tensor, logits: Tensor) -> str:
    """Say why a layer whose output is the logits is no head."""
    if getattr(layer, "groups", 1) > 1:
        return f"{path!r} has {layer.groups} groups, so each class sees only a part of the features"
    if logits.ndim == 2 and isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
        return f"{path!r} sees maps of {tuple(inp.shape[2:])} pixels and the model gives one answer per image"
    if isinstance(layer, TRANSPOSED):
        grown = f"{tuple(inp.shape[2:])} pixels to {tuple(out.shape[2:])}"
        return f"{path!r} is a transposed convolution from {grown}, which is no multiple by its stride"
    if isinstance(layer, CONVOLUTIONS):
        return f"{path!r} changes the size of the map, so features and logits are of different pixels"
    return f"{path!r} runs more than once, or on more than one feature vector per image"


def _cosine(model: nn.Module, run: Callable[[], Any], logits: Tensor) -> bool:
    """Return whether the logits are cosines of a module's output with a stored matrix's rows, scaled and shifted."""
    if logits.ndim != 2:
        return False
    stored = [*model.parameters(), *(t for m in model.modules() for t in (*m._buffers.values(), *vars(m).values()))]
    matrices = [t for t in stored if isinstance(t, Tensor) and t.ndim == 2 and t.is_floating_point()]
    rows = [m.float() for t in matrices for m in (t, t.T) if len(m) == logits.shape[1]]
    wanted = logits.float() - logits.float().mean()
    for out in reversed(_vector_outputs(model, run)):
        for matrix in rows:
            if out.shape != (len(logits), matrix.shape[1]):
                continue
            cosines = F.normalize(out.float(), p=2, dim=1) @ F.normalize(matrix, p=2, dim=1).T
            cosines -= cosines.mean()
            scale = (cosines * wanted).sum() / cosines.square().sum()
            if torch.allclose(scale * cosines, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
                return True
    return False


def _vector_outputs(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """Run a model and return the outputs of its modules that are one vector per image."""
    found: list[Tensor] = []

    def note(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, Tensor) and out.ndim == 2 and out.is_floating_point():
            found.append(out.clone())

    with hooked(model.modules(), after=note):
        run()
    return found


@torch.no_grad()
def refuse_features(model: nn.Module, run: Callable[[], Any], rows: int) -> None:
    """Refuse a model without a classifier, where that can be seen.

    Its `num_classes` is 0, as in timm; or the layer that should classify is an Identity; or its output comes from a
    pooling or normalisation layer without a linear layer before it.
    """
    where = "its num_classes is 0" if getattr(model, "num_classes", None) == 0 else _find_features(model, run, rows)
    if where:
        raise NotLogitsError(
            f"the model returns features, not logits: {where}. Pass it with its classifier; for features that are "
            f"compared with text, trueup.zero_shot(model, text_features); if these are logits, output=lambda y: y"
        )


def _find_features(model: nn.Module, run: Callable[[], Any], rows: int) -> str:
    """Say where features come out of a model; "" if that cannot be seen."""
    answer, calls = _trace(model, run)
    if not isinstance(answer, Tensor) or answer.numel() != rows * answer.shape[1] or not calls:
        return ""
    path, layer, _, out, _ = calls[-1]
    if not (out.numel() == answer.numel() and torch.equal(out.flatten(), answer.flatten())):
        return ""
    chain = list(_chain_backwards(calls))
    ends = isinstance(chain[-1], HEADS)
    names = path.split(".")
    if isinstance(layer, nn.Identity) and names[-1] in _CLASSIFIERS:
        return f"{path!r}, which should classify, is an Identity"
    if isinstance(layer, nn.Identity) and names[-1].isdigit() and names[-2:-1] and names[-2] in _CLASSIFIERS:
        passive = (nn.Identity, nn.Flatten, nn.Dropout)
        if not ends or any(not isinstance(m, passive) and not _pools_or_norms(m) for m in chain[:-1]):
            return f"{path!r}, which should classify, is an Identity"
    if not ends and any(_pools_or_norms(m) for m in chain):
        return f"they come out of {path!r} ({type(layer).__name__}), and no linear layer is before it"
    return ""


def _trace(model: nn.Module, run: Callable[[], Any]) -> tuple[Any, list[TracedCall]]:
    """Run a model and return its answer and the calls of its innermost modules, in their order."""
    leaves = {module: path for path, module in model.named_modules() if path and not list(module.children())}
    calls: list[TracedCall] = []
    given: list[Place | None] = []

    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        given.append(_place(args[0]) if args and isinstance(args[0], Tensor) else None)

    def leave(layer: nn.Module, _: tuple[Any, ...], out: Any) -> None:
        where = given.pop()
        if where is not None and isinstance(out, Tensor):
            calls.append((leaves[layer], layer, where, out, _place(out)))

    with hooked(leaves, before=enter, after=leave):
        return run(), calls


def _place(values: Tensor) -> Place:
    """Return the address of values and the number of writes to it: `out += skip` is another result."""
    return values.data_ptr(), values._version


def _chain_backwards(calls: list[TracedCall]) -> Iterator[nn.Module]:
    """Yield the layers from the last one backwards, as long as each takes the output of the one before."""
    at = len(calls) - 1
    while at >= 0:
        _, layer, given, *_ = calls[at]
        yield layer
        if isinstance(layer, HEADS):
            return
        at = next((i for i in range(at - 1, -1, -1) if calls[i][4] == given), -1)


def _pools_or_norms(layer: nn.Module) -> bool:
    """Return whether a layer pools or normalises; a layer with a weight matrix may be a classifier."""
    name = type(layer).__name__.lower()
    vectors = all(p.numel() == max(p.shape, default=1) for p in layer.parameters())
    return vectors and ("pool" in name or "norm" in name)
