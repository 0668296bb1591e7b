"""Input channels of a network: three or one, and their normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

NORMALIZE = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Mean and standard deviation of the three channels, for values from 0 to 1."""
MeanStd = tuple[tuple[float, ...], tuple[float, ...]]
Normalize = str | MeanStd  # a name from NORMALIZE, or mean and std: one number for all channels, or one each
LUMA = (19595, 38470, 7471)  # weights of red, green and blue in 1/65536, as in Pillow and ITU-R 601


@dataclass(frozen=True)
class Channels:
    """The channels of a network's input: (value - mean) / std, for values from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    grey: bool = False  # True for one channel, the luminance, instead of red, green and blue

    @property
    def count(self) -> int:
        """Return the number of channels."""
        return 1 if self.grey else 3

    def take(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Convert images (..., 3) to these channels; grey pixels keep their value bit by bit."""
        if not self.grey:
            return images
        grey = images @ np.array(LUMA, dtype=np.uint32) + np.uint32(2**15) >> 16
        return np.asarray(grey[..., None], dtype=np.uint8)


def make_channels(normalize: Normalize = "imagenet", grey: bool = False) -> Channels:
    """Return the channels of a normalisation; grey averages the three channels of a named one."""
    if isinstance(normalize, str):
        mean, std = NORMALIZE[normalize]
        if grey:
            return Channels((round(sum(mean) / 3, 6),), (round(sum(std) / 3, 6),), grey)
        return Channels(mean, std)
    if grey and len(normalize[0]) > 1:
        raise ValueError(f"mean and std have {len(normalize[0])} channels, but a grey network has one: give one number")
    return Channels(*normalize, grey)


def check_normalize(value: Any) -> Normalize:
    """Return a normalisation in canonical form: a name if there is one, one number if channels are equal."""
    if isinstance(value, str):
        if value not in NORMALIZE:
            raise ValueError(f"normalize={value!r} is not known: it must be {' or '.join(NORMALIZE)}, or mean and std")
        return value
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"normalize={value!r} must be {', '.join(NORMALIZE)}, or mean and std such as [[0.5], [0.25]]")
    mean, std = _numbers("mean", value[0]), _numbers("std", value[1])
    if not all(isfinite(v) for v in mean) or not all(isfinite(v) and v > 0 for v in std):
        raise ValueError(f"mean={list(mean)} must be finite, and std={list(std)} finite and above 0")
    if len(mean) != len(std):
        mean, std = (v * (3 // len(v)) for v in (mean, std))
    if len({*mean}) == len({*std}) == 1:
        mean, std = mean[:1], std[:1]
    whole = tuple(v * (3 // len(v)) for v in (mean, std))
    return next((name for name, known in NORMALIZE.items() if known == whole), (mean, std))


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    """Return one number or three as a tuple."""
    parts = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if len(parts) not in (1, 3) or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in parts):
        raise ValueError(f"{name}={value!r} must be one number, or three for red, green and blue")
    return tuple(float(v) for v in parts)
