"""The base of all normalisation policies: when statistics are used, and when they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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

    default: float | None = None
    """The number in "name:number" if it is left out; None if the policy has no number."""
    largest = 1e6
    """The largest number allowed."""
    remembers = False
    """True if answers depend on earlier batches."""
    compilable = False
    """True if the model may be compiled."""
    recomputable = True
    """True if activations may be recomputed in backward."""
    moves_in_forward = False
    """True if a layer that runs twice in a forward has other statistics the second time."""
    two_passes = False
    """True if the pass that answers is not the one to learn from."""

    def __init__(self, norm: str, number: float) -> None:
        super().__init__()
        self.norm, self.number = norm, number
        self.fewest = 2  # values per channel that a layer must see to use the batch's statistics
        self.frozen = False  # no forward updates
        self.centred = False  # "instance" corrects towards the batch's moments instead of the estimates
        self.learning = False  # a second pass learns
        self._active = False

    @property
    def graph_rows(self) -> int:
        """Return the fewest images that a compiled model may be run with."""
        return 1

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
            with self.hooked(model):
                yield
        finally:
            self._active = False

    def hooked(self, model: nn.Module) -> AbstractContextManager[None]:
        """Register the policy's hooks for the time of a batch."""
        return nullcontext()

    def forward_pass(self, model: nn.Module, *, update: bool) -> AbstractContextManager[None]:
        """Surround one forward; with `update`, remember the batch if nothing is raised."""
        return self.active(model)

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


def own_statistics(layer: _BatchNorm) -> Moments:
    """Return a layer's running statistics."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


def biased_moments(x: Tensor) -> Moments:
    """Return mean and biased variance per channel of a layer's input."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares of halves overflow
    variance, mean = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], correction=0)
    return mean, variance


@contextmanager
def replacing_statistics(
    model: nn.Module, fewest: int, choose: Callable[[_BatchNorm, Moments, Tensor], Statistics]
) -> Iterator[None]:
    """Let `choose(layer, own, x)` return the statistics for each call of a layer whose own statistics are `own`.

    A layer that sees fewer than `fewest` values per channel keeps its own: one value has no variance. After each call,
    also one that fails, the layer has its own buffers again.
    """
    layers = batchnorms(model)
    own = {layer: own_statistics(layer) for layer in layers}

    def replace(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, _BatchNorm)
        x = args[0].detach()
        if x.numel() >= fewest * x.shape[1]:
            layer.running_mean, layer.running_var = choose(layer, own[layer], x)

    def put_back(layer: nn.Module, args: object, out: object) -> None:
        assert isinstance(layer, _BatchNorm)
        layer.running_mean, layer.running_var = own[layer]

    handles = [layer.register_forward_pre_hook(replace) for layer in layers]
    # Recomputation stops in the middle of a layer, with an exception, once it has all it needs.
    handles += [layer.register_forward_hook(put_back, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers:
            layer.running_mean, layer.running_var = own[layer]
