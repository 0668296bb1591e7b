"""Volumes with masks that somebody has drawn on them: what their numbers mean, and how they lie on the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trueup.data.domains import BrokenImageError
from trueup.data.slices import Mask, Volume, field_of_view, window
from trueup.data.volumes import Grid, Scan, Values, read_volume, times


@dataclass(frozen=True)
class Coding:
    """What the numbers in a dataset's masks mean."""

    of: str
    """The dataset."""
    classes: Mapping[int, int]
    """The class of each number; others must not occur."""

    def decode(self, values: Values, name: str) -> Mask:
        """Numbers as classes; `name` is the file that is blamed for numbers that mean nothing."""
        mask, known = np.zeros(values.shape, dtype=np.uint8), np.zeros(values.shape, dtype=bool)
        for number, label in self.classes.items():
            # Scaled masks come as 0.99999.
            here = np.abs(values - number) < 1e-3 if values.dtype.kind == "f" else values == number
            mask[here] = label
            known |= here
        if not known.all():
            strange, right = np.unique(values[~known]), ", ".join(map(str, self.classes))
            some = ", ".join(f"{value:g}" for value in strange[:8]) + " ..." * (len(strange) > 8)
            raise BrokenImageError(f"{name}: values {some} are no labels of {self.of}; those are {right}")
        return mask


def on_image(drawn: Scan, grid: Grid, name: str) -> Values:
    """A mask (Z, H, W) as it lies on the image of this grid: voxel by voxel as stored, as many have lost their header.

    One that says it is stored another way round than its image is refused: nobody can tell which of the two is right.
    """
    if drawn.grid.full != grid.full:
        raise BrokenImageError(f"{name} has {times(drawn.grid.full)} voxels, its image {times(grid.full)}")
    if drawn.grid.said and drawn.grid.runs != grid.runs:
        raise BrokenImageError(f"{name} is stored another way round than its image: save it on the image's own grid")
    return grid.show(drawn.grid.store(drawn.values))


def read_labelled(image: Path, label: Path, coding: Coding, field: float, channel: int = 0) -> Volume:
    """A volume with its mask, seen through a square of `field` millimetres."""
    scan = read_volume(image, channel)
    drawn = read_volume(label)
    mask = coding.decode(on_image(drawn, scan.grid, label.name), label.name)
    _, height, width = scan.values.shape
    box = field_of_view(height, width, scan.spacing, field)
    return Volume(window(scan.values)[..., None], mask, scan.spacing, box)
