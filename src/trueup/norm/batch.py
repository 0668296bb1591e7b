"""Statistics of the batch, or a mixture of the source's and the batch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.norm.base import Moments, Statistics, batchnorms, biased_moments, own_statistics, replacing_statistics
from trueup.norm.used_statistics import UsedStatistics, batch_moments


class BatchPolicy(UsedStatistics):
    """The statistics of the batch, through which the gradient flows."""

    compilable = True

    @property
    def graph_rows(self) -> int:
        """Return the fewest images for which every layer sees enough values."""
        return self.fewest

    def hooked(self, model: nn.Module) -> AbstractContextManager[None]:
        """Replace the layers' statistics call by call, and note those used in a forward that updates."""

        def choose(layer: _BatchNorm, own: Moments, x: Tensor) -> Statistics:
            statistics = self.statistics(own, x)
            if self.calls is not None:
                mean, variance = statistics
                used = batch_moments(x) if mean is None or variance is None else (mean, variance)
                self.calls.append((layer, *used, len(x)))
            return statistics

        return replacing_statistics(model, self.fewest, choose)

    def statistics(self, own: Moments, x: Tensor) -> Statistics:
        """Return what a layer normalises its input with."""
        return None, None

    @contextmanager
    def in_graph(self, model: nn.Module) -> Iterator[None]:
        """Let every layer use the batch's statistics; nothing is recorded."""
        own = {layer: own_statistics(layer) for layer in batchnorms(model)}
        for layer in own:
            layer.running_mean = layer.running_var = None
        try:
            yield
        finally:
            for layer, moments in own.items():
                layer.running_mean, layer.running_var = moments


class MixPolicy(BatchPolicy):
    """A mixture of the source's statistics and the batch's; the number is the batch's part.

    The gradient takes the statistics as constants.
    """

    default, largest, compilable = 0.1, 1.0, False

    def statistics(self, own: Moments, x: Tensor) -> Statistics:
        """Move from the source's statistics towards the batch's."""
        return moved(own, biased_moments(x), self.part(len(x)))

    def part(self, images: int) -> float:
        """Return the part of a batch of so many images."""
        return self.number


class PriorPolicy(MixPolicy):
    """A mixture in which the source's statistics count for a number of images (Schneider et al., 2020)."""

    default, largest = 16.0, 1e6

    def part(self, images: int) -> float:
        """Return the part of a batch of so many images."""
        return images / (images + self.number)


def moved(own: Moments, batch: Moments, part: float) -> Moments:
    """Move moments a part of the way to those of a batch."""
    mean, variance = own
    return mean.lerp(batch[0].to(mean), part), variance.lerp(batch[1].to(mean), part)
