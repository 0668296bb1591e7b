"""Building an adapter with its first batch: its head, the parameters that it updates and its fresh state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trueup.core.copying import detect_caches
from trueup.core.effects import choose_parameters
from trueup.core.isolation import restore_dicts, uninterrupted
from trueup.core.multilabel import PerLabel
from trueup.core.registry import for_task
from trueup.core.state import AdapterState, Progress
from trueup.finite import check_values
from trueup.model.autotune import autotune
from trueup.model.caches import Caches, held_tensors
from trueup.model.calls import Batch, as_logits, call_model, read_images
from trueup.model.copy_model import copy_model
from trueup.model.heads import look_for_head
from trueup.model.probabilities import check_logits
from trueup.norm.policy import batchnorms

if TYPE_CHECKING:
    from trueup.core.lifecycle import AdapterBase


def make_ready(adapter: AdapterBase, x: Tensor) -> None:
    """Build the adapter with its first batch, and detect caches of the model."""
    if not adapter.built:
        build(adapter, *probe(adapter, x), x)
    detect_caches(adapter, x)


def build(adapter: AdapterBase, head: str | None, channels: int, task: str, x: Tensor | None = None) -> None:
    """Make the fresh state, or leave the adapter as it was; with a batch, measure the settings that are "auto"."""
    with restored_on_error(adapter):
        _build(adapter, head, channels, task, x)
    if adapter.undo is not None:
        adapter.undo.capture()


@dataclass
class Attempt:
    """A change that is undone if it fails; once it is complete, an interrupt no longer undoes it."""

    complete: bool = False


@contextmanager
def restored_on_error(adapter: AdapterBase, attempt: Attempt | None = None) -> Iterator[None]:
    """Put back the attributes of an adapter and its network if the block raises before the attempt is complete."""
    parts = [vars(adapter), adapter._modules, *adapter.net.registries()]
    before = [dict(part) for part in parts]
    try:
        yield
    except BaseException:
        if attempt is None or not attempt.complete:
            uninterrupted(lambda: restore_dicts(zip(parts, before, strict=True)))
        raise


def _build(adapter: AdapterBase, head: str | None, channels: int, task: str, x: Tensor | None) -> None:
    net, method = adapter.net, for_task(adapter.method, adapter.hyper, task)
    selected = choose_parameters(net.model, method, head, adapter.flags, adapter.warn_once)
    adapter.method, adapter.task = method, task
    adapter.hooks = PerLabel(method, channels) if adapter.multilabel else method
    net.attach(head, channels, dense=task == "segmentation")
    net.selected = selected
    net.model.requires_grad_(False)
    for p in selected.values():
        p.requires_grad_(True)
    if x is not None and net.runner.settings.unresolved:
        with adapter.random.drawing(x.device):
            net.use(autotune(net, x, learns=bool(selected)))
    if adapter.monitor is not None:
        layers = [layer.num_features for layer in batchnorms(net.model)]
        adapter.monitor.attach(2 if adapter.multilabel else channels, layers)
    source = {n: t.detach().clone() for n, t in {**selected, **dict(net.model.named_buffers())}.items()}
    adapter.fresh, adapter.built = AdapterState(source, adapter.make_memory(), {}, {}, Progress()), True
    adapter.reset()


def probe(adapter: AdapterBase, x: Tensor) -> tuple[str | None, int, str]:
    """Return the name of the head, the number of outputs and the task; runs copies, as a forward may change a model."""
    check_values(x)
    net, method = adapter.net, adapter.method
    strict, least = "head" in method.info.needs, 1 if adapter.multilabel else 2
    needed = strict or getattr(method, "params", None) in ("head", "backbone")
    copies: list[tuple[nn.Module, dict[int, Tensor]]] = []

    def copied() -> nn.Module:
        model = copy_model(net.model)
        copies.append((model, held_tensors(model)))
        return model

    with adapter.random.drawing(x.device), torch.no_grad():
        head, logits = look_for_head(
            copied, x, adapter.head_name, net.runner.output, least, strict=strict, needed=needed
        )
        if isinstance(x, Batch) and x.others and len(x) > 2:
            _check_rows(copied(), x, logits, net.runner.output)
    if all(held_tensors(model).keys() == before.keys() for model, before in copies):
        net.runner.caches = Caches()  # a search for caches would find none
    check_logits(logits, multilabel=adapter.multilabel)
    return head, logits.shape[1], "classification" if logits.ndim == 2 else "segmentation"


def _check_rows(model: nn.Module, x: Batch, logits: Tensor, output: Callable[[Any], Tensor] | None) -> None:
    """Refuse another tensor whose length equals the batch size by chance, such as one row per class."""
    try:
        few = as_logits(call_model(model, x[:2]), output, rows=2, min_channels=1)
    except Exception:  # a model with a fixed batch size cannot be checked
        return
    if few.shape[1] != logits.shape[1]:
        raise ValueError(
            f"a tensor of this call has {len(x)} rows, as many as there are images, but does not belong to them one "
            f"by one: with fewer rows the model has {few.shape[1]} outputs, not {logits.shape[1]}. Make it a buffer of "
            f"the model (for text features: trueup.zero_shot)"
        )


def prepare(adapter: AdapterBase, batches: Iterable[Any]) -> None:
    """Show source batches to the method and make the result the fresh state; of a batch (x, y), y is ignored."""
    if adapter.batches:
        raise ValueError("prepare an adapter before its first batch, or after reset()")
    model = adapter.net.model
    items = (item[0] if isinstance(item, tuple | list) else item for item in batches)
    images = (read_images(model, (item,), {}) for item in items)
    first = next(images, None)
    if first is None:
        raise ValueError("the loader is empty")
    make_ready(adapter, first)
    memory = adapter.make_memory()
    policy = adapter.net.active(len(first))
    with adapter.random.drawing(first.device), torch.enable_grad(), adapter.net.frozen_statistics(), policy:
        adapter.hooks.prepare(adapter.net, (x for part in ([first], images) for x in part), memory)
    adapter.fresh.memory, adapter.prepared = memory, True
    adapter.reset()
