"""Forward passes and predictions of an adapter's method, shown to its observers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from trueup.model.split_model import Output, SplitModel

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter

ForwardObserver = Callable[[SplitModel, Output], None]
"""Called after each forward pass, before the network learns from the batch."""
AnswerObserver = Callable[[SplitModel, Output, Tensor], None]
"""Called after each prediction with the pass that it comes from; the network may have learnt by then."""


def run_forward(adapter: Adapter, x: Tensor) -> Output:
    """Run the method's forward pass."""
    out = adapter._hooks.forward(adapter.net, x, adapter.state)
    for observer in adapter.forward_observers:
        observer(adapter.net, out)
    return out


def predict(adapter: Adapter, out: Output) -> Tensor:
    """Return the method's answer, detached."""
    answer = adapter._hooks.predict(adapter.net, out, adapter.state)
    for observer in adapter.answer_observers:
        observer(adapter.net, out, answer)
    return answer.detach()


def second_loss(adapter: Adapter, out: Output) -> Tensor | None:
    """Return the loss of a sharpness-aware second pass; `memo["first"]` is the memo of the first."""
    net, x = adapter.net, out.x
    if x.is_floating_point():
        x = x.to(next(net.parameters(), x).dtype)  # autocast is over, and no longer converts it
    with net.frozen_statistics():
        second = run_forward(adapter, x)
    second.memo["first"] = out.memo
    return adapter._hooks.loss(net, second, adapter.state)
