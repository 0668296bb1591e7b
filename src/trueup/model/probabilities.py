"""Detection of probabilities in place of logits, by their values and the operation that made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIN_VALUES = 32  # this many logits of several images are not all in [0, 1] by chance

_KIND_OF_OP = {"sigmoid": "sigmoid", "hardsigmoid": "sigmoid", "_softmax": "softmax"}
# Linear layers, normalisation and ReLUs: results between 0 and 1 are so by chance, as in networks without training.
_UNBOUNDED = ("convolution", "linear", "addmm", "mm", "bmm", "baddbmm", "relu", "clamp_min", "hardtanh", "threshold")
_KIND_OF_OP |= dict.fromkeys((*_UNBOUNDED, "native_layer_norm", "native_group_norm", "native_batch_norm"), "unbounded")
_KIND_OF_OP |= {"_native_batch_norm_legit_no_training": "unbounded"}
# Operations whose result is of the kind of their inputs: copies, means, resizing.
_KEEP = {"clone", "_to_copy", "contiguous", "mean", "sum", "cat", "stack", "add", "mul", "div", "clamp", "lerp"}
_KEEP |= {"index", "index_select", "gather", "flip"}


class NotLogitsError(ValueError):
    """A model returns probabilities or features."""


class _Origins(TorchDispatchMode):
    """The kind of operation that the values in a piece of memory come from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kinds: dict[int, str] = {}

    def of(self, values: Tensor) -> str | None:
        """Return "sigmoid", "softmax", "unbounded", or None if it is another."""
        return self._kinds.get(_place(values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note the kind of its results."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_")
        if not func.is_view:
            given = {self.of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim > 0}
            keeps = name in _KEEP or "pool" in name or "upsample" in name
            kind = _KIND_OF_OP.get(name) or (given.pop() if keeps and len(given) == 1 else None)
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    self._kinds.pop(_place(t), None)
                    if kind is not None:
                        self._kinds[_place(t)] = kind
        return out


def _place(values: Tensor) -> int:
    return values.untyped_storage().data_ptr()


@torch.no_grad()
def refuse_probabilities(answer: Callable[[], Tensor], logits: Tensor, *, output_given: bool) -> None:
    """Refuse probabilities: values that are all in [0, 1], and made by a sigmoid or softmax.

    answer: runs the whole batch once more. It is called only if the values in `logits` are all in [0, 1].
    output_given: the user has said where the logits are, so do not refuse by values alone. Otherwise values of several
        images are enough, unless they come from an unbounded operation, such as a linear layer or a ReLU.
    """
    if not _in_unit_range(logits):
        return
    origins = _Origins()
    try:
        with origins:
            logits = answer()
            kind = origins.of(logits)
    except Exception:  # some compiled models cannot be watched
        logits, kind = answer(), None
    if not _in_unit_range(logits) or kind == "unbounded":
        return
    several = not output_given and len(logits) > 1 and logits.numel() >= MIN_VALUES
    if kind is None and not several:
        return
    made = f"come from a {kind}" if kind is not None else f"of {len(logits)} images are all between 0 and 1"
    undo = "torch.log" if kind == "softmax" else "functools.partial(torch.logit, eps=1e-6)"
    way = f"leave out what makes them so, or pass output={undo}"
    unless = "" if kind is not None else " (output=lambda y: y if they are logits)"
    raise NotLogitsError(f"the model returns probabilities, not logits: its answers {made}; {way}{unless}")


def _in_unit_range(values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


def check_logits(logits: Tensor, *, multilabel: bool) -> None:
    """Refuse probabilities: a softmax of them is nearly uniform, and nothing can be learnt from that."""
    values = logits.detach().float()
    if not multilabel and bool((values >= 0).all()) and bool(((values.sum(dim=1) - 1).abs() < 1e-4).all()):
        raise ValueError("the model returns probabilities, not logits: leave out its softmax, or pass output=torch.log")
