"""A model small enough to compute with: three samples, two classes, a bare linear head that is the identity."""

import math

import torch
from torch import Tensor, nn

import trueup

# As logits: softmax gives (3/4, 1/4), (1/11, 10/11), (1/2, 1/2).
ROWS = [[math.log(3.0), 0.0], [0.0, math.log(10.0)], [0.0, 0.0]]
PROBS = [[0.75, 0.25], [1 / 11, 10 / 11], [0.5, 0.5]]
X = torch.tensor(ROWS, dtype=torch.float64)


def identity_head() -> nn.Linear:
    head = nn.Linear(2, 2, bias=False).double()
    head.weight.data = torch.eye(2, dtype=torch.float64)
    return head


def loss_of(method: str, x: Tensor = X, **hyper: object) -> float | None:
    """The loss of the first batch, with the state as it is before any update."""
    adapter = trueup.adapt(identity_head(), method, example=x, **{"params": "all", **hyper})
    out = adapter.net(x)
    adapter.method.observe(adapter.net, out, adapter.state)
    loss = adapter.method.loss(adapter.net, out, adapter.state)
    return None if loss is None else float(loss.detach())


def entropy(p: list[float]) -> float:
    return -sum(v * math.log(v) for v in p)


def norm_layer() -> nn.Sequential:
    """Source statistics: mean 4, variance 9."""
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(2, 2, bias=False)).double().eval()
    model[0].running_mean.fill_(4.0)
    model[0].running_var.fill_(9.0)
    model[2].weight.data = torch.eye(2, dtype=torch.float64)
    return model
