"""What training does to an image, each against what can be computed by hand or counted."""

import colorsys
from itertools import product

import numpy as np
import pytest
from PIL import Image

from trueup.data.transforms import TRANSFORMS, crop_box, domainbed, shift_and_flip


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height + width).integers(1, 256, size=(height, width, 3), dtype=np.uint8)


def plain(colour: tuple[int, int, int], side: int = 8) -> np.ndarray:
    return np.full((side, side, 3), colour, dtype=np.uint8)


# All of them


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shape", [(32, 32), (20, 50), (70, 31), (3, 90), (1, 1)])
def test_the_result_is_a_square_of_bytes(name: str, shape: tuple[int, int]) -> None:
    for seed in range(5):
        out = TRANSFORMS[name](noise(*shape), 32, np.random.default_rng(seed))
        assert out.shape == (32, 32, 3)
        assert out.dtype == np.uint8


@pytest.mark.parametrize("name", TRANSFORMS)
def test_all_chance_comes_from_the_stream_that_is_given(name: str) -> None:
    image = noise(40, 50)
    before = image.copy()
    np.random.seed(0)
    first = [TRANSFORMS[name](image, 32, rng) for rng in [np.random.default_rng(5)] for _ in range(4)]
    np.random.seed(1)
    again = [TRANSFORMS[name](image, 32, rng) for rng in [np.random.default_rng(5)] for _ in range(4)]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert np.array_equal(image, before)
    if name != "none":
        assert len({out.tobytes() for out in first}) == 4


def test_a_read_only_image_will_do() -> None:
    image = noise(40, 40)
    image.setflags(write=False)  # as decoded images are
    for transform in TRANSFORMS.values():
        transform(image, 32, np.random.default_rng(0))


# None


def test_none_resizes_as_pillow_does_and_draws_nothing() -> None:
    image, rng = noise(20, 30), np.random.default_rng(0)
    expected = np.asarray(Image.fromarray(image).resize((16, 16), Image.Resampling.BILINEAR))
    assert np.array_equal(TRANSFORMS["none"](image, 16, rng), expected)
    assert np.array_equal(TRANSFORMS["none"](image[:20, :20], 20, rng), image[:20, :20])
    assert rng.random() == np.random.default_rng(0).random()


# Shift


def test_a_shift_is_one_of_the_81_crops_or_its_mirror_image_and_all_of_them_come() -> None:
    image = noise(6, 6)
    crops = {}
    for top, left, mirrored in product(range(-4, 5), range(-4, 5), (False, True)):
        crop = np.zeros_like(image)  # black where the image is moved out
        for row, column in product(range(6), range(6)):
            if 0 <= row + top < 6 and 0 <= column + left < 6:
                crop[row, 5 - column if mirrored else column] = image[row + top, column + left]
        crops[crop.tobytes()] = (top, left, mirrored)
    assert len(crops) == 162
    rng = np.random.default_rng(0)
    drawn = [crops[shift_and_flip(image, 6, rng).tobytes()] for _ in range(3000)]
    assert set(drawn) == set(crops.values())
    assert 0.45 < np.mean([mirrored for _, _, mirrored in drawn]) < 0.55


# Domainbed: the crop


@pytest.mark.parametrize("shape", [(600, 600), (500, 700), (700, 500), (601, 907)])
def test_a_crop_has_70_to_100_percent_and_sides_from_3_to_4_up_to_4_to_3(shape: tuple[int, int]) -> None:
    height, width = shape
    rng = np.random.default_rng(0)
    boxes = np.array([crop_box(height, width, rng) for _ in range(2000)])
    top, left, h, w = boxes.T
    if height == width:
        assert len(np.unique(h)) > 50
    chosen = ~((h == min(shape)) & (w == min(shape)))  # what does not fit in ten draws is the middle square
    assert chosen.mean() > 0.7
    assert (boxes >= 0).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()
    area, ratio = (h * w / (height * width))[chosen], (w / h)[chosen]
    assert 0.7 - 0.003 <= area.min() < 0.71
    assert area.max() <= 1
    assert ratio.min() >= 3 / 4 - 0.003
    assert ratio.max() <= 4 / 3 + 0.003


def test_crops_of_a_square_reach_every_side_and_shape() -> None:
    rng = np.random.default_rng(1)
    boxes = np.array([crop_box(100, 100, rng) for _ in range(3000)])
    top, left, h, w = boxes.T
    assert top.min() == left.min() == 0
    assert (top + h).max() == (left + w).max() == 100
    assert (h * w).max() > 9500
    assert (w / h).min() < 0.77
    assert (w / h).max() > 1.3
    assert abs((w > h).mean() - 0.5) < 0.05
    assert abs((top + h / 2).mean() - 50) < 0.5
    assert abs((left + w / 2).mean() - 50) < 0.5


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((10, 1000), (0, 493, 10, 13)),
        ((1000, 10), (493, 0, 13, 10)),
        ((1, 8), (0, 3, 1, 1)),
        ((100, 300), (0, 83, 100, 133)),
    ],
)
def test_of_a_very_long_image_the_middle_is_taken(shape: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    assert crop_box(*shape, np.random.default_rng(0)) == box


def test_only_the_crop_is_seen() -> None:
    image = np.zeros((10, 1000, 3), dtype=np.uint8)
    image[:, 493:506] = 100
    out = domainbed(image, 8, np.random.default_rng(0))
    assert len(np.unique(out)) == 1
    assert 70 <= out[0, 0, 0] <= 130


# Domainbed: the colours


def test_a_grey_wall_changes_by_the_brightness_alone() -> None:
    rng = np.random.default_rng(0)
    outs = [domainbed(plain((100, 100, 100)), 8, rng) for _ in range(200)]
    assert all(len(np.unique(out)) == 1 for out in outs)
    level = np.array([out[0, 0, 0] for out in outs], dtype=int)
    assert 69 <= level.min() < 75
    assert 125 < level.max() <= 131


def test_hue_moves_by_three_tenths_saturation_changes_and_grey_comes_one_time_in_ten() -> None:
    rng = np.random.default_rng(0)
    outs = np.array([domainbed(plain((140, 100, 100), 4), 4, rng)[0, 0] for _ in range(1000)], dtype=int)
    grey = np.ptp(outs, axis=1) == 0
    assert 70 <= grey.sum() <= 130
    hues = np.array([colorsys.rgb_to_hsv(*(colour / 255))[0] for colour in outs[~grey]])
    turn = (hues + 0.5) % 1 - 0.5  # red is hue 0
    assert np.abs(turn).max() < 0.32
    assert turn.min() < -0.27
    assert turn.max() > 0.27
    # Colour against light was 40 to 113, up to 127 in other hues; contrast alone makes 0.22 to 0.46 of it.
    strength = np.ptp(outs[~grey], axis=1) / outs[~grey].mean(axis=1)
    assert strength.min() < 0.2
    assert strength.max() > 0.5


def test_contrast_changes_about_the_mean() -> None:
    halves = np.full((64, 64, 3), 80, dtype=np.uint8)
    halves[32:] = 120
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(200):
        out = domainbed(halves, 32, rng).astype(int)[..., 0]
        ratios.append((out.max() - out.min()) / out.mean())
    assert min(ratios) < 0.33  # 0.4 before
    assert max(ratios) > 0.47


def test_every_other_image_is_mirrored() -> None:
    ramp = np.repeat(np.linspace(50, 150, 64).astype(np.uint8)[None, :, None], 64, axis=0).repeat(3, axis=2)
    rng = np.random.default_rng(0)
    outs = [domainbed(ramp, 16, rng).astype(int) for _ in range(300)]
    mirrored = [out[:, 0].mean() > out[:, -1].mean() for out in outs]
    assert 0.4 < np.mean(mirrored) < 0.6
    assert all(np.ptp(out[:, 0]) <= 1 for out in outs)  # never turned upside down or on its side


def test_the_stronger_set_changes_the_image() -> None:
    image = noise(32, 32)
    rng = np.random.default_rng(0)
    differences = [np.abs(domainbed(image, 32, rng).astype(int) - image).mean() for _ in range(20)]
    assert min(differences) > 5
