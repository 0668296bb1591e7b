"""Add your own method in thirty lines, and check it with the contract of all methods.

The example is Tent with a weight for each sample, so that confident predictions count more.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import trueup
from trueup.losses import entropy
from trueup.testing import check_method, convnet, images


@trueup.register
@dataclass(frozen=True, kw_only=True)
class WeightedTent(trueup.GradientMethod):
    """L = Σ w_i H_i / Σ w_i with w_i = exp(-sharpness · H_i)."""

    lr: float = 1e-3
    params: Any = "norm"
    sharpness: float = 1.0
    """Extra weight of confident predictions; 0 is Tent."""

    info = trueup.Info(name="weighted-tent", title="Weighted Tent", paper="an example; no paper")

    def loss(self, net: trueup.SplitModel, out: trueup.Output, state: Any) -> Tensor:
        """Return the weighted mean entropy; the weights have no gradient."""
        h = entropy(out.logits)
        weight = torch.exp(-self.sharpness * h.detach())
        return (weight * h).sum() / weight.sum()


check_method(WeightedTent)
print("the contract holds")

adapter = trueup.adapt(convnet(), "weighted-tent", sharpness=2.0)
x, y = images(64, seed=0, shift=1.0)
print(f"accuracy on a shifted batch: {(adapter(x).argmax(dim=1) == y).float().mean():.0%}")
print(adapter)
