"""The first look at a model: its head, the number of its outputs and its task, found with a batch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trueup.core.copying import copy_model
from trueup.core.heads import look_for_head
from trueup.core.inputs import check_logits, check_values

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter


def probe(adapter: Adapter, x: Tensor) -> tuple[str | None, int, str]:
    """Return the name of the head, the number of outputs and the task; copies run, as some models change themselves."""
    check_values(x)
    net, method = adapter.net, adapter.method
    strict, least = "head" in method.info.needs, 1 if adapter.multilabel else 2
    needed = strict or getattr(method, "params", None) in ("head", "backbone")
    with adapter._random.drawing(x.device), torch.no_grad():
        fresh = partial(copy_model, net.model)
        head, logits = look_for_head(fresh, x, adapter._head, net.output, least, strict=strict, needed=needed)
    check_logits(logits, multilabel=adapter.multilabel)
    return head, logits.shape[1], "classification" if logits.ndim == 2 else "segmentation"
