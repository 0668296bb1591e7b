"""Showing source images to a method that wants some before deployment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trueup.core.building import build_for, fresh_state

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter


def prepare(adapter: Adapter, loader: Iterable[Any]) -> None:
    """Make the fresh state anew from batches x, or (x, y) whose y is ignored, and start there."""
    if adapter.batches:
        raise ValueError("prepare an adapter before its first batch, or after reset()")
    batches = (item[0] if isinstance(item, tuple | list) else item for item in loader)
    with torch.inference_mode(False):
        checked: Iterator[Tensor] = (adapter._entered((batch,)) for batch in batches)
        first = next(checked, None)
        if first is None:
            raise ValueError("the loader is empty")
        if not adapter._built:
            build_for(adapter, first)
        fresh = fresh_state(adapter)
        policy = adapter.net.active(len(first))
        with adapter._random.drawing(first.device), torch.enable_grad(), adapter.net.frozen_statistics(), policy:
            adapter._hooks.prepare(adapter.net, (x for part in ([first], checked) for x in part), fresh)
        adapter._fresh, adapter._prepared = (fresh,), True
        adapter.reset()
