"""The base of all normalisation policies: when statistics are used, and when they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.finite import NotFiniteError, all_finite
from trueup.hooks import hooked

# A segmenter's layer that sees fewer values per channel than this keeps the source's statistics: DeepLab pools a whole
# image into one value, and the deviation of a batch of few such values is noise.
FEWEST = 16

Moments = tuple[Tensor, Tensor]  # mean and variance per channel
Statistics = tuple[Tensor | None, Tensor | None]  # the same; (None, None) are those of the batch, computed by torch


class NormPolicy(nn.Module):
    """The statistics that BatchNorm layers of a model in eval mode normalise with: here the layers' own.

    A policy is active for a whole batch, forward and backward, so that activations that are recomputed in backward
    see the same statistics. Each forward updates what the policy remembers or only reads it. Estimates that answers
    depend on are in the layers' own buffers; the buffers of this module are all else that is remembered.
    """

    default: float | None = None  # the number in "name:number" if it is left out; None if the policy has no number
    largest = 1e6  # the largest number
    remembers = False  # answers depend on earlier batches
    compilable = False  # the model may be compiled
    recomputable = True  # activations may be recomputed in backward
    moves_in_forward = False  # a layer that runs twice in a forward has other statistics the second time
    two_passes = False  # the pass that answers is not the one to learn from

    def __init__(self, norm: str, number: float) -> None:
        super().__init__()
        self.norm, self.number = norm, number
        self.fewest = 2  # values per channel that a layer must see to use the batch's statistics
        self.frozen = False  # no forward updates
        self.centred = False  # "instance" corrects images from the batch's moments instead of the estimates
        self.learning = False  # the second of two passes
        self.seen: dict[_BatchNorm, Any] | None = None  # by hooks in the forward that is running, if it updates
        self._active = False

    def restart(self, model: nn.Module, *, classes: int | None, dense: bool) -> None:
        """Forget all batches; the model must be at its source.

        classes: of an image; None where pixels are classified, or an image may have several labels.
        """
        self.fewest = FEWEST if dense else 2

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """Let the layers of a model follow the policy; hooks are registered once, however deeply this is nested."""
        if self._active:
            yield
            return
        self._active = True
        try:
            with self.following(model):
                yield
        finally:
            self._active = False

    def following(self, model: nn.Module) -> AbstractContextManager[None]:
        """Register the hooks that a batch needs."""
        return nullcontext()

    @contextmanager
    def forward_pass(self, model: nn.Module, *, update: bool) -> Iterator[None]:
        """Surround one forward; with `update`, remember the batch if nothing is raised."""
        self.seen = {} if update else None
        try:
            with self.active(model):
                yield
            seen = self.seen
        finally:
            self.seen = None
        if seen:
            self.remember(model, seen)

    def remember(self, model: nn.Module, seen: dict[_BatchNorm, Any]) -> None:
        """Remember what the hooks have seen in a forward that updates."""

    def in_graph(self, model: nn.Module) -> AbstractContextManager[None]:
        """Surround one forward of a compiled model, which runs no hooks."""
        return nullcontext()

    def note_logits(self, logits: Tensor) -> None:
        """Take the logits of a forward that updates."""

    def inlier_rows(self, n: int) -> Tensor:
        """Return a mask of the images of the last updating forward that may be learnt from."""
        return torch.ones(n, dtype=torch.bool)

    def update_estimates(self, model: nn.Module) -> None:
        """Move estimates that must not move before the gradient of a forward is known."""

    def few(self, x: Tensor) -> bool:
        """Return whether a layer sees too few values for statistics of its own: one value has no variance."""
        return x.numel() < self.fewest * x.shape[1]

    @contextmanager
    def having(self, **flags: Any) -> Iterator[None]:
        """Set attributes for a while: `frozen`, `centred`, `learning`."""
        before = {name: getattr(self, name) for name in flags}
        vars(self).update(flags)
        try:
            yield
        finally:
            vars(self).update(before)


class SourcePolicy(NormPolicy):
    """The statistics of the source model."""

    compilable = True


def batchnorms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers of a model that have running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def own_statistics(layer: nn.Module) -> Moments:
    """Return the running statistics of a BatchNorm layer."""
    assert isinstance(layer, _BatchNorm)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


def set_statistics(layer: nn.Module, statistics: Statistics) -> None:
    """Let a BatchNorm layer have these tensors for its running statistics."""
    assert isinstance(layer, _BatchNorm)
    layer.running_mean, layer.running_var = statistics


def biased_moments(x: Tensor) -> Moments:
    """Return mean and biased variance per channel of a layer's input."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares of halves overflow
    variance, mean = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], correction=0)
    return mean, variance


def mixed(own: Moments, batch: Moments, part: float) -> Moments:
    """Move moments a part of the way to those of a batch."""
    mean, variance = own
    return mean.lerp(batch[0].to(mean), part), variance.lerp(batch[1].to(mean), part)


def refuse_not_finite(statistics: list[Moments]) -> None:
    """Refuse statistics of a batch that are not finite."""
    if not all_finite(t for moments in statistics for t in moments):
        raise NotFiniteError(
            "the batch's normalisation statistics are not finite: its values are too large for this model"
        )


@contextmanager
def replacing_statistics(
    model: nn.Module, choose: Callable[[_BatchNorm, Moments, Tensor], Statistics]
) -> Iterator[None]:
    """Let `choose(layer, own, x)` return the statistics for each call of a layer whose own statistics are `own`."""
    own = {layer: own_statistics(layer) for layer in batchnorms(model)}

    def replace(layer: _BatchNorm, args: tuple[Tensor, ...]) -> None:
        set_statistics(layer, choose(layer, own[layer], args[0].detach()))

    def put_back(layer: _BatchNorm, args: object, out: object) -> None:
        set_statistics(layer, own[layer])

    try:
        # Recomputation in backward stops inside of a layer, with an exception, once it has all it needs.
        with hooked(own, before=replace, after=put_back, always_call=True):
            yield
    finally:
        for layer in own:
            set_statistics(layer, own[layer])
