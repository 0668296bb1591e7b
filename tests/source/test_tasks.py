"""What training minimises and is judged by, worked out by hand; and that a mask stays on its image."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scans
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.data.datasets import Dataset
from trueup.data.domains import ArrayDomain
from trueup.data.slices import LabelledCase, SliceDomain, Volume
from trueup.data.transforms import augment_with_mask
from trueup.source.recipe import Training
from trueup.source.tasks import Classify, Segment, task_of

Mask = NDArray[np.uint8]


def segment(**training: Any) -> Segment:
    return Segment(Training(**{"augment": "none", "size": scans.SIDE, **training}), scans.STRUCTURES)


def logits_of(*probs: list[list[float]]) -> Tensor:
    """One image, as logits of the probabilities of each class."""
    return torch.tensor([probs], dtype=torch.float64).log()


# The loss


def test_loss_of_two_by_two_pixels_is_cross_entropy_plus_what_is_missing_of_dice() -> None:
    logits = logits_of([[0.5, 0.1], [0.7, 0.2]], [[0.25, 0.8], [0.2, 0.2]], [[0.25, 0.1], [0.1, 0.6]])
    y = torch.tensor([[[0, 1], [0, 2]]])
    entropy = -(math.log(0.5) + math.log(0.8) + math.log(0.7) + math.log(0.6)) / 4
    # Of classes 0, 1, 2: twice the probability where it is true, by all probability and all that is true, each plus 1.
    dice = [(2 * 1.2 + 1) / (1.5 + 2 + 1), (2 * 0.8 + 1) / (1.45 + 1 + 1), (2 * 0.6 + 1) / (1.05 + 1 + 1)]
    assert float(segment().loss(logits, y)) == pytest.approx(entropy + 1 - sum(dice) / 3)


def test_loss_of_labels_takes_each_as_a_question_of_its_own() -> None:
    """The core is a part of the whole: a pixel of class 2 is in both."""
    p, q = [[0.9, 0.4], [0.3, 0.6]], [[0.2, 0.1], [0.5, 0.8]]
    logits = torch.tensor([[p, q]], dtype=torch.float64).logit()
    y = torch.tensor([[[1, 0], [0, 2]]])
    said = [0.9, 1 - 0.4, 1 - 0.3, 0.6, 1 - 0.2, 1 - 0.1, 1 - 0.5, 0.8]
    entropy = -sum(math.log(each) for each in said) / 8
    dice = [(2 * 1.5 + 1) / (2.2 + 2 + 1), (2 * 0.8 + 1) / (1.6 + 1 + 1)]
    assert float(segment(multilabel=True).loss(logits, y)) == pytest.approx(entropy + 1 - sum(dice) / 2)


@pytest.mark.parametrize("multilabel", [False, True])
def test_dice_in_the_loss_is_of_the_whole_batch(multilabel: bool) -> None:
    """One image has no core at all; of its own it would say nothing of that class."""
    rng = np.random.default_rng(0)
    channels = 2 if multilabel else 3
    logits = torch.from_numpy(rng.normal(size=(2, channels, 3, 4)))
    y = torch.tensor(rng.integers(0, 3, size=(2, 3, 4)))
    y[1] = y[1].clamp(max=1)
    probs = logits.sigmoid() if multilabel else torch.softmax(logits, dim=1)
    parts: list[tuple[int, ...]] = [(1, 2), (2,)] if multilabel else [(0,), (1,), (2,)]
    entropy, dice = 0.0, 0.0
    for k, part in enumerate(parts):
        both = size = 0.0
        for n, r, c in np.ndindex(2, 3, 4):
            p, t = float(probs[n, k, r, c]), int(y[n, r, c]) in part
            both, size = both + p * t, size + p + t
            if multilabel:
                entropy -= math.log(p if t else 1 - p) / 48
            elif t:
                entropy -= math.log(p) / 24
        dice += (2 * both + 1) / (size + 1) / len(parts)
    assert float(segment(multilabel=multilabel).loss(logits, y)) == pytest.approx(entropy + 1 - dice)


@pytest.mark.parametrize("multilabel", [False, True])
def test_a_sure_and_right_answer_costs_nothing_and_the_slope_leads_there(multilabel: bool) -> None:
    task, y = segment(multilabel=multilabel), torch.tensor([[[0, 1], [1, 2]]])
    right = task.regions(y).float() if multilabel else torch.nn.functional.one_hot(y, 3).movedim(-1, 1).float()
    assert float(task.loss(100 * (2 * right - 1), y)) == pytest.approx(0, abs=1e-6)
    logits = torch.zeros_like(right, requires_grad=True)
    task.loss(logits, y).backward()
    assert logits.grad is not None
    assert bool(((logits.grad < 0) == right.bool()).all())


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1, 1), (2, 3, 4, 8)])
def test_a_network_that_gives_no_mask_of_that_size_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"returns \(2, 3.*masks are \(2, 8, 8\); a mask needs a segmenter"):
        segment().loss(torch.zeros(shape), torch.zeros(2, 8, 8, dtype=torch.long))


def test_a_network_that_gives_a_mask_is_no_classifier() -> None:
    with pytest.raises(ValueError, match=r"returns \(2, 3, 8, 8\); one class per image needs a classifier"):
        Classify(Training()).loss(torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))


# The score


def random_masks(seed: int, channels: int = 3) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(2, channels, 5, 6))), torch.tensor(rng.integers(0, 3, size=(2, 5, 6)))


def test_counts_are_pixels_in_both_and_in_either() -> None:
    logits, y = random_masks(0)
    expected = np.zeros((2, 2))
    for n, r, c in np.ndindex(2, 5, 6):
        said = max(range(3), key=lambda k: float(logits[n, k, r, c]))
        for s, part in enumerate(scans.STRUCTURES.values()):
            found, truth = said in part, int(y[n, r, c]) in part
            expected[:, s] += (found and truth, found + truth)
    counts = segment().count(logits, y)
    assert counts.tolist() == expected.tolist()
    assert counts.dtype == np.float64


def test_a_label_is_found_where_its_logit_is_above_zero() -> None:
    logits, y = random_masks(1, 2)
    expected = np.zeros((2, 2))
    for n, r, c in np.ndindex(2, 5, 6):
        for s, part in enumerate(scans.STRUCTURES.values()):
            found, truth = float(logits[n, s, r, c]) > 0, int(y[n, r, c]) in part
            expected[:, s] += (found and truth, found + truth)
    assert segment(multilabel=True).count(logits, y).tolist() == expected.tolist()


def test_counts_of_batches_add_up_to_the_dice_of_all_pixels() -> None:
    task, (a, y), (b, z) = segment(), random_masks(2), random_masks(3)
    both = task.final_score(task.count(a, y) + task.count(b, z))
    said = torch.cat((a, b)).argmax(dim=1).numpy()
    truth = torch.cat((y, z)).numpy()
    each = [scans.dice(np.isin(said, part), np.isin(truth, part)) for part in scans.STRUCTURES.values()]
    assert both == pytest.approx(sum(d for d in each if d is not None) / 2)


def test_a_structure_that_is_nowhere_is_left_out_of_the_score() -> None:
    task = segment()
    assert task.final_score(np.array([[3.0, 0.0], [8.0, 0.0]])) == 0.75
    assert task.final_score(np.array([[3.0, 0.0], [8.0, 2.0]])) == 0.375  # found, where there is none
    assert task.final_score(np.zeros((2, 2))) == 0.0


def test_classes_are_judged_by_how_many_are_right() -> None:
    task = Classify(Training())
    logits = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    counts = task.count(logits, torch.tensor([1, 0, 0, 0]))
    assert counts.tolist() == [3, 4]
    assert task.final_score(counts + np.array([0, 4])) == 0.375
    assert (task.score, segment().score) == ("accuracy", "dice")


# Which task


def test_the_dataset_says_which_task_it_is() -> None:
    assert isinstance(task_of(scans.dataset(), Training(augment="affine")), Segment)
    classes = Dataset("x", ("a", "b"), ("d",), lambda name: ArrayDomain(name, np.zeros((1, 8, 8, 3)), np.zeros(1)))
    assert isinstance(task_of(classes, Training()), Classify)


def test_one_class_is_no_task() -> None:
    with pytest.raises(ValueError, match="at least two classes, but x has one"):
        task_of(Dataset("x", ("a",), ("d",), scans.domain), Training())


@pytest.mark.parametrize("augment", ["shift", "domainbed"])
def test_augmentation_that_moves_the_image_alone_is_refused_for_masks(augment: str) -> None:
    with pytest.raises(ValueError, match=f"augment='{augment}' does not transform masks; use affine or none"):
        segment(augment=augment)


def test_what_is_for_masks_is_refused_for_classes() -> None:
    with pytest.raises(ValueError, match="augment='affine' is for masks; use none, shift, domainbed"):
        Classify(Training(augment="affine"))
    with pytest.raises(ValueError, match="multilabel is for masks"):
        Classify(Training(multilabel=True))


# Pairs


@pytest.mark.parametrize("size", [scans.SIDE, 2 * scans.SIDE])
def test_a_pair_is_a_slice_and_its_own_mask(size: int) -> None:
    domain = scans.domain("amber", 2, slices=3)
    for i in range(6):
        image, mask = segment(size=size).read(domain, i, np.random.default_rng(0))
        assert (image.shape, mask.shape, mask.dtype) == ((size, size, 3), (size, size), np.uint8)
        assert (int(image[0, 0, 1]), int(image[0, 0, 2])) == (10 * (i // 3), 20 * (i % 3))
        truth = scans.volume(i // 3, 3).mask
        assert truth is not None
        assert np.array_equal(mask, np.kron(truth[i % 3], np.ones((size // scans.SIDE,) * 2, np.uint8)))
    image, mask = segment().read(domain, 4, np.random.default_rng(0))
    assert np.array_equal(image[..., 0], scans.STEP * mask)


def test_answers_are_the_masks_of_these_images_as_they_are() -> None:
    domain = scans.domain("blue", 3)
    answers = segment(augment="affine").answers(domain, np.array([5, 0, 3]))
    expected = [domain.mask(i) for i in (5, 0, 3)]
    assert answers.dtype == torch.int64
    assert np.array_equal(answers.numpy(), np.stack(expected))


def test_masks_become_a_batch_of_class_numbers() -> None:
    batch = segment().tensor([np.array([[0, 1], [2, 0]], np.uint8), np.zeros((2, 2), np.uint8)])
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[[0, 1], [2, 0]], [[0, 0], [0, 0]]]


def test_pairs_are_augmented_anew_each_time_from_the_stream_that_is_given() -> None:
    domain, task = scans.domain("amber"), segment(augment="affine")
    for rng, again in [(np.random.default_rng(3), np.random.default_rng(3))]:
        first, second = task.read(domain, 0, rng), task.read(domain, 0, rng)
        assert not np.array_equal(first[1], second[1])
        assert np.array_equal(task.read(domain, 0, again)[0], first[0])
    assert np.array_equal(domain.image(0)[..., 0], scans.STEP * domain.mask(0))  # what is kept is left alone


# A mask stays on its image


def corners(side: int = 61) -> Mask:
    """Three blobs in the corners of a triangle: they tell turn, scale, move and mirror image apart."""
    mask = np.zeros((side, side), dtype=np.uint8)
    for k, (row, column) in enumerate([(18, 18), (18, 42), (42, 18)]):
        mask[row - 4 : row + 5, column - 4 : column + 5] = k + 1
    return mask


def painted(mask: Mask) -> NDArray[np.uint8]:
    return np.repeat((80 * mask)[..., None], 3, axis=2)


def middles(mask: Mask) -> NDArray[np.float64]:
    return np.array([np.argwhere(mask == k).mean(axis=0) for k in (1, 2, 3)])


def draws(count: int = 60) -> Iterator[tuple[NDArray[np.uint8], Mask]]:
    mask = corners()
    for seed in range(count):
        yield augment_with_mask(painted(mask), mask, np.random.default_rng(seed))


def test_what_is_painted_stays_under_its_mask() -> None:
    """Were it one pixel off, the overlap would be 0.90 at best."""
    mask, overlaps = corners(), []
    for seed in range(60):
        image, moved = augment_with_mask(painted((mask > 0).astype(np.uint8)), mask, np.random.default_rng(seed))
        bright = image[..., 0] > (int(image.min()) + int(image.max())) / 2
        overlaps.append(scans.dice(bright, moved > 0) or 0.0)
        assert set(np.unique(moved).tolist()) == {0, 1, 2, 3}
    assert min(overlaps) > 0.93
    assert np.mean(overlaps) > 0.98


def test_no_mirror_images() -> None:
    """The way round the three corners stays; a mirror image would turn it."""
    for _, mask in draws():
        a, b, c = middles(mask)
        assert np.linalg.det([b - a, c - a]) < 0


def test_turn_scale_and_move_stay_within_bounds_and_reach_them() -> None:
    was, angles, scales, moves = middles(corners()), [], [], []
    for _, mask in draws(200):
        now = middles(mask)
        before, after = (complex(p[1][1] - p[0][1], p[1][0] - p[0][0]) for p in (was, now))
        angles.append(math.degrees(np.angle(after / before)))
        scales.append(abs(after / before))
        corner, there, middle = complex(*was[0][::-1]), complex(*now[0][::-1]), complex(30, 30)
        moved = there + after / before * (middle - corner) - middle  # where the middle of the image has gone
        moves.append((moved.real, moved.imag))
    assert max(map(abs, angles)) < 16
    assert (min(angles), max(angles)) == (pytest.approx(-15, abs=2), pytest.approx(15, abs=2))
    assert (min(scales), max(scales)) == (pytest.approx(0.85, abs=0.04), pytest.approx(1.15, abs=0.04))
    assert np.abs(moves).max() < 0.05 * 61 + 0.6
    assert np.abs(moves).max(axis=0).min() > 2.4


class Still:
    """Draws the middle of every range, or what it is told."""

    def __init__(self, *given: Any) -> None:
        self.given = list(given)

    def uniform(self, low: float, high: float, size: int | None = None) -> Any:
        middle = (low + high) / 2
        return self.given.pop(0) if self.given else middle if size is None else np.full(size, middle)


def still(*given: Any) -> Any:
    return Still(*given)


def test_with_nothing_drawn_nothing_changes() -> None:
    noise = np.random.default_rng(0).integers(256, size=(20, 31, 3), dtype=np.uint8)
    mask = noise[..., 0] // 100
    image, same = augment_with_mask(noise, mask, still())
    assert np.array_equal(image, noise)
    assert np.array_equal(same, mask)


def test_a_mask_is_turned_about_its_middle_pixel_by_pixel() -> None:
    """Where each pixel comes from, by a plain loop; rows count downwards, so a positive angle goes with the clock."""
    mask = np.random.default_rng(1).integers(0, 4, size=(24, 30)).astype(np.uint8)
    angle, scale, moved = 0.2, 1.1, np.array([0.04, -0.03])
    _, found = augment_with_mask(painted(mask), mask, still(angle, scale, moved))
    expected = np.zeros_like(mask)
    for row, column in np.ndindex(24, 30):
        y, x = (row + 0.5 - 12 - 0.04 * 24) / scale, (column + 0.5 - 15 + 0.03 * 30) / scale
        there = math.cos(angle) * x - math.sin(angle) * y + 15, math.sin(angle) * x + math.cos(angle) * y + 12
        c, r = math.floor(there[0]), math.floor(there[1])
        if 0 <= r < 24 and 0 <= c < 30:
            expected[row, column] = mask[r, c]
    assert np.mean(found != expected) < 0.01  # a pixel on the very border may fall on either side


def test_light_changes_the_image_alone() -> None:
    mask = corners()
    image, same = augment_with_mask(painted(mask), mask, still(0.0, 1.0, np.zeros(2), 1.2, -10.0))
    assert np.array_equal(same, mask)
    for k in range(4):
        expected = min(max((80 * k - 128) * 1.2 + 128 - 10, 0), 255)
        assert set(image[mask == k].ravel().tolist()) == {int(expected)}


def test_a_case_without_a_mask_cannot_train() -> None:
    bare = Volume(np.zeros((1, 32, 32, 1), np.uint8), None, (1.0, 1.0, 1.0), (0, 0, 32, 32))
    with pytest.raises(ValueError, match="this case has no mask"):
        segment().read(SliceDomain("x", [LabelledCase("a", 1, lambda: bare)]), 0, np.random.default_rng(0))
