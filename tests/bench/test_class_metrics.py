"""Measures against values worked out by hand and against plain loops in exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest

from trueup.bench.scorers import (
    Indices,
    Probs,
    accuracy,
    calibration_error,
    measure_classes,
    negative_log_likelihood,
    per_class,
)

PROBS = np.array([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.9, 0.05, 0.05]])
LABELS = np.array([0, 1, 1, 0, 0])  # right, wrong, right, wrong, right; no image of class 2


def binned(confidence: list[float], right: list[bool], bins: int) -> float:
    """ECE by a loop over bins (b/bins, (b+1)/bins], the first closed on both sides."""
    total = Fraction(0)
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = [i for i, c in enumerate(confidence) if low < c <= high or (b == 0 and c == 0.0)]
        if inside:
            gap = sum(Fraction(int(right[i])) for i in inside) - sum(Fraction(confidence[i]) for i in inside)
            total += abs(gap)
    return float(total / len(confidence))


def two(confidence: list[float], right: list[bool]) -> tuple[Probs, Indices]:
    """Two classes; the first is predicted with this confidence (at least a half)."""
    return np.array([[c, 1 - c] for c in confidence]), np.array([0 if r else 1 for r in right])


def random(n: int, classes: int, seed: int) -> tuple[Probs, Indices]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, classes)) * 3
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return probs, rng.integers(classes, size=n)


def test_accuracy_is_the_part_that_is_right() -> None:
    assert accuracy(PROBS, LABELS) == 3 / 5


def test_accuracy_per_class_leaves_out_a_class_without_images() -> None:
    assert per_class(PROBS, LABELS, 3) == [pytest.approx(2 / 3), 0.5, None]


def test_macro_average_is_over_the_classes_that_have_images() -> None:
    assert measure_classes(PROBS, LABELS)["macro"] == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_calibration_error_of_five_images_by_hand() -> None:
    # Five bins of their own: (0.3, 0.5] would be one with fewer bins.
    gaps = [abs(1 - 0.7), 0.5, abs(1 - 0.8), 0.4, abs(1 - 0.9)]
    assert calibration_error(PROBS, LABELS) == pytest.approx(sum(gaps) / 5)


def test_calibration_error_lets_errors_of_one_bin_cancel() -> None:
    assert calibration_error(*two([0.75, 0.75, 0.75, 0.75], [True, True, True, False])) == pytest.approx(0.0)


@pytest.mark.parametrize("k", range(8, 16))
def test_confidence_on_a_border_belongs_to_the_bin_below(k: int) -> None:
    confidence = [k / 15, k / 15 - 1 / 30]  # the border, and the middle of the bin below
    right = [True, False]
    assert calibration_error(*two(confidence, right)) == pytest.approx(abs(1 - sum(confidence)) / 2)
    if k < 15:
        above = [k / 15, k / 15 + 1 / 30]  # in another bin: the gaps add up
        assert calibration_error(*two(above, right)) == pytest.approx((1 - above[0] + above[1]) / 2)


@pytest.mark.parametrize(("right", "error"), [(True, 0.0), (False, 1.0)])
def test_full_confidence_is_in_the_last_bin(right: bool, error: float) -> None:
    assert calibration_error(*two([1.0], [right])) == error


@pytest.mark.parametrize(("classes", "bins", "seed"), [(2, 15, 0), (5, 15, 1), (10, 15, 2), (3, 1, 3), (4, 7, 4)])
def test_calibration_error_equals_a_plain_loop(classes: int, bins: int, seed: int) -> None:
    probs, labels = random(300, classes, seed)
    confidence = [max(row) for row in probs.tolist()]
    right = [row.index(max(row)) == y for row, y in zip(probs.tolist(), labels.tolist(), strict=True)]
    assert calibration_error(probs, labels, bins) == pytest.approx(binned(confidence, right, bins), abs=1e-12)


def test_many_classes_with_little_confidence_are_in_the_first_bin() -> None:
    probs = np.full((2, 100), 0.01)
    assert calibration_error(probs, np.array([0, 5])) == pytest.approx(abs(1 - 0.02) / 2)


def test_likelihood_equals_a_plain_loop() -> None:
    probs, labels = random(200, 6, seed=5)
    by_hand = math.fsum(-math.log(row[y]) for row, y in zip(probs.tolist(), labels.tolist(), strict=True)) / 200
    assert negative_log_likelihood(probs, labels) == pytest.approx(by_hand, abs=1e-12)


def test_probability_zero_of_the_right_class_is_finite() -> None:
    probs = np.array([[1.0, 0.0], [0.5, 0.5]])
    expected = (-math.log(1e-12) + math.log(2)) / 2
    assert negative_log_likelihood(probs, np.array([1, 0])) == pytest.approx(expected)


def test_one_image_has_all_measures() -> None:
    assert measure_classes(np.array([[0.25, 0.75]]), np.array([1])) == {
        "accuracy": 1.0,
        "macro": 1.0,
        "per_class": [None, 1.0],
        "ece": pytest.approx(0.25),
        "nll": pytest.approx(-math.log(0.75)),
        "images": 1,
    }


def test_measures_do_not_depend_on_the_order_of_images() -> None:
    probs, labels = random(150, 4, seed=6)
    order = np.random.default_rng(7).permutation(150)
    first, second = measure_classes(probs, labels), measure_classes(probs[order], labels[order])
    assert first.pop("per_class") == pytest.approx(second.pop("per_class"))
    assert first == pytest.approx(second)


def test_measures_are_plain_numbers_that_json_can_hold() -> None:
    values = measure_classes(*random(20, 3, seed=8))
    assert {type(v) for v in (*values.values(), *values["per_class"])} <= {float, int, list, type(None)}
