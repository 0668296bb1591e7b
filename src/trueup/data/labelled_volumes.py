"""Volumes with masks: label coding, and alignment of a mask with its image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trueup.data.domains import BrokenImageError
from trueup.data.slices import Mask, Volume, field_of_view_box, window_to_uint8
from trueup.data.volumes import Grid, Scan, Values, format_shape, read_volume


@dataclass(frozen=True)
class LabelCoding:
    """The meaning of the numbers in a dataset's masks."""

    of: str  # the dataset's name
    classes: Mapping[int, int]  # the class of each number; other numbers are refused

    def decode(self, values: Values, name: str) -> Mask:
        """Convert numbers to classes; errors name the file `name`."""
        mask, known = np.zeros(values.shape, dtype=np.uint8), np.zeros(values.shape, dtype=bool)
        for number, label in self.classes.items():
            # Scaled masks hold values such as 0.99999.
            here = np.abs(values - number) < 1e-3 if values.dtype.kind == "f" else values == number
            mask[here] = label
            known |= here
        if not known.all():
            strange, right = np.unique(values[~known]), ", ".join(map(str, self.classes))
            some = ", ".join(f"{value:g}" for value in strange[:8]) + " ..." * (len(strange) > 8)
            raise BrokenImageError(f"{name}: values {some} are not labels of {self.of}; expected {right}")
        return mask


def align_mask(drawn: Scan, grid: Grid, name: str) -> Values:
    """Return a mask (Z, H, W) on the grid of its image, voxel by voxel as stored: many masks have lost their header.

    A mask whose header states another orientation than the image is refused: either may be wrong.
    """
    if drawn.grid.shape_3d != grid.shape_3d:
        raise BrokenImageError(
            f"{name} has {format_shape(drawn.grid.shape_3d)} voxels, its image {format_shape(grid.shape_3d)}"
        )
    if drawn.grid.has_orientation and drawn.grid.orientation != grid.orientation:
        raise BrokenImageError(f"{name} has another orientation than its image: save it on the image's grid")
    return grid.show(drawn.grid.store(drawn.values))


def read_labelled_volume(image: Path, label: Path, coding: LabelCoding, field: float, channel: int = 0) -> Volume:
    """Read a volume with its mask; networks see the middle square of `field` millimetres."""
    scan = read_volume(image, channel)
    drawn = read_volume(label)
    mask = coding.decode(align_mask(drawn, scan.grid, label.name), label.name)
    _, height, width = scan.values.shape
    box = field_of_view_box(height, width, scan.spacing, field)
    return Volume(window_to_uint8(scan.values)[..., None], mask, scan.spacing, box)
