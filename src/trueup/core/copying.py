"""Copies of an adapter, and the networks that it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from trueup.core.effects import check_precision
from trueup.core.isolation import undisturbed
from trueup.core.optimizer_state import follow_parameters
from trueup.core.state import move_memory
from trueup.model.caches import find_caches
from trueup.model.calls import Batch, refuse_parts
from trueup.model.copy_model import copy_model
from trueup.model.heads import with_few_images
from trueup.model.split_model import SplitModel

if TYPE_CHECKING:
    from trueup.core.lifecycle import AdapterBase

A = TypeVar("A", bound="AdapterBase")


def networks(adapter: AdapterBase) -> list[SplitModel]:
    """Return the model, and those that a method keeps: teachers, anchors."""
    memories = [adapter.state] if adapter.fresh is None else [adapter.state, adapter.fresh.memory]
    return [adapter.net, *(net for memory in memories for net in memory.modules() if isinstance(net, SplitModel))]


def look_for_caches(adapter: AdapterBase, x: Tensor) -> None:
    """Find out, once, what a model that learns keeps of a forward for those that follow."""
    if adapter.net.runner.caches is None and adapter.optimizer is not None:
        with undisturbed(x.device):
            found = with_few_images(lambda part: find_caches(copy_model(adapter.net.model), part), x)
        for net in networks(adapter):
            net.runner.caches = found


@contextmanager
def calling(adapter: AdapterBase, x: Batch) -> Iterator[None]:
    """Let all networks be called as x says, also with images that a method has changed or stored."""
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
    if not adapter.built:
        raise ValueError("fork an adapter after its first batch, or make it with adapt(..., example=x)")
    twin = copy.deepcopy(adapter, shared(adapter))
    twin.autosave = None  # two adapters must not write to one folder
    for each in (adapter, twin):
        each._register_load_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
    return twin


def shared(adapter: AdapterBase) -> dict[int, Any]:
    """Return what a copy need not copy: other views of the weights that are never updated, and the source's values."""
    each = [(net.selected, *named) for net in networks(adapter) for named in net.model.named_parameters()]
    views = {id(p): nn.Parameter(p.detach(), requires_grad=False) for selected, n, p in each if n not in selected}
    return {**views, **{id(t): t for t in adapter.source.values()}}


def _refuse_state_dict(*_: Any) -> None:
    raise TypeError("adapters that share weights cannot load a state dict, which would write into all; use load(path)")


def move(adapter: AdapterBase, fn: Callable[[Tensor], Tensor]) -> None:
    """Move or convert all tensors of an adapter, as `nn.Module._apply` does for a module."""
    check_precision({name: fn(p.detach().flatten()[:0]) for name, p in adapter.net.selected.items()}, adapter.method)
    adapter.net._apply(fn)  # type: ignore[no-untyped-call]
    move_memory(adapter.state, fn)
    for state in adapter.kept if adapter.fresh is None else (adapter.fresh, *adapter.kept):
        state.move(fn)
    adapter.digest = ""
    follow_parameters(adapter.optimizer)
