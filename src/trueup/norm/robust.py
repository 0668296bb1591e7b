"""Running estimates that are robust to outliers and to frequent classes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.hooks import hooked
from trueup.norm.policy import Moments, NormPolicy, batchnorms, own_statistics, replacing_statistics

RATE = 0.1 / 64  # how far one image moves the estimates: 64 of them as far as a batch moves those of "ema"
ANCHOR = 0.1  # the source's part in the target of the estimates
LEAST = 16  # images that a batch needs to be learnt from with its own statistics
REACH = 4.0  # deviations from the estimates to which an image's moments are clipped
FAR = 9.0  # median absolute deviations from the others beyond which an image is an outlier
MEMORY = 64  # images over which the shares of classes are averaged
Rows = dict[_BatchNorm, Moments]  # mean and biased variance (N, C) of each image


class RobustPolicy(NormPolicy):
    """Running estimates in the layers' own buffers; this module holds the source's and the shares of classes.

    An image is normalised with the estimates as they stood before its batch, so the answer to it does not depend on
    the rest of the batch. Afterwards each image moves the estimates a little: less where its predicted class has been
    frequent, so that a run of one class does not drag them along, and never all the way from the source's. Learning
    takes a second pass, with the statistics of the batch's inliers.
    """

    remembers = True
    fewest_to_learn = LEAST
    shares: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rows: Rows = {}  # of the last forward that updated
        self._logits: Tensor | None = None  # of the same, until the estimates have learnt from it

    def restart(self, model: nn.Module, *, classes: int | None, dense: bool) -> None:
        """Forget all batches and take the model's statistics for the source's."""
        super().restart(model, classes=classes, dense=dense)
        self._rows, self._logits = {}, None
        count = classes or 0
        layers = batchnorms(model)
        self.two_passes = bool(layers)
        like = own_statistics(layers[0])[0] if layers else torch.empty(0)
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.register_buffer("shares", torch.full((count,), 1 / max(1, count), dtype=dtype, device=like.device))
        for i, layer in enumerate(layers):
            mean, variance = own_statistics(layer)
            self.register_buffer(f"mean{i}", mean.clone(), persistent=False)
            self.register_buffer(f"variance{i}", variance.clone(), persistent=False)

    def following(self, model: nn.Module) -> AbstractContextManager[None]:
        """Use the batch's statistics to learn; to answer, the estimates, and note the moments of each image."""
        if self.learning:
            return replacing_statistics(model, lambda layer, own, x: own if self.few(x) else (None, None))
        return hooked(batchnorms(model), before=self._note)

    def _note(self, layer: _BatchNorm, args: tuple[Tensor, ...]) -> None:
        if self.seen is not None:
            self.seen[layer] = row_moments(args[0])

    def remember(self, model: nn.Module, seen: Rows) -> None:
        """Keep the moments of each image until the estimates learn from them."""
        self._rows = seen

    def note_logits(self, logits: Tensor) -> None:
        """Take the logits of a forward that updates."""
        self._logits = logits

    def inlier_rows(self, n: int) -> Tensor:
        """Return a mask of the images of the last updating forward that may be learnt from."""
        return inlier_rows(self._rows, n)

    @torch.no_grad()
    def update_estimates(self, model: nn.Module) -> None:
        """Move the estimates towards the inliers of the last updating forward, unless a value is not finite."""
        rows, logits, self._rows, self._logits = self._rows, self._logits, {}, None
        if logits is None or not self._buffers or not bool((fit := inlier_rows(rows, len(logits))).any()):
            return
        n = len(logits)
        rows = {layer: (m[fit], v[fit]) if len(m) == n else (m, v) for layer, (m, v) in rows.items()}
        logits = logits[fit]
        weights = self._weights(logits)
        total = weights.sum()
        rate = 1 - (1 - RATE) ** total
        new = [self._moved(i, layer, rows, weights / total, rate) for i, layer in enumerate(batchnorms(model))]
        if not all(bool(t.isfinite().all()) for moments in new for t in moments):
            return
        for layer, moments in zip(batchnorms(model), new, strict=True):
            for estimate, value in zip(own_statistics(layer), moments, strict=True):
                estimate.copy_(value)
        if len(self.shares):
            self.shares.copy_(self._shares(logits))

    def _shares(self, logits: Tensor) -> Tensor:
        """Return how often each class was predicted lately, with this batch."""
        classes = torch.nn.functional.one_hot(logits.argmax(dim=1), logits.shape[1]).to(self.shares)
        return self.shares.lerp(classes.mean(dim=0), 1 - (1 - 1 / MEMORY) ** len(logits))

    def _weights(self, logits: Tensor) -> Tensor:
        """Weigh images of frequent classes less; all alike where an image has no single class."""
        if not len(self.shares):
            return self.shares.new_ones(len(logits))
        shares = self._shares(logits)
        return (1 / (len(shares) * shares[logits.argmax(dim=1)])).clamp(max=1)

    def _moved(self, i: int, layer: _BatchNorm, rows: Rows, weights: Tensor, rate: Tensor) -> Moments:
        """Return the moments of a mixture of a layer's estimates, the source's moments and the images'."""
        old = own_statistics(layer)
        if layer not in rows:  # it did not run
            return old
        mean, variance = _clipped(*(t.to(self.shares) for t in (*rows[layer], *old)))
        means = torch.stack([old[0].to(mean), self.get_buffer(f"mean{i}").to(mean), *mean.unbind()])
        variances = torch.stack([old[1].to(mean), self.get_buffer(f"variance{i}").to(mean), *variance.unbind()])
        if len(weights) != len(mean):  # a model that makes several rows of an image, or folds its frames into the batch
            weights = mean.new_full((len(mean),), 1 / len(mean))
        parts = torch.cat([torch.stack([1 - rate, rate * ANCHOR]), rate * (1 - ANCHOR) * weights]).unsqueeze(1)
        middle = (parts * means).sum(dim=0)
        return middle, (parts * (variances + (means - middle).square())).sum(dim=0)


def _clipped(mean: Tensor, variance: Tensor, middle: Tensor, spread: Tensor) -> Moments:
    """Clip moments of images to REACH deviations from the estimates: one outlier must not dominate."""
    spread = spread.clamp(min=float(spread.mean()))  # a channel that was hardly used may be used from now on
    reach = REACH * spread.sqrt()
    return mean.clamp(middle - reach, middle + reach), variance.clamp(max=REACH**2 * spread)


@torch.no_grad()
def inlier_rows(rows: Rows, n: int) -> Tensor:
    """Return a mask of the n images that are like the others in what the layers see; all, if they are too few to tell.

    An image is an outlier if in any layer its mean activations, or its variances, are farther from those of the batch
    than the median by FAR median absolute deviations, Images crafted to move the statistics of others are outliers.
    """
    layers = [moments for moments in rows.values() if len(moments[0]) == n]
    device = next(iter(rows.values()))[0].device if rows else torch.device("cpu")
    if n < LEAST or not layers:
        return torch.ones(n, dtype=torch.bool, device=device)
    away = []
    for mean, variance in layers:
        middle, spread = mean.median(dim=0).values, variance.mean(dim=0) + 1e-5
        away.append(((mean - middle).abs() / spread.sqrt()).mean(dim=1))
        away.append(((variance + 1e-5) / spread).log().abs().mean(dim=1))
    scores = torch.stack(away)
    above = scores - scores.median(dim=1, keepdim=True).values
    return (above <= FAR * above.abs().median(dim=1, keepdim=True).values.clamp(min=0.01)).all(dim=0)


def row_moments(x: Tensor) -> Moments:
    """Return mean and biased variance (N, C) of each image in a layer's input."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    x = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
    variance, mean = torch.var_mean(x, dim=2, correction=0)
    return mean, variance
