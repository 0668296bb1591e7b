"""The frozen source: its answers, the distance of the parameters from it, and ways to move them closer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.core.random_stream import undisturbed
from trueup.model.heads import as_logits, call_model
from trueup.model.split_model import SplitModel


class Answer(NamedTuple):
    """The adapter's answer to a batch, and the frozen source's."""

    adapted: Tensor
    source: Tensor


@torch.no_grad()
def source_logits(net: SplitModel, source: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the answer of a network with the source's weights; nothing changes, nor does the random stream."""
    model = net.plain()
    buffers = dict(model.named_buffers())
    weights = {name: t.clone() if name in buffers else t for name, t in source.items()}
    with undisturbed(x.device):
        answer = call_model(lambda *args, **kwargs: torch.func.functional_call(model, weights, args, kwargs), x)
    logits = as_logits(answer, net.output, rows=len(x), least=1 if net.multilabel else 2)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def last_numbers(answers: Tensor, source: Tensor | None = None, *, multilabel: bool) -> dict[str, Tensor]:
    """Measure the entropy of answers, in parts of the greatest, and their agreement with the source's; without waiting.

    Of several labels each is a problem of two classes.
    """
    if multilabel:
        answers = torch.stack((torch.zeros_like(answers), answers), dim=1)
    log_p = F.log_softmax(answers.detach().float(), dim=1)
    numbers = {"entropy": -(log_p.exp() * log_p).sum(dim=1).mean() / math.log(answers.shape[1])}
    if source is not None:
        theirs = source > 0 if multilabel else source.argmax(dim=1)
        numbers["agreement"] = (log_p.argmax(dim=1) == theirs).float().mean()
    return numbers


@torch.no_grad()
def parameter_drift(net: SplitModel, source: Mapping[str, Tensor]) -> float:
    """Return the distance of the selected parameters from the source, relative to their norm."""
    ours = net.selected
    if not ours:
        return 0.0
    away = torch.nn.utils.get_total_norm([p - source[name] for name, p in ours.items()])
    return float(away / torch.nn.utils.get_total_norm([source[name] for name in ours]).clamp(min=1e-12))


@torch.no_grad()
def pull(net: SplitModel, source: Mapping[str, Tensor], share: float) -> None:
    """Move the selected parameters a share of the way to the source."""
    for name, p in net.selected.items():
        p.lerp_(source[name], share)


@torch.no_grad()
def restore_some(net: SplitModel, source: Mapping[str, Tensor], chance: float) -> None:
    """Set each value of the selected parameters to the source's with this chance."""
    for name, p in net.selected.items():
        p.copy_(torch.where(torch.rand_like(p) < chance, source[name], p))


@torch.no_grad()
def restore_part(net: SplitModel, source: Mapping[str, Tensor], share: float) -> None:
    """Set the selected parameters of the last share of the layers to the source's."""
    names = list(net.selected)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    last = set(layers[len(layers) - round(share * len(layers)) :])
    for name in names:
        if name.rpartition(".")[0] in last:
            net.selected[name].copy_(source[name])


MOVES = {"pull": pull, "restore": restore_some, "part": restore_part}
"""Ways of moving parameters towards the source, by the kind of a guard's decision."""
