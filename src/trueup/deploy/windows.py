"""Volumes for 3-D networks: predictions of a sliding window, blended by MONAI.

A network sees one channel, (N, 1, X, Y, Z), with axes towards the patient's right, front and head (RAS), whatever the
order of the file, and voxels in their original size.
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
from trueup.deploy.folder_images import ImageFile

log = logging.getLogger("trueup")

Window = tuple[int, int, int]
PERCENTILES = (1, 99)  # of a volume that become 0 and 1 by default


@dataclass(frozen=True)
class LoadedVolume:
    """A volume that was read."""

    image: ImageFile
    stamp: list[int]
    values: NDArray[np.float32]
    """(X, Y, Z) in RAS order, from 0 to 1."""
    grid: Grid

    def write(self, masks: NDArray[np.uint8]) -> None:
        """Write masks (files, X, Y, Z) in the voxel order of the file."""
        for path, mask in zip(self.image.masks, masks, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_mask(path, self.grid.show(_from_ras(mask, self.grid)), self.grid)


def load_volume(image: ImageFile, limits: Range | None) -> LoadedVolume:
    """Read a volume, scaled so that `limits`, or two of its percentiles, become 0 and 1, and clipped."""
    stamp = image.stamp()
    scan = read_volume(image.path)
    if (several := count_channels(image.path)) > 1:
        log.warning("%s holds %d volumes; the first is segmented", image.name, several)
    values = scan.values.astype(np.float32)
    low, high = limits or (float(v) for v in np.percentile(values, PERCENTILES))
    scaled = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
    return LoadedVolume(image, stamp, _to_ras(scan.grid.store(scaled), scan.grid), scan.grid)


def load_volumes(
    images: Sequence[ImageFile], limits: Range | None, broken: dict[str, str]
) -> Iterator[list[LoadedVolume]]:
    """Read volumes one by one; unreadable ones go to `broken`."""
    for image in images:
        try:
            yield [load_volume(image, limits)]
        except (BrokenImageError, OSError) as error:
            broken[image.name] = str(error)


def predict_volume(
    volume: LoadedVolume, predict: Callable[[Tensor], Tensor], channels: Channels, window: Window, *, overlap: float,
    batch: int, device: str,
) -> Tensor:  # fmt: skip
    """Return the blended logits (C, X, Y, Z) of a volume; `predict` is called once per batch of windows, in order.

    Windows beyond the edge of a small volume see zeros.
    """
    x = torch.from_numpy((volume.values - np.float32(channels.mean[0])) / np.float32(channels.std[0]))
    blend = sliding_window()
    logits: Tensor = blend(x[None, None], window, batch, predict, overlap=overlap, sw_device=device, device="cpu")[0]
    return logits


def sliding_window() -> Any:
    """Return MONAI's sliding window function."""
    try:
        return import_module("monai.inferers").sliding_window_inference
    except ImportError as error:
        raise ImportError("3-D networks on volumes need monai: pip install monai") from error


def _orientation(grid: Grid) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the RAS axis of each stored axis, and the stored axes that run against theirs."""
    found = import_module("nibabel").io_orientation(grid.affine)
    return tuple(int(axis) for axis in found[:, 0]), tuple(np.flatnonzero(found[:, 1] < 0).tolist())


def _to_ras(stored: NDArray[Any], grid: Grid) -> NDArray[Any]:
    """Return stored values in RAS order."""
    axes, against = _orientation(grid)
    return np.ascontiguousarray(np.flip(stored.reshape(grid.shape_3d), against).transpose(np.argsort(axes)))


def _from_ras(values: NDArray[Any], grid: Grid) -> NDArray[Any]:
    """Return values in RAS order as stored."""
    axes, against = _orientation(grid)
    return np.flip(values.transpose(axes), against)
