"""Normalisation policies: their base, the source's statistics, and those of the batch, pure or mixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.finite import NotFiniteError, all_finite

# A segmenter's layer that sees fewer values per channel than this keeps the source's statistics: DeepLab pools a whole
# image into one value, and the deviation of a batch of few such values is noise.
FEWEST = 16

Moments = tuple[Tensor, Tensor]  # mean and variance per channel
Statistics = tuple[Tensor | None, Tensor | None]  # the same; (None, None) are those of the batch, computed by torch
DECAY = 0.9  # weight of earlier images after a batch of WHOLE images; closer to 1 after a smaller one
WHOLE = 64
PART = 2**18  # values whose squares are summed at a time: few enough for a processor's cache
Call = tuple[Tensor, Tensor, int]  # the mean and variance that a layer used, and the number of images


class NormPolicy(nn.Module):
    """The statistics that BatchNorm layers of a model in eval mode normalise with: here the layers' own.

    A policy is active for a whole batch, forward and backward, so that activations that are recomputed in backward
    see the same statistics. Each forward updates what the policy remembers or only reads it. Estimates that answers
    depend on are in the layers' own buffers; the buffers of this module are all else that is remembered.
    """

    default: float | None = None  # of the number in "name:number"; None if the policy has no number
    largest = 1e6  # of that number
    remembers = False  # answers depend on earlier batches
    compilable = False  # the model may be compiled
    recomputable = True  # activations may be recomputed in backward
    moves_in_forward = False  # a layer that runs twice in a forward has other statistics the second time
    two_passes = False  # the pass that answers is not the one to learn from
    fewest_to_learn = 1  # images that the second pass needs

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
        """Forget all batches; the model must have the source's weights.

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

    def by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """Return, for `unwrap()`, statistics that were used and are not in the layers' buffers; under their names."""
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to its device and to higher precision, never to lower."""
        return super()._apply(never_narrower(fn), recurse)  # type: ignore[no-any-return, no-untyped-call]

    def few(self, x: Tensor) -> bool:
        """Return True if a layer sees too few values for statistics of its own: one value has no variance."""
        return x.numel() < self.fewest * x.shape[1]

    @contextmanager
    def having(self, **flags: Any) -> Iterator[None]:
        """Set flags within the block: `frozen`, `centred`, `learning`."""
        before = {name: getattr(self, name) for name in flags}
        vars(self).update(flags)
        try:
            yield
        finally:
            vars(self).update(before)


class SourcePolicy(NormPolicy):
    """The statistics of the source model."""

    compilable = True


class BatchPolicy(NormPolicy):
    """The statistics of the batch, through which the gradient flows.

    It records the moments used, pooled over batches. With w images so far, n new ones, r = n / (k w + n), where k = 0.9
    to the power of min(1, n / 64), and d the distance of the means: mean += r d, and variance = (1 - r) variance
    + r (new variance + (1 - r) d²), the variance of the mixture. No answer depends on the record.
    """

    compilable = True
    mean: Tensor
    variance: Tensor
    images: Tensor
    _sizes: Sequence[int] = ()  # channels of the layers

    def statistics(self, own: Moments, x: Tensor) -> Statistics:
        """Return what a layer normalises its input with."""
        return None, None

    def following(self, model: nn.Module) -> AbstractContextManager[None]:
        """Replace the layers' statistics call by call, and note those used in a forward that updates."""

        def choose(layer: _BatchNorm, own: Moments, x: Tensor) -> Statistics:
            if self.few(x):
                return own
            mean, variance = self.statistics(own, x)
            if self.seen is not None:
                used = batch_moments(x) if mean is None or variance is None else (mean, variance)
                self.seen.setdefault(layer, []).append((*used, len(x)))
            return mean, variance

        return replacing_statistics(model, choose)

    @contextmanager
    def in_graph(self, model: nn.Module) -> Iterator[None]:
        """Let every layer use the batch's statistics; nothing is recorded."""
        own = {layer: own_statistics(layer) for layer in batchnorms(model)}
        for layer in own:
            set_statistics(layer, (None, None))
        try:
            yield
        finally:
            for layer in own:
                set_statistics(layer, own[layer])

    def restart(self, model: nn.Module, **task: Any) -> None:
        """Start an empty record."""
        super().restart(model, **task)
        layers = batchnorms(model)
        self._sizes = [layer.num_features for layer in layers]
        like = own_statistics(layers[0])[0] if layers else torch.empty(0)
        dtype = torch.promote_types(like.dtype, torch.float32)
        for name in ("mean", "variance", "images"):
            self.register_buffer(name, torch.zeros(sum(self._sizes), dtype=dtype, device=like.device))

    @torch.no_grad()
    def remember(self, model: nn.Module, seen: dict[_BatchNorm, list[Call]]) -> None:
        """Record the calls of one forward; a layer that ran several times counts as often."""
        if not self._buffers:  # a model without an adapter
            return
        calls = [list(seen.get(layer, ())) for layer in batchnorms(model)]
        zeros = [self.mean.new_zeros(size) for size in self._sizes]
        while any(calls):
            now = [each.pop(0) if each else (zero, zero, 0) for each, zero in zip(calls, zeros, strict=True)]
            counts = [call[2] for call in now]
            if len(set(counts)) == 1:  # a tensor that needs no copy from the host
                images = torch.full_like(self.images, counts[0])
            else:
                images = torch.tensor(counts).repeat_interleave(torch.tensor(self._sizes)).to(self.images)
            means, variances = [call[0].to(self.mean) for call in now], [call[1].to(self.mean) for call in now]
            self._pool(torch.cat(means), torch.cat(variances), images)

    def _pool(self, mean: Tensor, variance: Tensor, images: Tensor) -> None:
        """Add one batch; a channel that did not run, or whose moments are not finite, is left as it is."""
        fine = mean.isfinite() & variance.isfinite() & (images > 0)
        total = DECAY ** (images / WHOLE).clamp(max=1) * self.images + images
        rate = torch.where(fine, images / total, 0)
        away = torch.where(fine, mean - self.mean, 0)
        new = torch.where(fine, variance, 0) + (1 - rate) * away.square()
        self.mean.add_(rate * away)
        self.variance.copy_((1 - rate) * self.variance + rate * new)
        self.images.copy_(torch.where(fine, total, self.images))

    def by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the moments under the names of the layers' running statistics; of channels without, the layer's."""
        names = {layer: path for path, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
        found: dict[str, Tensor] = {}
        if not self._buffers:  # before the first batch
            return found
        parts = zip(*(t.split(self._sizes) for t in (self.mean, self.variance, self.images)), strict=True)
        for layer, (mean, variance, images) in zip(batchnorms(model), parts, strict=True):
            prefix = f"{names[layer]}." if names[layer] else ""
            for name, new in (("running_mean", mean), ("running_var", variance)):
                found[prefix + name] = torch.where(images > 0, new, getattr(layer, name).to(new))
        return found

    @property
    def empty(self) -> bool:
        """Return True if nothing was recorded although there are layers that could."""
        return bool(self._sizes) and not bool(self.images.any())


class MixPolicy(BatchPolicy):
    """A mixture of the source's statistics and the batch's, as constants; the number is the batch's part."""

    default, largest, compilable = 0.1, 1.0, False

    def statistics(self, own: Moments, x: Tensor) -> Statistics:
        """Move from the source's statistics towards the batch's."""
        return mix_moments(own, biased_moments(x), self.part(len(x)))

    def part(self, images: int) -> float:
        """Return the part of a batch of so many images."""
        return self.number


class PriorPolicy(MixPolicy):
    """A mixture in which the source's statistics count for a number of images (Schneider et al., 2020)."""

    default, largest = 16.0, 1e6

    def part(self, images: int) -> float:
        """Return the part of a batch of so many images."""
        return images / (images + self.number)


def never_narrower(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a conversion that does what `fn` does, except that it lowers no precision."""

    def convert(t: Tensor) -> Tensor:
        new = fn(t)
        return new if torch.promote_types(t.dtype, new.dtype) == new.dtype else t.to(new.device)

    return convert


def batchnorms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers of a model that have running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def own_statistics(layer: _BatchNorm) -> Moments:
    """Return the running statistics of a BatchNorm layer."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


def set_statistics(layer: _BatchNorm, statistics: Statistics) -> None:
    """Let a BatchNorm layer have these tensors for its running statistics."""
    layer.running_mean, layer.running_var = statistics


def biased_moments(x: Tensor) -> Moments:
    """Return mean and biased variance per channel of a layer's input."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares of halves overflow
    variance, mean = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], correction=0)
    return mean, variance


def mix_moments(own: Moments, batch: Moments, part: float) -> Moments:
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

    handles = [layer.register_forward_pre_hook(replace) for layer in own]
    # Recomputation in backward stops early, with an exception inside a layer.
    handles += [layer.register_forward_hook(put_back, always_call=True) for layer in own]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in own:
            set_statistics(layer, own[layer])


@torch.no_grad()
def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance per channel of a batch (N, C, ...), at least in float32.

    On a CPU by parts: `torch.var_mean` takes several times as long there.
    """
    dims, wide = [d for d in range(x.ndim) if d != 1], torch.promote_types(x.dtype, torch.float32)
    if x.device.type != "cpu":
        variance, mean = torch.var_mean(x.to(wide), dim=dims, correction=0)
        return mean, variance
    mean = x.mean(dim=dims, dtype=wide)
    middle, total = mean.view(1, -1, *[1] * (x.ndim - 2)), torch.zeros_like(mean)
    for part in x.split(max(1, PART * len(x) // x.numel())):
        total += (part - middle).square_().sum(dim=dims)
    return mean, total / (x.numel() // x.shape[1])
