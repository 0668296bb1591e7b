"""Volumes for 3-D networks: predictions of a sliding window, blended by MONAI.

A network sees one channel, (N, 1, X, Y, Z), with axes towards the patient's right, front and head (RAS), whatever the
order of the file, and voxels in their original size.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.data.channels import Channels
from trueup.data.pictures import Range
from trueup.data.volumes import Grid, read_volume

Window = tuple[int, int, int]
PERCENTILES = (1, 99)  # of a volume that become 0 and 1 by default


def read_ras(path: Path, limits: Range | None) -> tuple[NDArray[np.float32], Grid]:
    """Read a volume (X, Y, Z) in RAS order, and its grid; `limits`, or two of its percentiles, become 0 and 1."""
    scan = read_volume(path)
    values = scan.values.astype(np.float32)
    low, high = limits or (float(v) for v in np.percentile(values, PERCENTILES))
    scaled = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
    axes, against = _orientation(scan.grid)
    stored = scan.grid.store(scaled).reshape(scan.grid.shape_3d)
    return np.ascontiguousarray(np.flip(stored, against).transpose(np.argsort(axes))), scan.grid


def show_ras(values: NDArray[Any], grid: Grid) -> NDArray[Any]:
    """Return values (X, Y, Z) in RAS order as slices (Z, H, W)."""
    axes, against = _orientation(grid)
    return grid.show(np.flip(values.transpose(axes), against))


def predict_volume(
    values: NDArray[np.float32], predict: Callable[[Tensor], Tensor], channels: Channels, window: Window, *,
    overlap: float, batch: int, device: str,
) -> Tensor:  # fmt: skip
    """Return the blended logits (C, X, Y, Z) of a volume; `predict` is called once per batch of windows, in order.

    Windows beyond the edge of a small volume see zeros.
    """
    x = torch.from_numpy((values - np.float32(channels.mean[0])) / np.float32(channels.std[0]))
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
