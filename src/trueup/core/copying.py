"""The networks of an adapter: called alike, shared by forks, and moved between devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from trueup.core.effects import check_precision
from trueup.core.isolation import networks, undisturbed
from trueup.core.optimizer_state import follow_parameters
from trueup.core.state import move_memory
from trueup.model.caches import find_caches
from trueup.model.calls import Batch, refuse_parts
from trueup.model.copy_model import copy_model
from trueup.model.heads import with_few_images

if TYPE_CHECKING:
    from trueup.core.lifecycle import AdapterBase

A = TypeVar("A", bound="AdapterBase")


def detect_caches(adapter: AdapterBase, x: Tensor) -> None:
    """Detect, once, tensors that the model caches between forwards."""
    if adapter.net.runner.caches is None and adapter.optimizer is not None:
        with undisturbed(x.device):
            found = with_few_images(lambda part: find_caches(copy_model(adapter.net.model), part), x)
        for net in networks(adapter, fresh=True):
            net.runner.caches = found


@contextmanager
def calling(adapter: AdapterBase, x: Batch) -> Iterator[None]:
    """Call all networks as the user called the adapter with this batch, also on images that a method has made."""
    if adapter.method.info.images:  # stored images would run later, without the other tensors
        refuse_parts(x.signature)
    for net in networks(adapter, fresh=True):
        net.runner.signature = x.signature
    try:
        yield
    finally:
        for net in networks(adapter, fresh=True):  # there may be more of them now
            net.runner.signature = None


def fork(adapter: A) -> A:
    """Copy an adapter; the copy shares the memory of weights that are never updated, and the source's values."""
    if not adapter.built:
        raise ValueError("fork an adapter after its first batch, or make it with adapt(..., example=x)")
    twin = copy.deepcopy(adapter, shared_tensors(adapter))
    for each in (adapter, twin):
        each._register_load_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
    return twin


def shared_tensors(adapter: AdapterBase) -> dict[int, Any]:
    """Return what a fork does not copy, by identity: weights that are never updated, and the source's values."""
    each = [(net.selected, *named) for net in networks(adapter, fresh=True) for named in net.model.named_parameters()]
    views = {id(p): nn.Parameter(p.detach(), requires_grad=False) for selected, n, p in each if n not in selected}
    return {**views, **{id(t): t for t in adapter.source.values()}}


def _refuse_state_dict(*_: Any) -> None:
    raise TypeError("adapters that share weights cannot load a state dict, which would write into all; use load(path)")


def move(adapter: AdapterBase, fn: Callable[[Tensor], Tensor]) -> None:
    """Move or convert all tensors of an adapter, as `nn.Module._apply` does for a module."""
    check_precision({name: fn(p.detach().flatten()[:0]) for name, p in adapter.net.selected.items()}, adapter.method)
    adapter.net._apply(fn)  # type: ignore[no-untyped-call]
    move_memory(adapter.state, fn)
    for state in (adapter.fresh, *adapter.kept) if adapter.built else adapter.kept:
        state.move(fn)
    adapter.digest = ""
    follow_parameters(adapter.optimizer)
