"""Cutting cases into what networks see and putting answers back, worked out by hand or pixel by pixel."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from trueup.data import slices
from trueup.data.domains import BrokenImageError
from trueup.data.slices import (
    Box,
    LabelledCase,
    SliceDomain,
    Volume,
    crop_padded,
    field_of_view_box,
    full_box,
    network_box,
    window_to_uint8,
)

ONES = (1.0, 1.0, 1.0)
# Within an image of 5 rows and 7 columns, around it, over each edge, beside it, and none of it.
BOXES = [
    (0, 0, 5, 7),
    (1, 2, 3, 4),
    (-2, -1, 9, 9),
    (-3, 0, 4, 7),
    (3, 5, 4, 4),
    (2, -4, 1, 5),
    (-6, 0, 6, 7),
    (5, 0, 2, 7),
    (-9, -9, 3, 3),
    (8, 9, 3, 2),
    (0, 0, 0, 0),
]


def numbered(*shape: int) -> NDArray[np.uint8]:
    return np.arange(1, 1 + np.prod(shape), dtype=np.uint8).reshape(shape)


def volume(grey: NDArray[np.uint8], mask: NDArray[np.uint8] | None = None, box: Box | None = None) -> Volume:
    """One slice."""
    image = grey[None, ..., None] if grey.ndim == 2 else grey[None]
    return Volume(image, None if mask is None else mask[None], ONES, box or full_box(*grey.shape[:2]))


# Cutting


@pytest.mark.parametrize("box", BOXES)
def test_a_cut_is_what_lies_in_the_box_and_zero_beyond_the_image(box: Box) -> None:
    pixels = numbered(5, 7, 3)
    part = crop_padded(pixels, box)
    top, left, tall, wide = box
    assert part.shape == (tall, wide, 3)
    assert part.dtype == np.uint8
    for r in range(tall):
        for c in range(wide):
            y, x = top + r, left + c
            assert part[r, c].tolist() == (pixels[y, x].tolist() if 0 <= y < 5 and 0 <= x < 7 else [0, 0, 0])


def test_a_cut_by_hand() -> None:
    pixels = np.array([[1, 2], [3, 4]], dtype=np.uint8)[..., None]
    assert crop_padded(pixels, (-1, 1, 3, 2))[..., 0].tolist() == [[0, 0], [2, 0], [4, 0]]


# Pasting


def paste_scores(
    scores: NDArray[np.float32], shape: tuple[int, int], box: Box, outside: NDArray[np.float32]
) -> NDArray[np.float32]:
    return volume(numbered(*shape), box=box).paste_back(scores, outside)


@pytest.mark.parametrize("box", [box for box in BOXES if box[2]])
def test_what_was_cut_is_put_back_where_it_was(box: Box) -> None:
    pixels = numbered(5, 7, 2)
    scores = crop_padded(pixels, box).transpose(2, 0, 1).astype(np.float32)
    back = paste_scores(scores, (5, 7), box, np.array([-1, -2], dtype=np.float32))
    assert back.shape == (2, 5, 7)
    assert back.dtype == np.float32
    top, left, tall, wide = box
    for y in range(5):
        for x in range(7):
            seen = top <= y < top + tall and left <= x < left + wide
            assert back[:, y, x].tolist() == (pixels[y, x].tolist() if seen else [-1, -2])


def test_scores_are_enlarged_in_a_straight_line_between_their_centres() -> None:
    scores = np.array([[[0, 8], [0, 8]]], dtype=np.float32)
    outside = np.array([-1], dtype=np.float32)
    # Two pixels become four: their centres lie at 0.5 and 2.5, those of the four at 0, 1, 2 and 3.
    assert paste_scores(scores, (2, 6), (0, 1, 2, 4), outside).tolist() == [[[-1, 0, 2, 6, 8, -1]] * 2]
    assert paste_scores(scores, (2, 3), (-1, -1, 4, 4), outside).tolist() == [[[2, 6, 8]] * 2]  # the first lies beyond


def test_scores_are_made_smaller_over_their_neighbours() -> None:
    scores = np.full((3, 16, 16), 0.25, dtype=np.float32)
    back = paste_scores(scores, (5, 5), (1, 1, 3, 3), np.array([1, 0, 0], dtype=np.float32))
    assert np.allclose(back[:, 1:4, 1:4], 0.25)
    assert back[:, 0].tolist() == [[1] * 5, [0] * 5, [0] * 5]


def test_as_many_scores_as_values_for_the_outside() -> None:
    with pytest.raises(ValueError, match="zip"):
        paste_scores(np.zeros((3, 4, 4), dtype=np.float32), (4, 4), (0, 0, 4, 4), np.zeros(2, dtype=np.float32))


# What networks see


@pytest.mark.parametrize("size", [None, 4, 13])
def test_grey_is_shown_in_three_equal_channels(size: int | None) -> None:
    shown = volume(numbered(5, 7), box=(-1, 0, 7, 7)).network_view(0, size)
    assert shown.shape == ((7, 7, 3) if size is None else (size, size, 3))
    assert shown.dtype == np.uint8
    assert (shown[..., 0] == shown[..., 1]).all()
    assert (shown[..., 0] == shown[..., 2]).all()


def test_colours_are_shown_as_they_are() -> None:
    pixels = numbered(5, 7, 3)
    assert np.array_equal(volume(pixels).network_view(0), pixels)
    assert np.array_equal(volume(pixels, box=(1, 2, 3, 3)).network_view(0, 3), pixels[1:4, 2:5])


def test_the_slice_that_is_asked_for_is_shown() -> None:
    stack = Volume(numbered(3, 2, 2, 1), numbered(3, 2, 2), (5.0, 1.0, 1.0), full_box(2, 2))
    for z in range(3):
        assert (
            stack.network_view(z)[..., 0].tolist()
            == stack.network_target(z).tolist()
            == [[4 * z + 1, 4 * z + 2], [4 * z + 3, 4 * z + 4]]
        )


def test_enlarged_by_hand() -> None:
    image = np.array([[0, 80], [0, 80]], dtype=np.uint8)
    mask = np.array([[0, 2], [0, 2]], dtype=np.uint8)
    seen = volume(image, mask)
    assert seen.network_view(0, 4)[..., 0].tolist() == [[0, 20, 60, 80]] * 4
    assert seen.network_target(0, 4).tolist() == [[0, 0, 2, 2]] * 4  # a class is never in between two


@pytest.mark.parametrize("size", [3, 5, 8, 31])
def test_answers_are_classes_of_the_mask_at_odd_sizes(size: int) -> None:
    rng = np.random.default_rng(0)
    mask = rng.choice([0, 3, 200], (9, 6)).astype(np.uint8)
    answer = volume(numbered(9, 6), mask, (-2, -3, 13, 13)).network_target(0, size)
    assert answer.shape == (size, size)
    assert answer.dtype == np.uint8
    assert {*np.unique(answer).tolist()} <= {0, 3, 200}
    padded = np.pad(mask, ((2, 2), (3, 4)))
    at = ((np.arange(size) + 0.5) * 13 / size).astype(int)  # the pixel under each centre
    assert np.array_equal(answer, padded[np.ix_(at, at)])


def test_a_case_without_a_mask_has_no_answer() -> None:
    with pytest.raises(ValueError, match="this case has no mask"):
        volume(numbered(2, 2)).network_target(0)


# There and back


@pytest.mark.parametrize("box", [(0, 0, 5, 7), (-1, 0, 7, 7), (-4, -3, 13, 13), (1, 2, 3, 3)])
def test_what_is_shown_goes_back_to_where_it_came_from(box: Box) -> None:
    seen = volume(numbered(5, 7), box=box)
    back = seen.paste_back(seen.network_view(0).transpose(2, 0, 1).astype(np.float32), np.full(3, -1, dtype=np.float32))
    inside = np.zeros((5, 7), dtype=bool)
    top, left, tall, wide = box
    inside[max(0, top) : top + tall, max(0, left) : left + wide] = True
    expected = np.where(inside, numbered(5, 7).astype(np.float32), -1)
    assert (back == expected).all()


@pytest.mark.parametrize("box", [(0, 0, 6, 6), (-3, -2, 12, 12), (-3, -1, 13, 9), (1, 1, 4, 5)])
def test_a_perfect_answer_at_twice_the_size_is_the_mask(box: Box) -> None:
    mask = np.random.default_rng(1).integers(0, 3, (6, 8)).astype(np.uint8)
    seen = volume(mask, mask, box)
    tall, wide = box[2:]
    answer = seen.network_target(0).repeat(2, axis=0).repeat(2, axis=1)
    assert answer.shape == (2 * tall, 2 * wide)
    scores = np.eye(3, dtype=np.float32)[answer].transpose(2, 0, 1)
    back = seen.paste_back(scores, np.array([1, 0, 0], dtype=np.float32)).argmax(axis=0)
    kept = np.zeros(mask.shape, dtype=bool)
    kept[max(0, box[0]) : box[0] + tall, max(0, box[1]) : box[1] + wide] = True
    assert np.array_equal(back, np.where(kept, mask, 0))


# Boxes and grey values


def test_the_field_of_view_is_in_millimetres_and_in_the_middle() -> None:
    assert full_box(5, 7) == (0, 0, 5, 7)
    assert field_of_view_box(100, 80, (9.0, 0.5, 2.0), 40.0) == (10, 30, 80, 20)
    assert field_of_view_box(5, 5, ONES, 8.0) == (-2, -2, 8, 8)
    assert network_box(4, 6, (5.0, 2.0, 0.5), None) == (0, -5, 4, 16)  # 8 mm high and 3 mm wide


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.float64, np.uint8])
def test_a_window_is_clipped_at_two_percentiles(dtype: type) -> None:
    values = np.arange(101).astype(dtype)  # the percentiles are 1 and 99
    grey = window_to_uint8(values.reshape(1, 101, 1))
    assert (grey.shape, grey.dtype) == ((1, 101, 1), np.uint8)
    flat = grey.ravel()
    assert flat[[0, 1, 50, 99, 100]].tolist() == [0, 0, 128, 255, 255]
    assert flat[20] == round(255 * 19 / 98)
    assert (np.diff(flat.astype(int)) >= 0).all()


def test_other_percentiles_and_all_of_the_range() -> None:
    values = np.array([-100, 0, 50, 100, 1000])
    assert window_to_uint8(values, 0, 100)[[0, -1]].tolist() == [0, 255]
    assert window_to_uint8(values, 25, 75).tolist() == [0, 0, 128, 255, 255]


def test_a_window_over_nothing_but_one_value() -> None:
    assert window_to_uint8(np.full((2, 2), 7)).tolist() == [[0, 0], [0, 0]]
    lonely = np.zeros(1000)
    lonely[3] = 5
    assert np.flatnonzero(window_to_uint8(lonely)).tolist() == [3]


# Domains


def stack(count: int, value: int = 0, side: int = 2) -> Volume:
    image = np.full((count, side, side, 1), value, dtype=np.uint8)
    image += np.arange(count, dtype=np.uint8)[:, None, None, None]
    return Volume(image, image[..., 0], ONES, full_box(side, side))


def case(name: str, count: int, value: int = 0, patient: str = "") -> LabelledCase:
    return LabelledCase(name, count, lambda: stack(count, value), patient)


@pytest.fixture
def domain() -> SliceDomain:
    return SliceDomain("mr", [case("a", 2, 10, "p"), case("b", 1, 20), case("c", 3, 30, "p"), case("d", 1, 40, "q")])


def test_slices_are_numbered_through_all_cases(domain: SliceDomain) -> None:
    assert domain.case.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert domain.starts.tolist() == [0, 2, 3, 6, 7]
    assert [domain.place(i) for i in range(7)] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0)]
    assert [int(domain.image(i)[0, 0, 0]) for i in range(7)] == [10, 11, 20, 30, 31, 32, 40]
    assert [int(domain.mask(i)[0, 0]) for i in range(7)] == [10, 11, 20, 30, 31, 32, 40]
    assert [domain.image_name(i) for i in range(7)] == ["a[0]", "a[1]", "b", "c[0]", "c[1]", "c[2]", "d"]
    assert domain.image(4, 8).shape == (8, 8, 3)
    assert domain.mask(4, 8).shape == (8, 8)
    with pytest.raises(IndexError):
        domain.image(7)


def test_labels_are_patients(domain: SliceDomain) -> None:
    assert domain.labels.tolist() == [0, 0, 1, 0, 0, 0, 2]  # a and c are of one; b is one of its own
    assert domain.labels.dtype == np.int64


def test_a_domain_may_be_empty() -> None:
    empty = SliceDomain("none", [])
    assert len(empty.labels) == len(empty.case) == 0
    assert empty.labels.dtype == np.int64


def test_another_number_of_slices_than_the_header_said() -> None:
    wrong = SliceDomain("mr", [LabelledCase("a", 4, lambda: stack(3))])
    with pytest.raises(BrokenImageError, match="a has 3 slices; its header said 4"):
        wrong.image(0)


def test_what_cannot_be_read_is_said_each_time_and_not_kept() -> None:
    def read() -> Volume:
        raise BrokenImageError("a.nii: empty")

    broken = SliceDomain("mr", [LabelledCase("a", 1, read), case("b", 1, 7)])
    for _ in range(2):
        with pytest.raises(BrokenImageError, match=r"a\.nii"):
            broken.image(0)
    assert broken.image(1)[0, 0, 0] == 7


def counted(count: int, make: Callable[[int], Volume] = stack) -> tuple[SliceDomain, list[int]]:
    """Cases of one slice, and the numbers of those that were read."""
    read: list[int] = []

    def reading(number: int) -> Volume:
        read.append(number)
        return make(1)

    return SliceDomain("mr", [LabelledCase(str(n), 1, lambda n=n: reading(n)) for n in range(count)]), read  # type: ignore[misc]


def test_cases_are_kept_and_the_least_lately_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "CACHE", 3 * (4 + 4))  # three cases of four pixels, with their masks
    domain, read = counted(5)
    for number in (0, 1, 2, 0, 1, 2):
        domain.volume(number)
    assert read == [0, 1, 2]
    domain.volume(0)
    domain.volume(3)  # in the place of 1
    for number in (0, 2, 3):
        domain.volume(number)
    assert read == [0, 1, 2, 3]
    domain.volume(1)
    assert read == [0, 1, 2, 3, 1]


def test_a_case_that_is_larger_than_what_may_be_kept_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "CACHE", 3)
    domain, read = counted(2)
    for number in (0, 0, 1, 1, 0):
        assert domain.volume(number).nbytes == 8
    assert read == [0, 1, 0]


def test_masks_count_for_memory() -> None:
    assert volume(numbered(4, 5), numbered(4, 5)).nbytes == 40
    assert volume(numbered(4, 5, 3)).nbytes == 60


def test_many_threads_get_what_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "CACHE", 5 * 2 * 16)  # five of twenty
    at_once, most = 0, 0
    lock = threading.Lock()

    def read(value: int) -> Volume:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        threading.Event().wait(0.0005)
        with lock:
            at_once -= 1
        return stack(2, 2 * value, side=2)

    domain = SliceDomain("mr", [LabelledCase(str(n), 2, lambda n=n: read(n)) for n in range(20)])  # type: ignore[misc]
    asked = np.random.default_rng(0).integers(0, 40, 1000)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: int(domain.image(int(i))[0, 0, 0]), asked))
    assert got == asked.tolist()
    assert most > 1  # one that reads does not stop the others
    assert sum(v.nbytes for v in domain._kept.values()) <= slices.CACHE


def test_slices_of_one_case_that_are_asked_for_at_once_are_read_once() -> None:
    read: list[int] = []

    def slowly() -> Volume:
        read.append(1)
        threading.Event().wait(0.02)
        return stack(8)

    domain = SliceDomain("mr", [LabelledCase("a", 8, slowly)])
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: int(domain.image(i)[0, 0, 0]), range(8)))
    assert got == [*range(8)]
    assert read == [1]
