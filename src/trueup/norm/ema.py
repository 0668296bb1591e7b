"""Running estimates: they start at the source's statistics and move towards those of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.finite import NotFiniteError, all_finite
from trueup.norm.base import Moments, NormPolicy, batchnorms, biased_moments, own_statistics
from trueup.norm.batch import moved


class EmaPolicy(NormPolicy):
    """Running estimates in the layers' own buffers; the number is how far a batch moves them.

    A forward that reads uses the buffers as they are and needs no hooks. One that updates moves the estimates first
    and normalises with them, as constants for the gradient; they are kept if the whole forward went well.
    """

    default, largest = 0.1, 1.0
    remembers = True
    moves_in_forward = True

    @contextmanager
    def forward_pass(self, model: nn.Module, *, update: bool) -> Iterator[None]:
        """Move the estimates call by call: a layer that runs again goes on from where it is."""
        if not update:
            yield
            return
        own = {layer: own_statistics(layer) for layer in batchnorms(model)}

        def move(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, _BatchNorm)
            x = args[0].detach()
            few = x.numel() < self.fewest * x.shape[1]
            now = own[layer] if few else moved(own_statistics(layer), biased_moments(x), self.number)
            layer.running_mean, layer.running_var = now

        handles = [layer.register_forward_pre_hook(move) for layer in own]
        try:
            yield
            new = [own_statistics(layer) for layer in own]
        finally:
            for handle in handles:
                handle.remove()
            for layer, moments in own.items():
                layer.running_mean, layer.running_var = moments
        _keep(list(own.values()), new)


@torch.no_grad()
def _keep(estimates: list[Moments], new: list[Moments]) -> None:
    """Copy new moments into the estimates; refuse them if they are not finite."""
    refuse_not_finite([t for moments in new for t in moments])
    for own, moments in zip(estimates, new, strict=True):
        for target, value in zip(own, moments, strict=True):
            if value is not target:
                target.copy_(value)


def refuse_not_finite(statistics: list[Tensor]) -> None:
    """Refuse statistics of a batch that are not finite."""
    if not all_finite(statistics):
        raise NotFiniteError(
            "the batch's normalisation statistics are not finite: its values are too large for this model"
        )
