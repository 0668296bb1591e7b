"""EATA: ETA with a penalty on changes of weights that matter for the source domain."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.methods.base import Output, SplitModel, register
from trueup.methods.eta import Eta
from trueup.validate import check_float


@register
@dataclass(frozen=True, kw_only=True)
class Eata(Eta):
    """ETA's loss plus fisher_weight · Σ_j F_j (θ_j - θ0_j)², with F from source images given to `adapter.prepare`."""

    fisher_weight: float = 2000.0
    """Weight of the penalty."""

    info = replace(
        Eta.info,
        name="eata",
        title="EATA",
        needs=("prepare",),
        memory="the mean prediction, and two values for each updated parameter",
        settings="CIFAR-10-C: Adam with lr=1e-3, redundancy=0.4, fisher_weight=1, batches of 200 "
        "(mariodoebler/test-time-adaptation), where this is SGD.",
        works="As ETA, and streams that return to the source domain: weights that matter there hardly change.",
        breaks="Without source images before deployment it is the same as ETA.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("fisher_weight", self.fisher_weight, 0)

    def init(self, net: SplitModel) -> nn.Module:
        """Add Fisher information F and source values θ0, in the order of the selected parameters."""
        state = super().init(net)
        state.fisher = _buffers([torch.zeros_like(p) for p in net.selected.values()])
        state.anchor = _buffers([p.detach().clone() for p in net.selected.values()])
        return state

    def prepare(self, net: SplitModel, loader: Iterable[Tensor], state: Any) -> None:
        """Estimate F: squared gradients of the cross-entropy with a batch's own predictions, averaged over batches."""
        parameters, fisher = list(net.selected.values()), list(state.fisher.buffers())
        batches = 0
        for x in loader if parameters else ():
            logits = net(x).logits
            F.cross_entropy(logits, logits.argmax(dim=1)).backward()
            for total, p in zip(fisher, parameters, strict=True):
                if p.grad is not None:
                    total += p.grad.square()
                    p.grad = None
            batches += 1
        for total in fisher:
            total /= max(1, batches)

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """Return ETA's loss plus the penalty; None if ETA selects no sample."""
        loss = super().loss(net, out, state)
        if loss is None:
            return None
        triples = zip(net.selected.values(), state.fisher.buffers(), state.anchor.buffers(), strict=True)
        penalty = sum(((f * (p - p0).square()).sum() for p, f, p0 in triples), torch.zeros_like(loss))
        return loss + self.fisher_weight * penalty


def _buffers(tensors: list[Tensor]) -> nn.Module:
    module = nn.Module()
    for i, tensor in enumerate(tensors):
        module.register_buffer(str(i), tensor)
    return module
