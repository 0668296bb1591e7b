"""The first look at a model: its head, the number of its outputs and its task, found with a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trueup.core.copying import copy_model
from trueup.finite import check_values
from trueup.model.caches import Caches, held_tensors
from trueup.model.calls import Batch
from trueup.model.heads import as_logits, call_model, look_for_head
from trueup.model.inputs import check_logits

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter


def probe(adapter: Adapter, x: Tensor) -> tuple[str | None, int, str]:
    """Return the name of the head, the number of outputs and the task; copies run, as some models change themselves."""
    check_values(x)
    net, method = adapter.net, adapter.method
    strict, least = "head" in method.info.needs, 1 if adapter.multilabel else 2
    needed = strict or getattr(method, "params", None) in ("head", "backbone")
    copies: list[tuple[nn.Module, dict[int, Tensor]]] = []

    def fresh() -> nn.Module:
        model = copy_model(net.model)
        copies.append((model, held_tensors(model)))
        return model

    with adapter._random.drawing(x.device), torch.no_grad():
        head, logits = look_for_head(fresh, x, adapter._head, net.runner.output, least, strict=strict, needed=needed)
        if isinstance(x, Batch) and x.others and len(x) > 2:
            _check_rows(fresh(), x, logits, net.runner.output)
    if all(held_tensors(model).keys() == before.keys() for model, before in copies):
        net.runner.caches = Caches()  # a search for caches would find none
    check_logits(logits, multilabel=adapter.multilabel)
    return head, logits.shape[1], "classification" if logits.ndim == 2 else "segmentation"


def _check_rows(model: nn.Module, x: Batch, logits: Tensor, output: Callable[[Any], Tensor] | None) -> None:
    """Refuse a tensor that has as many rows as there are images but is not about them, such as one row per class."""
    try:
        few = as_logits(call_model(model, x[:2]), output, rows=2, least=1)
    except Exception:  # a model of a fixed batch size cannot be asked
        return
    if few.shape[1] != logits.shape[1]:
        raise ValueError(
            f"a tensor of this call has {len(x)} rows, as many as there are images, but does not belong to them one "
            f"by one: with fewer rows the model has {few.shape[1]} outputs, not {logits.shape[1]}. Make it a buffer of "
            f"the model (for text features: trueup.zero_shot)"
        )
