"""Views of images: tensor in, tensor out. Chance comes from torch's random state, which is the adapter's own stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pixels:
    """How images were normalised before the model: (value - mean) / std of each channel, of values in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def unit(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) as values in [0, 1]."""
        mean, std = self._columns(x)
        return (x * std + mean).clamp(0, 1)

    def back(self, x: Tensor) -> Tensor:
        """Values in [0, 1] as the model takes them."""
        mean, std = self._columns(x)
        return (x.clamp(0, 1) - mean) / std

    def _columns(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[1] not in (len(self.mean), 1) and len(self.mean) > 1:
            raise ValueError(f"mean and std are of {len(self.mean)} channels, the images of {x.shape[1]}")
        mean, std = (torch.tensor(values, dtype=x.dtype, device=x.device) for values in (self.mean, self.std))
        return mean.reshape(1, -1, 1, 1), std.reshape(1, -1, 1, 1)


def pixels_of(mean: float | Sequence[float] | None, std: float | Sequence[float] | None) -> Pixels | None:
    """Mean and standard deviation as given to `adapt`: one number, or one for each channel; both or neither."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise ValueError("mean and std go together: give both, or neither")
    both = tuple((float(v),) if isinstance(v, int | float) else tuple(float(part) for part in v) for v in (mean, std))
    if len(both[0]) != len(both[1]) or not both[0]:
        raise ValueError(f"mean={mean!r} and std={std!r} must have a number for each channel, as many in both")
    if not all(abs(value) < 1e6 for value in both[0]) or not all(0 < value < 1e6 for value in both[1]):
        raise ValueError(f"mean={mean!r} must be numbers and std={std!r} numbers above 0")
    return Pixels(*both)
