"""The scorer of classes."""

import math

import numpy as np
import pytest
import torch
from toy_masks import sure

from trueup.bench.scorers import ClassScorer, MaskScorer
from trueup.data.domains import ArrayDomain
from trueup.data.loading import ConcatDomains
from trueup.data.slices import LabelledCase, SliceDomain, Volume


def test_classes_are_measured_together_and_by_domain() -> None:
    images = np.zeros((4, 2, 2, 3), np.uint8)
    place = ConcatDomains(
        [ArrayDomain("x", images, np.array([0, 1, 2, 0])), ArrayDomain("y", images, np.array([1, 1, 0, 2]))]
    )
    said = {6: 0, 1: 1, 0: 2, 5: 1, 4: 0}  # right: 6, 1, 5
    scorer = ClassScorer(place)
    order = list(said)
    for at in (order[:3], order[3:]):
        scorer.take(sure([said[i] for i in at]).T.float(), np.array(at))
    results = scorer.results()
    assert (results["accuracy"], results["images"]) == (3 / 5, 5)
    assert results["per_domain"] == {"x": 1 / 2, "y": 2 / 3}
    bad = ClassScorer(place)
    bad.take(torch.full((1, 3), math.nan), np.array([0]))
    with pytest.raises(ValueError, match="not finite"):
        bad.results()


def test_slices_keep_their_distance_where_others_were_not_shown() -> None:
    """Ten slices of 5 mm, the structure in the first, the answer in the last: 45 mm, however many lie between."""
    mask = np.zeros((10, 4, 4), dtype=np.uint8)
    mask[0, 1:3, 1:3] = 1
    volume = Volume(np.zeros((10, 4, 4, 1), dtype=np.uint8), mask, (5.0, 1.0, 1.0), (0, 0, 4, 4))
    place = ConcatDomains([SliceDomain("d", [LabelledCase("a", 10, lambda: volume)])])
    scorer = MaskScorer(place, {"lv": (1,)})
    empty, there = torch.zeros(2, 4, 4), torch.zeros(2, 4, 4)
    empty[0], there[0] = 9.0, 9.0
    there[1, 1:3, 1:3] = 20.0
    scorer.take(torch.stack((empty, there)), np.array([0, 9]))
    results = scorer.results()
    assert results["hd95"] == pytest.approx(45.0)
    assert results["dice"] == 0.0


def test_cases_of_one_name_are_both_kept() -> None:
    mask = np.ones((1, 4, 4), dtype=np.uint8)
    volume = Volume(np.zeros((1, 4, 4, 1), dtype=np.uint8), mask, (1.0, 1.0, 1.0), (0, 0, 4, 4))
    place = ConcatDomains(
        [SliceDomain("d", [LabelledCase("a", 1, lambda: volume, "p"), LabelledCase("a", 1, lambda: volume, "q")])]
    )
    scorer = MaskScorer(place, {"disc": (1,)})
    right, wrong = torch.zeros(2, 4, 4), torch.zeros(2, 4, 4)
    right[1], wrong[0] = 1.0, 1.0
    scorer.take(torch.stack((right, wrong)), np.array([0, 1]))
    results = scorer.results()
    assert results["dice"] == 0.5
    assert len(results["per_case"]) == 2
