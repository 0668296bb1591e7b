"""The second loss of a sharpness-aware step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trueup.core.method import Method
from trueup.core.multilabel import PerLabel
from trueup.model.split_model import Output, SplitModel


def second_loss(hooks: Method | PerLabel, net: SplitModel, state: Any, out: Output) -> Tensor | None:
    """The loss of a batch once more, with the parameters as they are now; `memo["first"]` is the memo of before."""
    x = out.x
    if x.is_floating_point():
        x = x.to(next(net.parameters(), x).dtype)  # autocast is over, and no longer converts it
    with net.frozen_statistics():
        second = hooks.forward(net, x, state)
    second.memo["first"] = out.memo
    return hooks.loss(net, second, state)
