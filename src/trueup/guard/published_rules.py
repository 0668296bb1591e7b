"""Published rules against collapse, for use with any method: `Guard(rules=(*RULES, Sar()))`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trueup.guard.rules import Action, BatchSignals, Rule, buffers, diversity
from trueup.validate import check_float, check_int


@dataclass(frozen=True, kw_only=True)
class Sar(Rule):
    """SAR (Niu et al., ICLR 2023): reset to the source if the running mean of the entropy falls too low."""

    threshold: float = 0.2 / math.log(1000)
    """As a fraction of ln C. Differs: the paper's 0.2 is for 1,000 classes; for ten it would be 9 % of the maximum."""
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_float("threshold", self.threshold, 0, 1)
        check_float("momentum", self.momentum, 0, 1)

    def init(self, classes: int) -> nn.Module:
        """Return the running mean; negative before the first batch."""
        return buffers(mean=torch.full((1,), -1.0), classes=torch.tensor(classes))

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Judge the entropy of predictions, as methods may minimise another loss."""
        now = signals.entropy * math.log(int(state.classes))
        mean = now if float(state.mean) < 0 else self.momentum * float(state.mean) + (1 - self.momentum) * now
        state.mean.fill_(mean)
        if mean >= self.threshold * math.log(int(state.classes)):
            return None
        state.mean.fill_(-1.0)
        return Action("reset", f"the running mean of the entropy has fallen to {mean:.2g}")


@dataclass(frozen=True, kw_only=True)
class RDumb(Rule):
    """RDumb (Press et al., NeurIPS 2023): reset to the source every `every` batches."""

    every: int = 1000

    def __post_init__(self) -> None:
        check_int("every", self.every, 1)

    def init(self, classes: int) -> nn.Module:
        """Return the number of batches since the last reset."""
        return buffers(count=torch.tensor(0))

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Count batches, and request a reset when the interval is over."""
        state.count.add_(1)
        if int(state.count) < self.every:
            return None
        state.count.zero_()
        return Action("reset", f"{self.every} batches since the last reset")


@dataclass(frozen=True, kw_only=True)
class Asr(Rule):
    """ASR (ICLR 2026): reset the last layers to the source if the concentration falls below its running mean.

    Differs: it does not weight parameters by Fisher information; the flip rate enters the momentum only if the batch
    was compared with the source.
    """

    start: float = 0.5
    """The running mean starts at ln(start · C)."""
    momentum: float = 0.15
    keep: float = 0.5
    """Largest share of layers that a reset leaves alone."""
    slope: float = 20.0
    """Decrease of that share per nat below the running mean."""

    def __post_init__(self) -> None:
        for name in ("start", "momentum", "keep"):
            check_float(name, getattr(self, name), 0, 1)
        check_float("slope", self.slope, 0)

    def init(self, classes: int) -> nn.Module:
        """Return the running mean."""
        return buffers(mean=torch.full((1,), math.log(max(1.0, self.start * classes))))

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Request a reset of more layers the further the concentration is below its running mean."""
        now, mean = diversity(F.softmax(signals.mean_logits, dim=0)), float(state.mean)
        source = signals.source
        flips = 0.0 if source is None else float((signals.classes != source.classes).float().mean())
        state.mean.fill_(mean + self.momentum * (1 - flips) * (now - mean))
        if now >= mean:
            return None
        kept = max(self.keep - self.slope * (mean - now), 0.0)
        return Action("part", f"the concentration {now:.2f} is below its running mean {mean:.2f}", 1 - kept)


@dataclass(frozen=True, kw_only=True)
class Cotta(Rule):
    """CoTTA (Wang et al., CVPR 2022): restore random values to the source's after each batch."""

    chance: float = 0.01

    def __post_init__(self) -> None:
        check_float("chance", self.chance, 0, 1)

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Request a restore after every batch."""
        return Action("restore", "", self.chance)


@dataclass(frozen=True, kw_only=True)
class Roid(Rule):
    """ROID (Marsden et al., WACV 2024): move the parameters a little towards the source's after each batch."""

    momentum: float = 0.99

    def __post_init__(self) -> None:
        check_float("momentum", self.momentum, 0, 1)

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Request a pull after every batch."""
        return Action("pull", "", 1 - self.momentum)


PUBLISHED: dict[str, type[Rule]] = {"sar": Sar, "rdumb": RDumb, "asr": Asr, "cotta": Cotta, "roid": Roid}
