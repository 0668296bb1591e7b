"""Copying models, putting values back, moving state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from trueup.core.effects import check_precision
from trueup.core.random_stream import undisturbed
from trueup.model.caches import find_caches
from trueup.model.calls import Batch, refuse_parts
from trueup.model.heads import with_few_images
from trueup.model.split_model import SplitModel

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter

A = TypeVar("A", bound="Adapter")


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
    if adapter.net.runner.caches is None and adapter._optimizer is not None:
        with undisturbed(x.device):
            found = with_few_images(lambda part: find_caches(copy_model(adapter.net.model), part), x)
        for net in networks(adapter):
            net.runner.caches = found


@contextmanager
def calling(adapter: Adapter, x: Tensor) -> Iterator[None]:
    """Let all networks be called as x says, also with images that a method has changed or stored."""
    if not isinstance(x, Batch):
        yield
        return
    if adapter.method.info.images:  # they would be shown later on
        refuse_parts(x.signature)
    for net in networks(adapter):
        net.runner.signature = x.signature
    try:
        yield
    finally:
        for net in networks(adapter):  # there may be more of them now
            net.runner.signature = None


def fork(adapter: A) -> A:
    """Copy an adapter; weights that it never updates are views of the same memory, and sources are shared."""
    if not adapter._built:
        raise ValueError("fork an adapter after its first batch, or make it with adapt(..., example=x)")
    twin = copy.deepcopy(adapter, shared(adapter))
    twin._keeper = None  # two adapters must not write to one folder
    for each in (adapter, twin):
        each._register_load_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
    return twin


def shared(adapter: Adapter) -> dict[int, Any]:
    """Return what a copy need not copy: other views of the weights that are never updated, and the source's values."""
    each = [(net.selected, *named) for net in networks(adapter) for named in net.model.named_parameters()]
    views = {id(p): nn.Parameter(p.detach(), requires_grad=False) for selected, n, p in each if n not in selected}
    return {**views, **{id(t): t for t in adapter._source.values()}}


def _refuse_state_dict(*_: Any) -> None:
    raise TypeError("adapters that share weights cannot load a state dict, which would write into all; use load(path)")


def assign_tensor(model: nn.Module, name: str, target: Tensor, value: Tensor) -> None:
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


def move(adapter: Adapter, fn: Callable[[Tensor], Tensor]) -> None:
    """Move or convert all tensors of an adapter, as `nn.Module._apply` does for a module."""
    check_precision({name: fn(p.detach().flatten()[:0]) for name, p in adapter.net.selected.items()}, adapter.method)
    adapter.net._apply(fn)  # type: ignore[no-untyped-call]
    adapter._source = {name: fn(t) for name, t in adapter._source.items()}
    if adapter._watch is not None:
        adapter._watch.move(fn)
    adapter._digest = ""
    for module in (adapter.state, *adapter._fresh):
        move_state(module, fn)
    follow_parameters(adapter._optimizer)
