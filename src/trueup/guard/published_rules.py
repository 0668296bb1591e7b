"""Published rules against collapse, to be tried with any method: `Guard(rules=(*RULES, Sar()))`."""

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
    """SAR (Niu et al., ICLR 2023): back to the source when the running mean of the loss, an entropy, falls too low."""

    threshold: float = 0.2 / math.log(1000)
    """Part of ln C. Differs: the paper's 0.2 is for 1,000 classes and would be 9 % of the greatest entropy for ten."""
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_float("threshold", self.threshold, 0, 1)
        check_float("momentum", self.momentum, 0, 1)

    def init(self, classes: int) -> nn.Module:
        """The running mean; below zero before the first."""
        return buffers(mean=torch.full((1,), -1.0), classes=torch.tensor(classes))

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """For methods that minimise something else than entropy, the entropy of the answers serves."""
        now = signs.entropy * math.log(int(state.classes))
        mean = now if float(state.mean) < 0 else self.momentum * float(state.mean) + (1 - self.momentum) * now
        state.mean.fill_(mean)
        if mean >= self.threshold * math.log(int(state.classes)):
            return None
        state.mean.fill_(-1.0)
        return Action("reset", f"the running mean of the entropy has fallen to {mean:.2g}")


@dataclass(frozen=True, kw_only=True)
class RDumb(Rule):
    """RDumb (Press et al., NeurIPS 2023): back to the source after so many batches, whatever happens."""

    every: int = 1000

    def __post_init__(self) -> None:
        check_int("every", self.every, 1)

    def init(self, classes: int) -> nn.Module:
        """Batches since the last time."""
        return buffers(count=torch.tensor(0))

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Count."""
        state.count.add_(1)
        if int(state.count) < self.every:
            return None
        state.count.zero_()
        return Action("reset", f"{self.every} batches are over")


@dataclass(frozen=True, kw_only=True)
class Asr(Rule):
    """ASR (ICLR 2026): when the concentration falls below its running mean, the last layers go back to the source.

    Differs: its weighting of parameters by Fisher information is left out; the flip rate enters the momentum only where
    the batch was compared with the source.
    """

    start: float = 0.5
    """The running mean starts at ln(start · C)."""
    momentum: float = 0.15
    keep: float = 0.5
    slope: float = 20.0

    def __post_init__(self) -> None:
        for name in ("start", "momentum", "keep"):
            check_float(name, getattr(self, name), 0, 1)
        check_float("slope", self.slope, 0)

    def init(self, classes: int) -> nn.Module:
        """The running mean."""
        return buffers(mean=torch.full((1,), math.log(max(1.0, self.start * classes))))

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """The further below, the more layers."""
        now, mean = diversity(F.softmax(signs.mean_logits, dim=0)), float(state.mean)
        flips = 0.0
        if signs.source is not None:
            flips = float((signs.classes != signs.source.classes).float().mean())
        rate = self.momentum * (1 - flips)
        state.mean.fill_(mean + rate * (now - mean))
        if now >= mean:
            return None
        kept = max(self.keep - self.slope * (mean - now), 0.0)
        return Action("part", f"the concentration {now:.2f} is below its running mean {mean:.2f}", 1 - kept)


@dataclass(frozen=True, kw_only=True)
class Cotta(Rule):
    """CoTTA (Wang et al., CVPR 2022): after each step a few values, drawn at random, go back to the source's."""

    chance: float = 0.01

    def __post_init__(self) -> None:
        check_float("chance", self.chance, 0, 1)

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Always."""
        return Action("restore", "", self.chance)


@dataclass(frozen=True, kw_only=True)
class Roid(Rule):
    """ROID (Marsden et al., WACV 2024): after each step the parameters move a little towards the source's."""

    momentum: float = 0.99

    def __post_init__(self) -> None:
        check_float("momentum", self.momentum, 0, 1)

    def after(self, signs: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        """Always."""
        return Action("pull", "", 1 - self.momentum)


PUBLISHED: dict[str, type[Rule]] = {"sar": Sar, "rdumb": RDumb, "asr": Asr, "cotta": Cotta, "roid": Roid}
