"""RDumb: ETA with a reset at fixed intervals."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from trueup.methods.base import Output, SplitModel, register
from trueup.methods.eta import Eta
from trueup.validate import check_int


@register
@dataclass(frozen=True, kw_only=True)
class Rdumb(Eta):
    """ETA's loss; every `every` batches weights, optimiser and running mean are reset to the source."""

    every: int = 1000
    """Batches between two resets."""

    info = replace(
        Eta.info,
        name="rdumb",
        title="RDumb",
        paper="Press et al., RDumb: A simple approach that questions our progress in continual test-time adaptation, "
        "NeurIPS 2023",
        memory="the mean prediction and a count of batches",
        settings="CIFAR-10-C: Adam with lr=1e-3, redundancy=0.4, batches of 200 (mariodoebler/test-time-adaptation), "
        "where this is SGD.",
        works="Long streams that change: an error lasts for one interval at most.",
        breaks="A reset also loses what was learnt, and a collapse within an interval goes unnoticed.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("every", self.every, 1)

    def init(self, net: SplitModel) -> nn.Module:
        """Add the number of batches since the last reset to ETA's running mean."""
        state = super().init(net)
        state.register_buffer("count", torch.zeros(1, dtype=torch.int64, device=state.get_buffer("mean").device))
        return state

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        """Count the batch; `after` would count each of several steps."""
        state.count += 1

    def after(self, net: SplitModel, out: Output, state: Any) -> Literal["reset"] | None:
        """Update ETA's running mean; ask for a reset at the end of an interval."""
        super().after(net, out, state)
        return "reset" if int(state.count) >= self.every else None
