"""Whole volumes for 3-D networks: a window slides over each, and what it says of the windows is blended by MONAI.

A network sees one channel, (N, 1, X, Y, Z): axes towards the patient's right, front and head (RAS), whatever the order
of the file, and voxels as large as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.data.channels import Channels
from trueup.data.pictures import BrokenImageError, Range
from trueup.data.volumes import Grid, count_channels, read_volume, write_mask
from trueup.deploy.folder_images import Image

log = logging.getLogger("trueup")

Window = tuple[int, int, int]
PERCENTILES = (1, 99)  # of a volume, which are black and white where nobody says it


@dataclass(frozen=True)
class Solid:
    """A volume that was read."""

    image: Image
    stamp: list[int]
    values: NDArray[np.float32]
    """(X, Y, Z), towards right, front and head: from 0 to 1."""
    grid: Grid

    def write(self, masks: NDArray[np.uint8]) -> None:
        """Write (files, X, Y, Z) classes onto the voxels as they are stored."""
        for path, mask in zip(self.image.masks, masks, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_mask(path, self.grid.show(_from_patient(mask, self.grid)), self.grid)


def read_solid(image: Image, limits: Range | None) -> Solid:
    """Read a volume; `limits` become 0 and 1, or else two of its percentiles, and what lies beyond is clipped."""
    stamp = image.stamp()
    scan = read_volume(image.path)
    if (several := count_channels(image.path)) > 1:
        log.warning("%s holds %d volumes; the first is segmented", image.name, several)
    values = scan.values.astype(np.float32)
    low, high = limits or (float(v) for v in np.percentile(values, PERCENTILES))
    scaled = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
    return Solid(image, stamp, _to_patient(scan.grid.store(scaled), scan.grid), scan.grid)


def solids(images: Sequence[Image], limits: Range | None, broken: dict[str, str]) -> Iterator[list[Solid]]:
    """Read volumes one by one; those that cannot be read go to `broken`."""
    for image in images:
        try:
            yield [read_solid(image, limits)]
        except (BrokenImageError, OSError) as error:
            broken[image.name] = str(error)


def slide(
    solid: Solid, predict: Callable[[Tensor], Tensor], channels: Channels, window: Window, *, overlap: float,
    batch: int, device: str,
) -> Tensor:  # fmt: skip
    """Return the blended logits (C, X, Y, Z) of a volume; `predict` is asked once for each batch of windows, in order.

    Windows that reach beyond a small volume see zeros there.
    """
    x = torch.from_numpy((solid.values - np.float32(channels.mean[0])) / np.float32(channels.std[0]))
    blend = sliding_window()
    logits: Tensor = blend(x[None, None], window, batch, predict, overlap=overlap, sw_device=device, device="cpu")[0]
    return logits


def sliding_window() -> Any:
    """Return MONAI's function."""
    try:
        return import_module("monai.inferers").sliding_window_inference
    except ImportError as error:
        raise ImportError("monai slides the window of 3-D networks over volumes: pip install monai") from error


def _orientation(grid: Grid) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The patient's axis that each stored axis runs along, and which of the stored ones run against it."""
    found = import_module("nibabel").io_orientation(grid.affine)
    return tuple(int(axis) for axis in found[:, 0]), tuple(np.flatnonzero(found[:, 1] < 0).tolist())


def _to_patient(stored: NDArray[Any], grid: Grid) -> NDArray[Any]:
    """Values as stored, with axes towards right, front and head."""
    axes, against = _orientation(grid)
    return np.ascontiguousarray(np.flip(stored.reshape(grid.shape_3d), against).transpose(np.argsort(axes)))


def _from_patient(values: NDArray[Any], grid: Grid) -> NDArray[Any]:
    """The reverse."""
    axes, against = _orientation(grid)
    return np.flip(values.transpose(axes), against)
