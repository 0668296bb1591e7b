"""A method that uses every hook, for tests of the adapter."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import trueup
from trueup import GradientMethod, Info, Output, SplitModel
from trueup.testing import convnet, images

X = images(16, seed=0, shift=1.0)[0]


@dataclass(frozen=True, kw_only=True)
class Chatty(GradientMethod):
    """Uses every hook: random views, learnt parameters, a teacher, rows one at a time, a reset by itself."""

    lr: float = 1e-2
    limit: int = 3

    info = Info(name="chatty", title="Chatty", paper="none", needs=("head",))

    def init(self, net: SplitModel) -> nn.Module:
        state = nn.Module()
        state.projector = nn.Linear(net.weight.shape[1], 2)
        state.teacher = net.clone()
        state.register_buffer("taken", torch.zeros(1, dtype=torch.int64))
        return state

    def rows(self, state: Any, n: int) -> int:
        return min(n, 4)

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        out = net(x + 0.1 * torch.randn_like(x), update=True)
        out.memo["target"] = state.teacher(x).logits.softmax(dim=1)
        return out

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        fit = -(out.memo["target"] * out.logits.log_softmax(dim=1)).sum(dim=1).mean()
        return fit + state.projector(out.features).square().mean()

    def after(self, net: SplitModel, out: Output, state: Any) -> Any:
        state.taken += 1
        return "reset" if int(state.taken) == self.limit else None


def chatty(**hyper: Any) -> trueup.Adapter:
    return trueup.adapt(convnet(), Chatty(**hyper), example=X)
