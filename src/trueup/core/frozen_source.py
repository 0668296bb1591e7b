"""The frozen source as an anchor: what it says, how far away the parameters are, and ways to come nearer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trueup.core.random_stream import undisturbed
from trueup.model.heads import as_logits, call_model

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter


class Answer(NamedTuple):
    """The adapter's answer to a batch, and the frozen source's."""

    adapted: Tensor
    source: Tensor


@torch.no_grad()
def source_logits(adapter: Adapter, x: Tensor) -> Tensor:
    """What the frozen source says; nothing of the adapter changes, nor its random stream."""
    model, output = adapter.net.runner.without_caches(), adapter.net.runner.output
    buffers = dict(model.named_buffers())
    source = {name: t.clone() if name in buffers else t for name, t in adapter._source.items()}
    with undisturbed(x.device):
        answer = call_model(lambda *args, **kwargs: torch.func.functional_call(model, source, args, kwargs), x)
    logits = as_logits(answer, output, rows=len(x), least=1 if adapter.multilabel else 2)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def drift(adapter: Adapter) -> float:
    """How far the selected parameters are from the source, in parts of their norm."""
    ours, source = adapter.net.selected, adapter._source
    if not ours:
        return 0.0
    away = torch.nn.utils.get_total_norm([p - source[name] for name, p in ours.items()])
    return float(away / torch.nn.utils.get_total_norm([source[name] for name in ours]).clamp(min=1e-12))


@torch.no_grad()
def pull(adapter: Adapter, share: float) -> None:
    """Move the selected parameters a share of the way to the source."""
    for name, p in adapter.net.selected.items():
        p.lerp_(adapter._source[name], share)
    torch.clear_autocast_cache()


@torch.no_grad()
def restore_some(adapter: Adapter, chance: float) -> None:
    """Each value of the selected parameters becomes the source's with this chance."""
    for name, p in adapter.net.selected.items():
        p.copy_(torch.where(torch.rand_like(p) < chance, adapter._source[name], p))
    torch.clear_autocast_cache()


@torch.no_grad()
def restore_part(adapter: Adapter, share: float) -> None:
    """The selected parameters of the last share of the layers become the source's."""
    names = list(adapter.net.selected)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    last = set(layers[len(layers) - round(share * len(layers)) :])
    for name in names:
        if name.rpartition(".")[0] in last:
            adapter.net.selected[name].copy_(adapter._source[name])
    torch.clear_autocast_cache()
