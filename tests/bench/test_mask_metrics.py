"""Measures of masks against values worked out by hand, all pairs of surface elements, and monai."""

import itertools
import json
import math
import warnings
from types import ModuleType

import numpy as np
import pytest
from scipy import ndimage

from trueup.bench.mask_metrics import (
    Region,
    assd,
    dice_coefficient,
    hd95,
    measure_masks,
    summarize_cases,
    surface_distances,
    vcdr,
)

NOTHING = np.zeros((6, 7), dtype=bool)
LINE = np.ones((1, 21), dtype=bool)
POINT = np.arange(21)[None] == 0


@pytest.fixture(scope="module")
def monai() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import monai.metrics
    return monai.metrics


def block(shape: tuple[int, ...], *spans: tuple[int, int]) -> Region:
    """True from the first to the last of each span, both included."""
    region = np.zeros(shape, dtype=bool)
    region[tuple(slice(first, last + 1) for first, last in spans)] = True
    return region


def blob(shape: tuple[int, ...], seed: int, part: float = 0.3) -> Region:
    """A wobbly region of several pieces, some of which reach the border."""
    smooth = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=shape), 1.5)
    return np.asarray(smooth > np.quantile(smooth, 1 - part))


def surface_by_loops(region: Region) -> list[tuple[int, ...]]:
    inside = {tuple(int(i) for i in place) for place in np.argwhere(region)}
    steps = [s for s in itertools.product((-1, 0, 1), repeat=region.ndim) if sum(map(abs, s)) == 1]
    around = {p: [tuple(a + b for a, b in zip(p, s, strict=True)) for s in steps] for p in inside}
    return sorted(p for p in inside if not inside.issuperset(around[p]))


def all_pairs(prediction: Region, truth: Region, spacing: tuple[float, ...]) -> tuple[list[float], list[float]]:
    first, second = (
        [[i * step for i, step in zip(p, spacing, strict=True)] for p in surface_by_loops(region)]
        for region in (prediction, truth)
    )
    there = [min(math.dist(p, q) for q in second) for p in first]
    back = [min(math.dist(p, q) for q in first) for p in second]
    return there, back


BLOBS = [
    ((17, 23), (1.0, 1.0), 0),
    ((17, 23), (0.4, 2.5), 1),
    ((30, 12), (3.0, 0.7), 2),
    ((7, 12, 11), (1.0, 1.0, 1.0), 3),
    ((6, 13, 12), (4.0, 0.6, 0.6), 4),
    ((9, 10, 8), (0.5, 1.5, 2.0), 5),
]


def test_shifted_squares_by_hand() -> None:
    prediction = block((8, 8), (2, 5), (2, 5))
    across, down = block((8, 8), (2, 5), (3, 6)), block((8, 8), (3, 6), (2, 5))
    spacing = (2.0, 0.5)
    assert dice_coefficient(prediction, across) == dice_coefficient(prediction, down) == 24 / 32
    # Across: the left column of four and the two that lie within the other square are half a unit away.
    assert assd(*surface_distances(prediction, across, spacing)) == pytest.approx(6 * 0.5 / 12)
    assert hd95(*surface_distances(prediction, across, spacing)) == pytest.approx(0.5)
    # Down: a row of four is 2 away, and the two within are half a unit from the other's sides, not 2 from its bottom.
    assert assd(*surface_distances(prediction, down, spacing)) == pytest.approx((4 * 2 + 2 * 0.5) / 12)
    assert hd95(*surface_distances(prediction, down, spacing)) == pytest.approx(2.0)


def test_shifted_cubes_by_hand() -> None:
    prediction, truth = block((4, 5, 5), (0, 2), (1, 3), (1, 3)), block((4, 5, 5), (1, 3), (1, 3), (1, 3))
    assert dice_coefficient(prediction, truth) == pytest.approx(2 / 3)
    # Of 26 at the surface, nine are a slice away, and the middle of the last slice is beside the other's walls.
    assert assd(*surface_distances(prediction, truth, (3.0, 1.0, 1.0))) == pytest.approx((9 * 3 + 1) / 26)
    assert hd95(*surface_distances(prediction, truth, (3.0, 1.0, 1.0))) == pytest.approx(3.0)


def test_the_two_directions_differ_and_each_counts() -> None:
    there, back = surface_distances(POINT, LINE, (1.0, 1.0))
    assert there.tolist() == [0.0]
    assert back.tolist() == list(range(21))
    for masks in ((POINT, LINE), (LINE, POINT)):
        distances = surface_distances(*masks, (1.0, 1.0))
        assert hd95(*distances) == pytest.approx(19.0)  # of both together it would be 18.95
        assert assd(*distances) == pytest.approx(210 / 22)  # the mean of the means would be 5


def test_beyond_the_array_is_outside() -> None:
    full = np.ones((5, 5), dtype=bool)
    there, back = surface_distances(full, block((5, 5), (2, 2), (2, 2)), (1.0, 1.0))
    assert sorted(there) == pytest.approx([2.0] * 4 + [math.sqrt(5)] * 8 + [math.sqrt(8)] * 4)
    assert back.tolist() == [2.0]


def test_corners_alone_do_not_make_a_surface() -> None:
    notched = np.ones((5, 5), dtype=bool)
    notched[0, 0] = False  # (1, 1) touches it by a corner only
    there, _ = surface_distances(notched, notched, (1.0, 1.0))
    assert len(there) == 15


@pytest.mark.parametrize(("shape", "spacing", "seed"), BLOBS)
def test_distances_equal_all_pairs(shape: tuple[int, ...], spacing: tuple[float, ...], seed: int) -> None:
    prediction, truth = blob(shape, seed), blob(shape, seed + 100, part=0.2)
    expected = all_pairs(prediction, truth, spacing)
    for values, wanted in zip(surface_distances(prediction, truth, spacing), expected, strict=True):
        assert values.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(("shape", "spacing", "seed"), BLOBS)
@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy:FutureWarning")  # monai's own call of its own option
@pytest.mark.parametrize("inner", [False, True], ids=["at the border", "far from it"])
def test_measures_equal_those_of_monai(
    monai: ModuleType, shape: tuple[int, ...], spacing: tuple[float, ...], seed: int, inner: bool
) -> None:
    import torch

    prediction, truth = blob(shape, seed), blob(shape, seed + 100, part=0.2)
    if inner:
        prediction, truth = np.pad(prediction, 4), np.pad(truth, 4)
    else:
        within = (slice(1, -1),) * len(shape)
        assert all(mask.sum() > mask[within].sum() for mask in (prediction, truth))
    pair = [torch.from_numpy(mask)[None, None] for mask in (prediction, truth)]
    distances = surface_distances(prediction, truth, spacing)
    ours = (dice_coefficient(prediction, truth), hd95(*distances), assd(*distances))
    theirs = (
        monai.compute_dice(*pair),
        monai.compute_hausdorff_distance(*pair, include_background=True, percentile=95, spacing=spacing),
        monai.compute_average_surface_distance(*pair, include_background=True, symmetric=True, spacing=spacing),
    )
    assert ours == pytest.approx(tuple(value.item() for value in theirs), rel=1e-5)


def test_equal_masks_are_at_no_distance() -> None:
    region = blob((5, 9, 8), seed=9)
    assert dice_coefficient(region, region) == 1.0
    distances = surface_distances(region, region, (3.0, 1.0, 1.0))
    assert hd95(*distances) == assd(*distances) == 0.0


def test_masks_that_do_not_meet_have_no_overlap_but_a_distance() -> None:
    left, right = block((4, 9), (1, 2), (0, 0)), block((4, 9), (1, 2), (7, 7))
    assert dice_coefficient(left, right) == 0.0
    distances = surface_distances(left, right, (1.0, 0.5))
    assert hd95(*distances) == assd(*distances) == 3.5


@pytest.mark.parametrize("there", [(False, False), (False, True), (True, False)])
def test_empty_masks(there: tuple[bool, bool]) -> None:
    some = block((6, 7), (1, 3), (2, 4))
    prediction, truth = (some if is_there else NOTHING for is_there in there)
    assert dice_coefficient(prediction, truth) == pytest.approx(0.0 if any(there) else math.nan, nan_ok=True)
    distances = surface_distances(prediction, truth, (1.0, 1.0))
    assert math.isnan(hd95(*distances))
    assert math.isnan(assd(*distances))
    forth, back = surface_distances(prediction, truth, (1.0, 1.0))
    assert forth.tolist() == ([math.inf] * 8 if there[0] else [])
    assert back.tolist() == ([math.inf] * 8 if there[1] else [])


def test_cup_to_disc_ratio() -> None:
    disc = block((20, 30), (3, 14), (2, 27))
    cup = block((20, 30), (5, 10), (10, 11)) | block((20, 30), (8, 13), (3, 3))
    assert vcdr(disc, cup) == 9 / 12  # rows, not columns; from the first to the last
    disc[7] = False  # a gap does not make it smaller
    assert vcdr(disc, cup) == 9 / 12
    assert vcdr(disc, np.zeros_like(disc)) == 0.0
    assert math.isnan(vcdr(np.zeros_like(disc), cup))
    assert math.isnan(vcdr(np.zeros_like(disc), np.zeros_like(disc)))


def test_a_case_is_measured_structure_by_structure() -> None:
    prediction, truth = block((4, 5, 5), (0, 2), (1, 3), (1, 3)), block((4, 5, 5), (1, 3), (1, 3), (1, 3))
    none = np.zeros_like(truth)
    predictions = {"none": none, "lv": prediction, "missed": none, "invented": prediction}
    truths = {"lv": truth, "missed": truth, "invented": none, "none": none}
    result = measure_masks(predictions, truths, (3.0, 1.0, 1.0))
    assert result == {
        "lv": {"dice": pytest.approx(2 / 3), "hd95": pytest.approx(3.0), "assd": pytest.approx(28 / 26)},
        "missed": {"dice": 0.0, "hd95": None, "assd": None},
        "invented": {"dice": 0.0, "hd95": None, "assd": None},
        "none": {"dice": None, "hd95": None, "assd": None},
    }
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert {type(v) for values in result.values() for v in values.values()} == {float, type(None)}


def test_one_slice_is_measured_in_its_plane() -> None:
    prediction, truth = block((8, 8), (2, 5), (2, 5)), block((8, 8), (3, 6), (2, 5))
    result = measure_masks({"disc": prediction[None]}, {"disc": truth[None]}, (9.0, 2.0, 0.5))
    # In space every element would be at the surface, and the two within the other square would be at no distance.
    assert result == {"disc": {"dice": 0.75, "hd95": pytest.approx(2.0), "assd": pytest.approx(9 / 12)}}


def test_summary_is_over_cases_then_structures() -> None:
    cases = [
        {
            "lv": {"dice": 0.9, "hd95": 2.0, "assd": 1.0},
            "rv": {"dice": 0.5, "hd95": 8.0, "assd": 4.0},
            "scar": {"dice": None, "hd95": None, "assd": None},
        },
        {
            "lv": {"dice": 0.7, "hd95": 4.0, "assd": 2.0},
            "rv": {"dice": 0.0, "hd95": None, "assd": None},
            "scar": {"dice": None, "hd95": None, "assd": None},
        },
        {
            "lv": {"dice": 0.8, "hd95": 3.0, "assd": 0.0},
            "rv": {"dice": None, "hd95": None, "assd": None},
            "scar": {"dice": None, "hd95": None, "assd": None},
        },
    ]
    result = summarize_cases(cases)
    assert result["per_structure"] == {
        "lv": {"dice": pytest.approx(0.8), "hd95": 3.0, "assd": 1.0, "cases": 3, "empty": 0, "no_distance": 0},
        "rv": {"dice": 0.25, "hd95": 8.0, "assd": 4.0, "cases": 3, "empty": 1, "no_distance": 2},
        "scar": {"dice": None, "hd95": None, "assd": None, "cases": 3, "empty": 3, "no_distance": 3},
    }
    assert result["dice"] == pytest.approx((0.8 + 0.25) / 2)  # over all five at once it would be 0.58
    assert (result["hd95"], result["assd"], result["cases"]) == (5.5, 2.5, 3)
    json.dumps(result, allow_nan=False)


def test_summary_of_nothing_but_empty_structures_is_none() -> None:
    result = summarize_cases([{"rv": {"dice": None, "hd95": None, "assd": None}}])
    assert (result["dice"], result["hd95"], result["assd"], result["cases"]) == (None, None, None, 1)


def test_summary_counts_the_cases_that_name_a_structure() -> None:
    values = {"dice": 0.5, "hd95": 1.0, "assd": 1.0}
    result = summarize_cases([{"lv": values}, {"lv": values, "rv": values}])
    assert [result["per_structure"][name]["cases"] for name in ("lv", "rv")] == [2, 1]


def test_what_would_give_a_wrong_number_is_refused() -> None:
    square, volume = block((4, 4), (1, 2), (1, 2)), block((2, 4, 4), (0, 1), (1, 2), (1, 2))
    with pytest.raises(ValueError, match="uint8, not bool"):
        dice_coefficient(square.astype(np.uint8), square)
    with pytest.raises(ValueError, match=r"\(4, 4\) and \(1, 4\)"):
        dice_coefficient(square, square[:1])
    with pytest.raises(ValueError, match="does not fit"):
        hd95(*surface_distances(square, square, (1.0, 1.0, 1.0)))
    with pytest.raises(ValueError, match="does not fit"):
        hd95(*surface_distances(square[0], square[0], (1.0,)))
    for step in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="is not a size"):
            assd(*surface_distances(square, square, (1.0, step)))
    with pytest.raises(ValueError, match="of one image"):
        vcdr(volume, volume)
    with pytest.raises(ValueError, match=r"lv: masks are .* not .Z, H, W."):
        measure_masks({"lv": square}, {"lv": square}, (1.0, 1.0))
    with pytest.raises(ValueError, match="name them alike"):
        measure_masks({"lv": volume}, {"rv": volume}, (1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="no cases"):
        summarize_cases([])
