"""RDumb: ETA that starts afresh at fixed intervals."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from trueup.core.method import Info
from trueup.core.registry import register
from trueup.methods.eta import Eta
from trueup.model.split_model import Output, SplitModel
from trueup.validate import check_int


@register
@dataclass(frozen=True, kw_only=True)
class Rdumb(Eta):
    """ETA's loss; after every so many batches weights, optimiser and running mean go back to the source."""

    every: int = 1000
    """Batches between two fresh starts."""

    info = Info(
        name="rdumb",
        title="RDumb",
        paper="Press et al., RDumb: A simple approach that questions our progress in continual test-time adaptation, "
        "NeurIPS 2023",
        tasks=("classification", "segmentation"),
        passes="1 forward, 1 backward",
        memory="the mean prediction and a count of batches",
        settings="CIFAR-10-C: Adam with lr=1e-3, redundancy=0.4, batches of 200 (mariodoebler/test-time-adaptation), "
        "where this is SGD.",
        works="Long streams that change: whatever goes wrong lasts for one interval.",
        breaks="What was learnt is lost as well, and a collapse within one interval is not noticed.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("every", self.every, 1)

    def init(self, net: SplitModel) -> nn.Module:
        """ETA's running mean, and the batches since the last fresh start."""
        state = super().init(net)
        state.register_buffer("count", torch.zeros(1, dtype=torch.int64, device=state.get_buffer("mean").device))
        return state

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        """Count the batch; here, because `after` runs once for each of several steps."""
        state.count += 1

    def after(self, net: SplitModel, out: Output, state: Any) -> Literal["reset"] | None:
        """ETA's running mean moves; a full interval ends with a fresh state, whose count is zero."""
        super().after(net, out, state)
        return "reset" if int(state.count) >= self.every else None
