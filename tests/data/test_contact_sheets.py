"""Contact sheets: the right slice of the right cases, outlined where the mask ends."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from numpy.typing import NDArray
from PIL import Image

from trueup.data.contact_sheets import COLOURS, DOTS, GAP, HEAD, NAME, TILE, draw_sheets
from trueup.data.domains import BrokenImageError
from trueup.data.slices import LabelledCase, Volume, full_box

DISC = {"disc": (1, 2), "cup": (2,)}


def volume(grey: int = 100, slices: int = 1, full: int = 0) -> Volume:
    """Grey alone; one slice is disc from row 10 to 30 and column 20 to 30 of 40, without a cup."""
    mask = np.zeros((slices, 40, 40), dtype=np.uint8)
    mask[full, 10:30, 20:30] = 1
    image = np.full((slices, 40, 40, 1), grey, dtype=np.uint8)
    image[full] //= 2
    return Volume(image, mask, (1.0, 1.0, 1.0), full_box(40, 40))


def picture(path: Path) -> NDArray[np.int64]:
    with Image.open(path) as file:
        return np.asarray(file.convert("RGB")).astype(np.int64)


def tile(pixels: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    row, column = divmod(number, 4)
    top, left = HEAD + row * (TILE + NAME + GAP), GAP + column * (TILE + GAP)
    return pixels[round(top * DOTS) : round((top + TILE) * DOTS), round(left * DOTS) : round((left + TILE) * DOTS)]


def like(pixels: NDArray[np.int64], colour: str) -> NDArray[np.bool_]:
    return np.abs(pixels - 255 * np.array(to_rgb(colour))).max(axis=2) < 40


def draw(folder: Path, cases: list[LabelledCase], structures: dict[str, tuple[int, ...]] = DISC) -> NDArray[np.int64]:
    (file,) = draw_sheets("eyes", {"day": cases}, structures, folder)
    assert file == folder / "eyes-day.png"
    return picture(file)


def test_outlines_run_where_masks_end(tmp_path: Path) -> None:
    seen = tile(draw(tmp_path / "new/folder", [LabelledCase("a", 1, volume)]), 0)
    rows, columns = np.nonzero(like(seen, COLOURS[0]))
    side = len(seen)
    assert np.allclose([rows.min() / side, rows.max() / side], [10 / 40, 30 / 40], atol=0.015)
    assert np.allclose([columns.min() / side, columns.max() / side], [20 / 40, 30 / 40], atol=0.015)
    assert not like(seen[side * 12 // 40 : side * 28 // 40, side * 22 // 40 : side * 28 // 40], COLOURS[0]).any()
    assert not like(seen, COLOURS[1]).any()  # there is no cup
    assert (seen[5, 5] == 50).all()


def test_the_fullest_slice_is_shown(tmp_path: Path) -> None:
    seen = tile(draw(tmp_path, [LabelledCase("a", 5, lambda: volume(grey=200, slices=5, full=3))]), 0)
    assert (seen[5, 5] == 100).all()
    assert like(seen, COLOURS[0]).any()


def test_the_middle_slice_of_a_volume_that_shows_nothing(tmp_path: Path) -> None:
    def read() -> Volume:
        grey = np.arange(0, 250, 50, dtype=np.uint8).reshape(5, 1, 1, 1).repeat(9, axis=1).repeat(9, axis=2)
        return Volume(grey, np.zeros((5, 9, 9), dtype=np.uint8), (1.0, 1.0, 1.0), full_box(9, 9))

    assert (tile(draw(tmp_path, [LabelledCase("a", 5, read)]), 0)[5, 5] == 100).all()


def test_twelve_cases_are_taken_evenly_and_no_other_is_read(tmp_path: Path) -> None:
    read: list[int] = []

    def case(number: int) -> LabelledCase:
        return LabelledCase(f"case {number}", 1, lambda: (read.append(number), volume())[1])

    pixels = draw(tmp_path, [case(n) for n in range(34)])
    assert read == [*range(0, 34, 3)]
    assert pixels.shape == (
        round((HEAD + 3 * (TILE + NAME + GAP)) * DOTS),
        round((4 * (TILE + GAP) + GAP) * DOTS),
        3,
    )
    assert all(like(tile(pixels, n), COLOURS[0]).any() for n in range(12))
    few = draw(tmp_path, [case(n) for n in range(5)])
    assert len(few) < len(pixels)
    assert [bool(like(tile(few, n), COLOURS[0]).any()) for n in range(8)] == [True] * 5 + [False] * 3


def test_a_case_that_cannot_be_read_leaves_its_place_to_say_so(tmp_path: Path) -> None:
    def read() -> Volume:
        raise BrokenImageError("a.png: is coloured")

    pixels = draw(tmp_path, [LabelledCase("a", 1, read), LabelledCase("b", 1, volume)])
    assert like(tile(pixels, 0), "#f87171").any()
    assert not like(tile(pixels, 1), "#f87171").any()


def test_structures_that_fill_everything_and_boxes_that_are_no_squares(tmp_path: Path) -> None:
    def read() -> Volume:
        full = np.ones((1, 30, 60), dtype=np.uint8)
        return Volume(np.zeros((1, 30, 60, 3), dtype=np.uint8), full, (1.0, 1.0, 2.0), (-15, 0, 60, 60))

    rows, _ = np.nonzero(like(tile(draw(tmp_path, [LabelledCase("a", 1, read)]), 0), COLOURS[0]))
    assert np.allclose([rows.min() / (TILE * DOTS), rows.max() / (TILE * DOTS)], [15 / 60, 45 / 60], atol=0.015)


def test_any_name_can_be_written(tmp_path: Path) -> None:
    names = ["p1/$x_1$ $\\nosuch$", "眼底 7", "long " * 30, "a\\frac{", "[b]"]
    draw(tmp_path, [LabelledCase(name, 1, volume) for name in names], {f"class {k} $": (k,) for k in range(1, 30)})


def test_one_file_for_each_domain_and_progress(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    domains = {"day": [LabelledCase("a", 1, volume)], "night": [LabelledCase("a", 1, volume)]}
    files = draw_sheets("mine", domains, DISC, tmp_path, lambda done, of: told.append((done, of)))
    assert [file.name for file in files] == ["mine-day.png", "mine-night.png"]
    assert told == [(1, 2), (2, 2)]
    assert draw_sheets("mine", {}, DISC, tmp_path) == []


@pytest.mark.parametrize("side", [401, 1600])
def test_large_photographs_are_drawn_smaller(tmp_path: Path, side: int) -> None:
    def read() -> Volume:
        mask = np.zeros((1, side, side), dtype=np.uint8)
        mask[:, : side // 2] = 2
        return Volume(np.full((1, side, side, 3), 60, dtype=np.uint8), mask, (1.0, 1.0, 1.0), full_box(side, side))

    seen = tile(draw(tmp_path, [LabelledCase("a", 1, read)]), 0)
    rows, _ = np.nonzero(like(seen, COLOURS[1]))
    assert abs(rows.max() / len(seen) - 0.5) < 0.02
