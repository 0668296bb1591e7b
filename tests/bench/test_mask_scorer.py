"""The scorer of masks against plain loops over pixels: masks lie on the image as it is on disk."""

import math

import numpy as np
import pytest
import scans
import torch
from numpy.typing import NDArray
from toy_masks import STRUCTURES, brute, case, domain, judged, near, random_masks, sure

from trueup.bench.scorers import MaskScorer
from trueup.data.loading import ConcatDomains
from trueup.data.slices import Box

# Cases


def test_volumes_are_measured_whole_in_the_order_of_no_matter_what() -> None:
    truths, said = [random_masks(s, 3, 9, 12) for s in (0, 1)], [random_masks(s, 3, 9, 12) for s in (2, 3)]
    place = ConcatDomains([domain("d", case("first", truths[0]), case("second", truths[1], spacing=(2.0, 0.5, 1.5)))])
    answers = {i: sure(said[i // 3][i % 3]) for i in (4, 0, 5, 2, 1, 3)}
    results = judged(place, answers)
    expected = [brute(said[0], truths[0], (3.0, 1.0, 1.0)), brute(said[1], truths[1], (2.0, 0.5, 1.5))]
    assert list(results["per_case"]) == ["first", "second"]
    near(results["per_case"]["first"], expected[0])
    near(results["per_case"]["second"], expected[1])
    for key in ("dice", "hd95", "assd"):
        each = [np.mean([e[name][key] for e in expected]) for name in STRUCTURES]
        assert results[key] == pytest.approx(np.mean(each))
        assert [results["per_structure"][name][key] for name in STRUCTURES] == pytest.approx(each)
    assert results["cases"] == 2
    assert "per_domain" not in results
    assert "vcdr_error" not in results


def test_a_slice_alone_is_measured_in_its_plane() -> None:
    truth, said = random_masks(4, 1, 9, 12), random_masks(5, 1, 9, 12)
    results = judged(ConcatDomains([domain("d", case("photo", truth))]), {0: sure(said[0])})
    near(results["per_case"]["photo"], brute(said, truth, (3.0, 1.0, 1.0)))


@pytest.mark.parametrize("box", [(-2, -3, 12, 15), (2, 3, 5, 6), (-4, 5, 10, 10), (3, -2, 9, 7)])
def test_answers_go_back_to_where_they_were_seen(box: Box) -> None:
    """The network says of each pixel of its square the truth or something else; beyond the square there is nothing."""
    truth, said = random_masks(6, 2, 9, 12), random_masks(7, 2, *box[2:])
    on_disk = np.zeros_like(truth)
    for z, row, column in np.ndindex(2, 9, 12):
        r, c = row - box[0], column - box[1]
        if 0 <= r < box[2] and 0 <= c < box[3]:
            on_disk[z, row, column] = said[z, r, c]
    results = judged(ConcatDomains([domain("d", case("a", truth, box))]), {0: sure(said[0]), 1: sure(said[1])})
    near(results["per_case"]["a"], brute(on_disk, truth, (3.0, 1.0, 1.0)))


def twice_as_large(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Read between the middles of pixels, by hand: three quarters of the nearest and one of the next."""
    for axis in (0, 1):
        ahead = np.concatenate([values.take([0], axis), values.take(range(values.shape[axis] - 1), axis)], axis)
        behind = np.concatenate([values.take(range(1, values.shape[axis]), axis), values.take([-1], axis)], axis)
        pair = np.stack([0.75 * values + 0.25 * ahead, 0.75 * values + 0.25 * behind], axis + 1)
        shape = list(values.shape)
        shape[axis] *= 2
        values = pair.reshape(shape)
    return values


@pytest.mark.parametrize("multilabel", [False, True])
def test_probabilities_are_enlarged_not_classes(multilabel: bool) -> None:
    """A network that sees 5 × 6 pixels of a slice of 10 × 12."""
    rng = np.random.default_rng(8)
    logits, truth = rng.normal(size=(2 if multilabel else 3, 5, 6)), random_masks(9, 1, 10, 12)
    if multilabel:
        probs = 1 / (1 + np.exp(-logits))
        masks = [twice_as_large(p) > 0.5 for p in probs]
    else:
        probs = np.exp(logits) / np.exp(logits).sum(axis=0)
        classes = np.stack([twice_as_large(p) for p in probs]).argmax(axis=0)
        masks = [np.isin(classes, part) for part in STRUCTURES.values()]
    results = judged(
        ConcatDomains([domain("d", case("a", truth))]), {0: torch.from_numpy(logits)}, multilabel=multilabel
    )
    for (name, part), mask in zip(STRUCTURES.items(), masks, strict=True):
        assert results["per_case"]["a"][name]["dice"] == scans.dice(mask, np.isin(truth[0], part))


# Labels


def test_labels_are_masks_of_their_own() -> None:
    """The core may be said where the whole is not; classes could not say so."""
    truth = np.zeros((1, 4, 4), np.uint8)
    truth[0, :2] = 1
    truth[0, 0] = 2
    whole_, core = np.zeros((4, 4), bool), np.zeros((4, 4), bool)
    whole_[:2, :2] = True
    core[3] = core[0, :3] = True
    logits = torch.from_numpy(np.stack([np.where(whole_, 3.0, -3.0), np.where(core, 0.1, -0.1)]))
    results = judged(ConcatDomains([domain("d", case("a", truth))]), {0: logits}, multilabel=True)
    assert results["per_case"]["a"]["all"]["dice"] == 2 * 4 / (4 + 8)
    assert results["per_case"]["a"]["core"]["dice"] == 2 * 3 / (7 + 4)


def test_beyond_the_square_no_label_is_found() -> None:
    truth = np.full((1, 4, 4), 2, np.uint8)
    results = judged(
        ConcatDomains([domain("d", case("a", truth, (1, 1, 2, 2)))]), {0: torch.full((2, 2, 2), 9.0)}, multilabel=True
    )
    assert results["per_case"]["a"]["core"]["dice"] == 2 * 4 / (4 + 16)


def test_a_single_label() -> None:
    truth = np.eye(4, dtype=np.uint8)[None]
    logits = torch.full((1, 4, 4), -1.0)
    logits[0, 0, 0] = logits[0, 0, 1] = 1.0
    results = judged(
        ConcatDomains([domain("d", case("a", truth))]), {0: logits}, multilabel=True, structures={"p": (1,)}
    )
    assert results["dice"] == 2 * 1 / (2 + 4)


# What is empty


def test_empty_structures_are_skipped_counted_or_wrong() -> None:
    """No core in the first, and none found; one found in the second, where there is none; the third is right."""
    rim = np.ones((1, 6, 6), np.uint8)
    core = rim.copy()
    core[0, 2:4, 2:4] = 2
    place = ConcatDomains([domain("d", case("a", rim), case("b", rim), case("c", core))])
    results = judged(place, {0: sure(rim[0]), 1: sure(core[0]), 2: sure(core[0])})
    cores = [results["per_case"][name]["core"] for name in "abc"]
    assert [c["dice"] for c in cores] == [None, 0.0, 1.0]
    assert [c["hd95"] for c in cores] == [None, None, 0.0]
    found = results["per_structure"]["core"]
    assert (found["dice"], found["hd95"], found["cases"], found["empty"], found["no_distance"]) == (0.5, 0.0, 3, 1, 2)
    assert results["dice"] == (1.0 + 0.5) / 2


def test_nothing_anywhere_has_no_score() -> None:
    empty = np.zeros((1, 4, 4), np.uint8)
    results = judged(ConcatDomains([domain("d", case("a", empty))]), {0: sure(empty[0])})
    assert (results["dice"], results["hd95"], results["assd"]) == (None, None, None)
    assert results["per_structure"]["core"]["empty"] == 1


# Part of a stream


def test_only_slices_that_were_shown_count() -> None:
    truth, said = random_masks(10, 5, 9, 9), random_masks(11, 5, 9, 9)
    place = ConcatDomains([domain("d", case("a", truth), case("b", truth))])
    results = judged(place, {i: sure(said[i]) for i in (3, 1)})
    assert list(results["per_case"]) == ["a"]
    shown = np.array([0, 1, 0, 1, 0], dtype=np.uint8)[:, None, None]
    near(results["per_case"]["a"], brute(said * shown, truth * shown, (3.0, 1.0, 1.0)))
    assert results["cases"] == 1


def test_of_a_slice_that_is_shown_again_the_last_answer_counts() -> None:
    truth = random_masks(12, 2, 9, 9)
    place = ConcatDomains([domain("d", case("a", truth))])
    scorer = MaskScorer(place, STRUCTURES)
    for said in (np.zeros((2, 9, 9)), truth):
        scorer.take(torch.stack([sure(m) for m in said]).float(), np.array([0, 1]))
    results = scorer.results()
    assert (results["dice"], results["images"]) == (1.0, 4)


# Several domains


def test_domains_have_their_own_dice_and_cases_their_domains_name() -> None:
    """Two cases in one domain, one in the other: the whole is the mean over cases, not over domains."""
    truths, said = [random_masks(s, 1, 9, 9) for s in (20, 21, 22)], [random_masks(s, 1, 9, 9) for s in (23, 24, 25)]
    place = ConcatDomains([domain("x", case("a", truths[0]), case("b", truths[1])), domain("y", case("a", truths[2]))])
    results = judged(place, {i: sure(said[i][0]) for i in (2, 0, 1)})
    each = [brute(s, t, (3.0, 1.0, 1.0)) for s, t in zip(said, truths, strict=True)]
    scores = [[e[name]["dice"] for name in STRUCTURES] for e in each]
    assert list(results["per_case"]) == ["x/a", "x/b", "y/a"]
    near(results["per_case"]["y/a"], each[2])
    assert results["dice"] == pytest.approx(np.mean(scores))
    assert results["per_domain"] == {"x": pytest.approx(np.mean(scores[:2])), "y": pytest.approx(np.mean(scores[2]))}


def test_a_domain_that_was_not_shown_is_not_there() -> None:
    truth = random_masks(30, 1, 9, 9)
    place = ConcatDomains([domain("x", case("a", truth)), domain("y", case("a", truth))])
    results = judged(place, {1: sure(truth[0])})
    assert list(results["per_case"]) == ["y/a"]
    assert "per_domain" not in results


# Cup and disc


def eye(disc: int, cup: int) -> NDArray[np.uint8]:
    """A disc of so many rows with a cup of so many."""
    mask = np.zeros((1, 12, 12), np.uint8)
    mask[0, 1 : 1 + disc, 2:10] = 1
    mask[0, 1 : 1 + cup, 4:8] = 2
    return mask


def test_error_of_the_ratio_of_cup_to_disc() -> None:
    """The mean of |said - true| over eyes; an eye in which no disc is found has none."""
    pairs = [(eye(10, 5), eye(10, 4)), (eye(8, 2), eye(10, 5)), (eye(0, 0), eye(10, 5))]
    place = ConcatDomains([domain("d", *(case(str(n), truth) for n, (_, truth) in enumerate(pairs)))])
    structures = {"disc": (1, 2), "cup": (2,)}
    results = judged(place, {n: sure(said[0]) for n, (said, _) in enumerate(pairs)}, structures=structures)
    assert results["vcdr_error"] == pytest.approx((0.1 + 0.25) / 2)
    none = judged(place, {2: sure(pairs[2][0][0])}, structures=structures)
    assert none["vcdr_error"] is None


# What is refused


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_answers_that_are_not_finite_are_refused_at_once(bad: float) -> None:
    logits = torch.zeros(1, 3, 4, 4)
    logits[0, 1, 2, 3] = bad
    scorer = MaskScorer(ConcatDomains([domain("d", case("a", np.zeros((1, 4, 4))))]), STRUCTURES)
    with pytest.raises(ValueError, match="the answers are not finite"):
        scorer.take(logits, np.array([0]))


def test_answer_is_not_changed_and_half_precision_is_taken() -> None:
    truth = random_masks(31, 1, 9, 9)
    place, logits = ConcatDomains([domain("d", case("a", truth))]), sure(truth[0])[None].bfloat16()
    before, scorer = logits.clone(), MaskScorer(place, STRUCTURES)
    scorer.take(logits, np.array([0]))
    assert torch.equal(logits, before)
    assert scorer.results()["dice"] == 1.0
