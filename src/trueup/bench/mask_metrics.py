"""What is measured of predicted masks: pure functions of boolean arrays, True inside a structure.

Empty structures: where prediction and truth are both empty, there is nothing to measure; Dice is undefined, the case
is skipped in the mean and counted as `empty`. Where the truth is empty and something is predicted, or the other way
round, Dice is 0. Distances are undefined if either mask is empty; the case is skipped in their means and counted as
`no_distance`, for a network that finds nothing would otherwise seem to be near. There is no smoothing constant.
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
    """2 |P ∩ G| / (|P| + |G|), 0..1; nan if both are empty."""
    _check(prediction, truth)
    both, sizes = np.count_nonzero(prediction & truth), np.count_nonzero(prediction) + np.count_nonzero(truth)
    return float(2 * both / sizes) if sizes else math.nan


def surface_distances(prediction: Region, truth: Region, spacing: Sequence[float]) -> tuple[Distances, Distances]:
    """How far each surface element of the prediction is from the truth's surface, and the reverse, in units of spacing.

    Masks are (H, W) or (Z, H, W). The surface is the elements inside that have one of their 4 or 6 neighbours outside;
    beyond the array is outside. To an empty mask the distance is infinite.
    """
    _check(prediction, truth, spacing)
    box = _box(prediction | truth)
    first, second = _surface(prediction[box]), _surface(truth[box])
    return _from_to(first, second, spacing), _from_to(second, first, spacing)


def hd95(prediction: Region, truth: Region, spacing: Sequence[float]) -> float:
    """95th percentile of the Hausdorff distance; nan if either mask is empty.

    The larger of the two directions' percentiles, as monai has it; medpy takes the percentile of both together.
    """
    return _hd95(*surface_distances(prediction, truth, spacing))


def assd(prediction: Region, truth: Region, spacing: Sequence[float]) -> float:
    """Average symmetric surface distance; nan if either mask is empty.

    The mean of the distances of both directions together, as monai has it; medpy takes the mean of the two means.
    """
    return _assd(*surface_distances(prediction, truth, spacing))


def vcdr(disc: Region, cup: Region) -> float:
    """Vertical cup-to-disc ratio of masks (H, W): rows that the cup spans by rows that the disc spans; nan if no disc.

    The disc is all of it, cup and rim.
    """
    _check(disc, cup)
    if disc.ndim != 2:
        raise ValueError(f"masks are {disc.shape}; a vertical ratio is of one image: (H, W)")
    tall, whole = _height(cup), _height(disc)
    return tall / whole if whole else math.nan


def measure_masks(
    predictions: Mapping[str, Region], truths: Mapping[str, Region], spacing: Sequence[float]
) -> dict[str, Values]:
    """Dice, hd95 and assd of each structure of one case, None where undefined: JSON has no nan.

    Masks are (Z, H, W), spacing is of slices, rows and columns. A case of one slice is measured in its plane: in space
    all of it would be surface.
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
        values = (dice_coefficient(prediction, truth), _hd95(*distances), _assd(*distances))
        result[name] = {key: None if math.isnan(v) else v for key, v in zip(MEASURES, values, strict=True)}
    return result


def summarize_cases(cases: Sequence[Mapping[str, Mapping[str, float | None]]]) -> dict[str, Any]:
    """Means over cases, then over structures; what is undefined is left out and counted.

    A structure's `cases` are those that name it, the skipped ones included. A structure that is undefined in every
    case is left out of the mean over structures.
    """
    if not cases:
        raise ValueError("there are no cases to sum up")
    names = dict.fromkeys(name for case in cases for name in case)
    each = {name: _structure([case[name] for case in cases if name in case]) for name in names}
    means = {key: _mean(values[key] for values in each.values()) for key in MEASURES}
    return {**means, "per_structure": each, "cases": len(cases)}


def _structure(cases: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Means over the cases of one structure."""
    return {
        **{key: _mean(case[key] for case in cases) for key in MEASURES},
        "cases": len(cases),
        "empty": sum(case["dice"] is None for case in cases),
        "no_distance": sum(case["hd95"] is None for case in cases),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are there; None if none is."""
    there = [value for value in values if value is not None]
    return fmean(there) if there else None


def _hd95(there: Distances, back: Distances) -> float:
    if not (there.size and back.size):
        return math.nan
    return float(max(np.percentile(there, 95), np.percentile(back, 95)))


def _assd(there: Distances, back: Distances) -> float:
    if not (there.size and back.size):
        return math.nan
    return float(np.concatenate([there, back]).mean())


def _surface(region: Region) -> Region:
    """Elements inside with a neighbour outside, where beyond the array is outside."""
    return np.asarray(region & ~ndimage.binary_erosion(region))


def _from_to(here: Region, other: Region, spacing: Sequence[float]) -> Distances:
    """The distance of each element of `here` to the nearest of `other`."""
    if not other.any():  # scipy would measure to a place that is not there
        return np.full(np.count_nonzero(here), np.inf)
    return np.asarray(ndimage.distance_transform_edt(~other, sampling=spacing)[here])


def _box(region: Region) -> tuple[slice, ...]:
    """The smallest box around a region: what lies beyond it is outside, as beyond the array, and changes nothing."""
    axes = range(region.ndim)
    spans = [np.flatnonzero(region.any(axis=tuple(a for a in axes if a != axis))) for axis in axes]
    return tuple(slice(span[0], span[-1] + 1) if span.size else slice(0) for span in spans)


def _height(region: Region) -> int:
    rows = _box(region)[0]
    return int(rows.stop - (rows.start or 0))


def _check(prediction: Region, truth: Region, spacing: Sequence[float] | None = None) -> None:
    """Before a number comes of it: uint8 masks and masks of other shapes would give one, and a wrong one."""
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
