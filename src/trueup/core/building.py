"""Building an adapter: its head, the parameters that it updates and its fresh state, once a batch has been seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trueup.core.copying import look_for_caches
from trueup.core.effects import choose_parameters
from trueup.core.multilabel import PerLabel
from trueup.core.probing import probe
from trueup.core.registry import for_task
from trueup.model.autotune import autotune

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter


def build_for(adapter: Adapter, x: Tensor) -> None:
    """Find the head with a batch, then build."""
    build(adapter, *probe(adapter, x), x)
    look_for_caches(adapter, x)


def build(adapter: Adapter, head: str | None, channels: int, task: str, x: Tensor | None = None) -> None:
    """Make the state of a fresh adapter, or leave it as it was; with a batch, measure what the engine leaves open."""
    parts = [vars(adapter), adapter._modules, vars(adapter.net), adapter.net._modules, vars(adapter.net.runner)]
    before = [dict(part) for part in parts]
    try:
        _build(adapter, head, channels, task, x)
    except BaseException:
        for part, values in zip(parts, before, strict=True):
            part.clear()
            part.update(values)
        raise
    if adapter._undo is not None:
        adapter._undo.capture()


def _build(adapter: Adapter, head: str | None, channels: int, task: str, x: Tensor | None) -> None:
    net, method = adapter.net, for_task(adapter.method, adapter._given, task)
    selected = choose_parameters(adapter, method, head)
    adapter.method, adapter.task = method, task
    adapter._hooks = PerLabel(method, channels) if adapter.multilabel else method
    net.attach(head, channels, dense=task == "segmentation")
    net.selected = selected
    net.model.requires_grad_(False)
    for p in selected.values():
        p.requires_grad_(True)
    if x is not None and net.runner.settings.open:
        with adapter._random.drawing(x.device):
            net.use(autotune(net, x, learns=bool(selected)))
    adapter._source = {n: t.detach().clone() for n, t in {**selected, **dict(net.model.named_buffers())}.items()}
    adapter._fresh = (fresh_state(adapter),)
    adapter._built = True
    adapter.reset()


def fresh_state(adapter: Adapter) -> nn.Module:
    """Return the method's state before any batch; the model must be at its source."""
    adapter._random.restart()
    device = next((t.device for t in (*adapter.net.parameters(), *adapter.net.buffers())), torch.device("cpu"))
    with adapter._random.drawing(device), torch.no_grad(), torch.autocast(device.type, enabled=False):
        return adapter._hooks.init(adapter.net).eval()
