"""Domains: labelled images of one kind. Images are uint8 arrays (H, W, 3), read one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trueup.data.corruptions import CORRUPTIONS, corrupt
from trueup.data.pictures import AS_STORED, PictureInfo, Reading, decode, inspect_picture, resize_pixels
from trueup.data.pictures import BrokenImageError as BrokenImageError
from trueup.data.pictures import Image as Image

Labels = NDArray[np.int64]


class Domain(Protocol):
    """The interface of every domain."""

    name: str
    labels: Labels

    def image(self, i: int, size: int | None = None) -> Image:
        """Return image i, optionally resized to size × size; raise a BrokenImageError if it cannot be read."""
        ...

    def image_name(self, i: int) -> str:
        """Return a name of image i for messages."""
        ...


class ArrayDomain:
    """Images in one array (N, H, W, 3), in memory or mapped from a file."""

    def __init__(self, name: str, images: Image, labels: Labels) -> None:
        self.name, self.images, self.labels = name, images, labels

    def image(self, i: int, size: int | None = None) -> Image:
        """Return row i of the array."""
        return resize_pixels(np.asarray(self.images[i]), size)

    def image_name(self, i: int) -> str:
        """Return the domain's name with the number of the row."""
        return f"{self.name}[{i}]"


class FileDomain:
    """Image files below a folder."""

    def __init__(
        self, name: str, root: Path, files: Sequence[str], labels: Labels, reading: Reading = AS_STORED
    ) -> None:
        self.name, self.root, self.files, self.labels, self.reading = name, root, files, labels, reading

    def image(self, i: int, size: int | None = None) -> Image:
        """Decode file i as RGB."""
        return decode(self.root / self.files[i], size, self.reading, self.files[i])

    def inspect(self, i: int) -> PictureInfo:
        """Inspect file i; raise an error if a network cannot see it."""
        return inspect_picture(self.root / self.files[i], self.reading.range, self.files[i])

    def image_name(self, i: int) -> str:
        """Return the file's path below the root."""
        return self.files[i]


class CorruptedDomain:
    """Another domain, corrupted on the fly after resizing, deterministically per image."""

    def __init__(self, base: Domain, corruption: str, severity: int, seed: int = 0) -> None:
        self.base, self.corruption, self.severity, self.seed = base, corruption, severity, seed
        self.name, self.labels = f"{corruption}-{severity}", base.labels

    def image(self, i: int, size: int | None = None) -> Image:
        """Return image i of the base domain, corrupted."""
        return corrupt(self.base.image(i, size), self.corruption, self.severity, seed=self.seed, index=i)

    def image_name(self, i: int) -> str:
        """Return the base domain's name of the image."""
        return self.base.image_name(i)


def parse_corruption(name: str) -> tuple[str, int]:
    """Parse "fog-3" into corruption and severity; "fog" means severity 5."""
    corruption, dash, severity = name.partition("-")
    if corruption not in CORRUPTIONS or (dash and severity not in ("1", "2", "3", "4", "5")):
        raise ValueError(f"no domain is called {name!r}; use NAME or NAME-SEVERITY with: {', '.join(CORRUPTIONS)}")
    return corruption, int(severity or 5)
