"""Metrics of masks: pure functions of boolean arrays, True inside a structure.

If prediction and truth are both empty, Dice is undefined: the case is left out of the mean and counted as `empty`. If
one of them is empty, Dice is 0. Distances are undefined if either mask is empty: the case is left out of their means
and counted as `no_distance`, so that a network that finds nothing does not look good. There is no smoothing constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Region = NDArray[np.bool_]
Distances = NDArray[np.float64]
Values = dict[str, float | None]
MEASURES = ("dice", "hd95", "assd")


def dice_coefficient(prediction: Region, truth: Region) -> float:
    """Return 2 |P ∩ G| / (|P| + |G|), 0..1; nan if both are empty."""
    _check(prediction, truth)
    both, sizes = np.count_nonzero(prediction & truth), np.count_nonzero(prediction) + np.count_nonzero(truth)
    return float(2 * both / sizes) if sizes else math.nan


def surface_distances(prediction: Region, truth: Region, spacing: Sequence[float]) -> tuple[Distances, Distances]:
    """Return the distance of each surface element of the prediction to the truth's surface, and the reverse.

    Masks are (H, W) or (Z, H, W); distances are in units of spacing. Surface elements have one of their 4 or 6
    neighbours outside; beyond the array is outside. The distance to an empty mask is infinite.
    """
    _check(prediction, truth, spacing)
    box = _box(prediction | truth)
    first, second = _surface(prediction[box]), _surface(truth[box])
    return _from_to(first, second, spacing), _from_to(second, first, spacing)


def hd95(there: Distances, back: Distances) -> float:
    """Return the 95th percentile of the Hausdorff distance from surface distances; nan if either mask is empty.

    It is the larger percentile of the two directions, as in monai; medpy takes the percentile of both together.
    """
    if not (there.size and back.size):
        return math.nan
    return float(max(np.percentile(there, 95), np.percentile(back, 95)))


def assd(there: Distances, back: Distances) -> float:
    """Return the average symmetric surface distance from surface distances; nan if either mask is empty.

    It is the mean over both directions together, as in monai; medpy takes the mean of the two means.
    """
    if not (there.size and back.size):
        return math.nan
    return float(np.concatenate([there, back]).mean())


def vcdr(disc: Region, cup: Region) -> float:
    """Return the vertical cup-to-disc ratio of masks (H, W): rows of the cup by rows of the disc; nan without a disc.

    The disc mask includes the cup.
    """
    _check(disc, cup)
    if disc.ndim != 2:
        raise ValueError(f"masks are {disc.shape}; a vertical ratio is of one image: (H, W)")
    height = _height(disc)
    return _height(cup) / height if height else math.nan


def measure_masks(
    predictions: Mapping[str, Region], truths: Mapping[str, Region], spacing: Sequence[float]
) -> dict[str, Values]:
    """Return Dice, hd95 and assd of each structure of one case; None if undefined, as JSON has no nan.

    Masks are (Z, H, W), spacing is of slices, rows and columns. A case of one slice is measured in 2D: in 3D every
    element would be surface.
    """
    if predictions.keys() != truths.keys():
        raise ValueError(f"predicted are {sorted(predictions)}, but the truth has {sorted(truths)}: name them alike")
    result = {}
    for name, truth in truths.items():
        prediction = predictions[name]
        _check(prediction, truth, spacing)
        if truth.ndim != 3:
            raise ValueError(f"{name}: masks are {truth.shape}, not (Z, H, W)")
        if len(truth) == 1:
            distances = surface_distances(prediction[0], truth[0], spacing[1:])
        else:
            distances = surface_distances(prediction, truth, spacing)
        values = (dice_coefficient(prediction, truth), hd95(*distances), assd(*distances))
        result[name] = {key: None if math.isnan(v) else v for key, v in zip(MEASURES, values, strict=True)}
    return result


def summarize_cases(cases: Sequence[Mapping[str, Mapping[str, float | None]]]) -> dict[str, Any]:
    """Return means over cases, then over structures; undefined values are left out and counted.

    A structure's `cases` are those that name it, undefined ones included. A structure that is undefined in every case
    is left out of the mean over structures.
    """
    if not cases:
        raise ValueError("there are no cases to sum up")
    names = dict.fromkeys(name for case in cases for name in case)
    each = {name: _structure([case[name] for case in cases if name in case]) for name in names}
    means = {key: _mean(values[key] for values in each.values()) for key in MEASURES}
    return {**means, "per_structure": each, "cases": len(cases)}


def _structure(cases: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Return means over the cases of one structure."""
    return {
        **{key: _mean(case[key] for case in cases) for key in MEASURES},
        "cases": len(cases),
        "empty": sum(case["dice"] is None for case in cases),
        "no_distance": sum(case["hd95"] is None for case in cases),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else None


def _surface(region: Region) -> Region:
    """Return the elements with a neighbour outside; beyond the array is outside."""
    return np.asarray(region & ~ndimage.binary_erosion(region))


def _from_to(here: Region, other: Region, spacing: Sequence[float]) -> Distances:
    """Return the distance of each element of `here` to the nearest of `other`."""
    if not other.any():  # scipy would return meaningless distances
        return np.full(np.count_nonzero(here), np.inf)
    return np.asarray(ndimage.distance_transform_edt(~other, sampling=spacing)[here])


def _box(region: Region) -> tuple[slice, ...]:
    """Return the bounding box of a region."""
    boxes: list[tuple[slice, ...]] = ndimage.find_objects(region.astype(np.uint8))
    return boxes[0] if boxes else (slice(0, 0),) * region.ndim


def _height(region: Region) -> int:
    rows = _box(region)[0]
    return int(rows.stop - rows.start)


def _check(prediction: Region, truth: Region, spacing: Sequence[float] | None = None) -> None:
    """Refuse masks that are not boolean or differ in shape, which would give wrong numbers."""
    for mask in (prediction, truth):
        if mask.dtype != np.bool_:
            raise ValueError(f"a mask is of {mask.dtype}, not bool: compare it with the class, as in mask == 1")
    if prediction.shape != truth.shape:
        raise ValueError(f"masks are {prediction.shape} and {truth.shape}: bring them to one grid first")
    if spacing is None:
        return
    if truth.ndim not in (2, 3) or len(spacing) != truth.ndim:
        raise ValueError(f"spacing {tuple(spacing)} does not fit masks {truth.shape}: one per axis, of two or three")
    if not all(math.isfinite(step) and step > 0 for step in spacing):
        raise ValueError(f"spacing {tuple(spacing)} is not a size: give millimetres, or ones where it is unknown")
