"""Copying models, putting values back, moving state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trueup.core.caches import find_caches
from trueup.core.randomness import undisturbed
from trueup.core.split import SplitModel

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that holds results of its last forward."""
    with torch.inference_mode(False):
        try:
            return copy.deepcopy(model, dict(kept_tensors(model)))
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the model cannot be copied: {error}") from error


def kept_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Copies, by identity, of results that modules hold as attributes: caches, old-style weight_norm.

    Views of parameters are left out: a copy of one would no longer follow its parameter.
    """
    held: list[Any] = [value for module in model.modules() for value in vars(module).values()]
    held += [v for each in held if isinstance(each, dict) for v in each.values()]
    held += [v for each in held if isinstance(each, list | tuple) for v in each]
    loose = [t for t in held if isinstance(t, Tensor) and not t.is_leaf and not isinstance(t._base, nn.Parameter)]
    return {id(t): t.detach().clone() for t in loose}


def networks(adapter: Adapter) -> list[SplitModel]:
    """The model, and those that a method keeps: teachers, anchors."""
    kept = [net for state in (adapter.state, *adapter._fresh) for net in state.modules() if isinstance(net, SplitModel)]
    return [adapter.net, *kept]


def look_for_caches(adapter: Adapter, x: Tensor) -> None:
    """Find out, once, what a model that learns keeps of a forward for those that follow."""
    if adapter.net.caches is None and adapter._optimizer is not None:
        with undisturbed(x.device):
            found = find_caches(copy_model(adapter.net.model), x[:2])
        for net in networks(adapter):
            net.caches = found


def put(model: nn.Module, name: str, target: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer of a model a value: in place, or anew where a buffer has changed its shape."""
    if target.shape != value.shape:
        prefix, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(prefix), leaf, value.to(target.device, copy=True))
    elif not torch.equal(target, value.to(target.device)):  # what is equal may be a view that cannot be written to
        target.copy_(value)


def follow_parameters(optimizer: torch.optim.Optimizer | None) -> None:
    """Let an optimiser's state follow its parameters to their device, precision and layout."""
    if optimizer is None:
        return
    optimizer.load_state_dict(optimizer.state_dict())  # which moves and converts
    for p, kept in optimizer.state.items():
        kept |= {key: laid_out_like(value, p) for key, value in kept.items() if isinstance(value, Tensor)}


def laid_out_like(value: Tensor, parameter: Tensor) -> Tensor:
    """A value of a parameter's shape in its memory layout, which fused steps rely on; others as they are."""
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def move_state(state: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Let a method's state follow the model to its device and to higher precision, never to lower.

    Networks in it, such as teachers, follow in all.
    """
    inside = {m for net in state.modules() if isinstance(net, SplitModel) for m in net.modules()}

    def widen(t: Tensor) -> Tensor:
        new = fn(t)
        wide = torch.promote_types(t.dtype, new.dtype)
        return new if wide == new.dtype else t.to(new.device)

    for module in state.modules():
        module._apply(fn if module in inside else widen, recurse=False)
