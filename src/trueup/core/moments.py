"""An adapter's state as it was at a moment, kept in memory to go back to."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trueup.core.copying import assign_tensor

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter


@dataclass
class Moment:
    """What may change of the model, what the method and the policy remember, and the optimiser's state."""

    net: dict[str, Tensor]
    state: nn.Module
    policy: dict[str, Tensor]
    optimizer: dict[str, Any]


@torch.no_grad()
def remember(adapter: Adapter) -> Moment:
    """A copy of what going on would change."""
    net = {name: t.detach().clone() for name, t in adapter._mutable_tensors().items()}
    policy = {name: t.clone() for name, t in adapter.net.policy.state_dict().items()}
    optimizer = {} if adapter._optimizer is None else copy.deepcopy(adapter._optimizer.state_dict())
    return Moment(net, copy.deepcopy(adapter.state), policy, optimizer)


@torch.no_grad()
def back_to(adapter: Adapter, moment: Moment) -> None:
    """Be as at that moment; the random stream and the counts go on."""
    adapter._restart(moment.state)
    for name, target in adapter._mutable_tensors().items():
        assign_tensor(adapter.net.model, name, target, moment.net[name])
    adapter.net.policy.load_state_dict(moment.policy)
    if adapter._optimizer is not None:
        adapter._optimizer.load_state_dict(copy.deepcopy(moment.optimizer))  # it would take over the tensors themselves
    torch.clear_autocast_cache()
