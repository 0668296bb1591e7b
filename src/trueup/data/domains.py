"""A domain: images with labels that come from one place. Images are uint8 arrays (H, W, 3), read one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trueup.data.corruptions import CORRUPTIONS, corrupt
from trueup.data.pictures import AS_STORED, Reading, UnknownRangeError
from trueup.data.pictures import BrokenImageError as BrokenImageError
from trueup.data.pictures import Image as Image
from trueup.data.pictures import decode as decode

Labels = NDArray[np.int64]


class Domain(Protocol):
    """What every domain offers."""

    name: str
    labels: Labels

    def image(self, i: int, size: int | None = None) -> Image:
        """Image i, as it is or resized to size × size pixels; a BrokenImageError if it cannot be read."""
        ...

    def label_of(self, i: int) -> str:
        """What to call image i when speaking of it."""
        ...


class ArrayDomain:
    """Images that lie in one array (N, H, W, 3), in memory or mapped from a file."""

    def __init__(self, name: str, images: Image, labels: Labels) -> None:
        self.name, self.images, self.labels = name, images, labels

    def image(self, i: int, size: int | None = None) -> Image:
        """Row i of the array."""
        return _resized(np.asarray(self.images[i]), size)

    def label_of(self, i: int) -> str:
        """The number of the row."""
        return f"{self.name}[{i}]"


class FileDomain:
    """Images that are files below a folder."""

    def __init__(
        self, name: str, root: Path, files: Sequence[str], labels: Labels, reading: Reading = AS_STORED
    ) -> None:
        self.name, self.root, self.files, self.labels, self.reading = name, root, files, labels, reading

    def image(self, i: int, size: int | None = None) -> Image:
        """Decode file i as RGB."""
        try:
            return decode(self.root / self.files[i], size, self.reading)
        except UnknownRangeError as error:
            raise error.called(self.files[i]) from None

    def label_of(self, i: int) -> str:
        """The file's name below the root."""
        return self.files[i]


class CorruptedDomain:
    """Another domain, corrupted on the fly after resizing; each image always in the same way."""

    def __init__(self, base: Domain, corruption: str, severity: int, seed: int = 0) -> None:
        self.base, self.corruption, self.severity, self.seed = base, corruption, severity, seed
        self.name, self.labels = f"{corruption}-{severity}", base.labels

    def image(self, i: int, size: int | None = None) -> Image:
        """Image i of the base, corrupted."""
        return corrupt(self.base.image(i, size), self.corruption, self.severity, seed=self.seed, index=i)

    def label_of(self, i: int) -> str:
        """The base's name for it."""
        return self.base.label_of(i)


def parse_corruption(name: str) -> tuple[str, int]:
    """The corruption and severity that a domain's name means: "fog-3", or "fog" for severity 5."""
    corruption, dash, severity = name.partition("-")
    if corruption not in CORRUPTIONS or (dash and severity not in ("1", "2", "3", "4", "5")):
        raise ValueError(f"no domain is called {name!r}; there are NAME or NAME-SEVERITY: {', '.join(CORRUPTIONS)}")
    return corruption, int(severity or 5)


def _resized(image: Image, size: int | None) -> Image:
    if size is None or image.shape[:2] == (size, size):
        return image
    from PIL import Image as Pillow

    return np.asarray(Pillow.fromarray(image).resize((size, size), Pillow.Resampling.BILINEAR))
