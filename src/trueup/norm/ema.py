"""Running estimates: they start at the source's statistics and move towards those of each batch."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.norm.policy import (
    Moments,
    NormPolicy,
    biased_moments,
    mix_moments,
    own_statistics,
    refuse_not_finite,
    replacing_statistics,
)  # fmt: skip


class EmaPolicy(NormPolicy):
    """Running estimates in the layers' own buffers; the number is how far a batch moves them.

    A forward that updates moves the estimates first and normalises with them, as constants for the gradient; they are
    kept if the whole forward went well.
    """

    default, largest = 0.1, 1.0
    remembers = moves_in_forward = True

    def following(self, model: nn.Module) -> AbstractContextManager[None]:
        """Move the estimates call by call: a layer that runs again goes on from where it was."""

        def choose(layer: _BatchNorm, own: Moments, x: Tensor) -> Moments:
            if self.seen is None:
                return own
            before = self.seen.get(layer, own)
            now = self.seen[layer] = before if self.few(x) else mix_moments(before, biased_moments(x), self.number)
            return now

        return replacing_statistics(model, choose)

    @torch.no_grad()
    def remember(self, model: nn.Module, seen: dict[_BatchNorm, Moments]) -> None:
        """Copy the moved estimates into the layers' buffers."""
        refuse_not_finite(list(seen.values()))
        for layer, moments in seen.items():
            for estimate, value in zip(own_statistics(layer), moments, strict=True):
                if value is not estimate:
                    estimate.copy_(value)
