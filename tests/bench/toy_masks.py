"""Masks, certain logits for them, and metrics by plain loops."""

import math
from typing import Any

import numpy as np
import pytest
import scans
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.bench.scorers import MaskScorer
from trueup.data.loading import ConcatDomains
from trueup.data.slices import Box, LabelledCase, SliceDomain, Volume, full_box

STRUCTURES = {"all": (1, 2), "core": (2,)}


Masks = dict[str, NDArray[np.bool_]]


def sure(mask: Any, channels: int = 3) -> Tensor:
    """Logits (C, H, W) of somebody who is certain of a mask."""
    return 40 * torch.nn.functional.one_hot(torch.as_tensor(np.asarray(mask, dtype=np.int64)), channels).movedim(-1, 0)


def case(
    name: str, mask: Any, box: Box | None = None, spacing: tuple[float, float, float] = (3.0, 1.0, 1.0)
) -> LabelledCase:
    masks = np.asarray(mask, dtype=np.uint8)
    image = np.zeros((*masks.shape, 1), dtype=np.uint8)
    made = Volume(image, masks, spacing, box or full_box(*masks.shape[1:]))
    return LabelledCase(name, len(masks), lambda: made)


def domain(name: str, *cases: LabelledCase) -> SliceDomain:
    return SliceDomain(name, cases)


def judged(place: ConcatDomains, answers: dict[int, Any], **options: Any) -> dict[str, Any]:
    """What a scorer says of answers to some slices, which come two by two."""
    scorer = MaskScorer(place, options.pop("structures", STRUCTURES), **options)
    order = list(answers)
    for start in range(0, len(order), 2):
        at = order[start : start + 2]
        scorer.take(torch.stack([torch.as_tensor(answers[i]).float() for i in at]), np.array(at))
    results = scorer.results()
    assert results["images"] == len(order)
    return results


def random_masks(seed: int, *shape: int) -> NDArray[np.uint8]:
    """Masks with blocks, so that all classes have a surface and an inside."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 3, size=(shape[0], *(-(-n // 3) for n in shape[1:])))
    return np.kron(small, np.ones((1, 3, 3), np.uint8))[:, : shape[1], : shape[2]].astype(np.uint8)


def brute(found: NDArray[np.uint8], truth: NDArray[np.uint8], spacing: tuple[float, ...]) -> dict[str, Any]:
    """Dice, HD95 and ASSD of each structure, pixel by pixel and pair by pair."""
    result = {}
    for name, part in STRUCTURES.items():
        a, b = np.isin(found, part), np.isin(truth, part)
        if len(a) == 1:
            a, b, steps = a[0], b[0], spacing[1:]
        else:
            steps = spacing
        edges = [[p for p in map(tuple, np.argwhere(m)) if outside(m, p)] for m in (a, b)]
        away = [[min(far(p, q, steps) for q in other) for p in one] for one, other in (edges, edges[::-1]) if other]
        hd95 = assd = None
        if all(edges):
            hd95 = max(float(np.percentile(d, 95)) for d in away)
            assd = sum(map(sum, away)) / sum(map(len, away))
        result[name] = {"dice": scans.dice(a, b), "hd95": hd95, "assd": assd}
    return result


def outside(mask: NDArray[np.bool_], at: tuple[int, ...]) -> bool:
    """Whether a neighbour of a pixel is outside the mask, or of the array."""
    for axis in range(mask.ndim):
        for step in (-1, 1):
            beside = (*at[:axis], at[axis] + step, *at[axis + 1 :])
            if not all(0 <= i < n for i, n in zip(beside, mask.shape, strict=True)) or not mask[beside]:
                return True
    return False


def far(p: tuple[int, ...], q: tuple[int, ...], steps: tuple[float, ...]) -> float:
    return math.sqrt(sum((s * (a - b)) ** 2 for a, b, s in zip(p, q, steps, strict=True)))


def near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in expected.items():
        for key, value in values.items():
            assert found[name][key] == (None if value is None else pytest.approx(value)), (name, key)
