"""Corruptions: what holds for all of them, and each one against what can be computed by hand."""

import io

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from trueup.data.corruptions import CORRUPTIONS, _gaussian, corrupt

BLURS = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur")
WITHOUT_CHANCE = ("brightness", "contrast", "defocus_blur", "zoom_blur", "pixelate", "jpeg_compression")
RANDOM = tuple(name for name in CORRUPTIONS if name not in WITHOUT_CHANCE)
SEVERITIES = (1, 2, 3, 4, 5)


def scene(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A gradient, stripes, discs with hard edges and some texture: what photographs are made of."""
    rng = np.random.default_rng(seed)
    side = min(height, width)
    y, x = np.mgrid[:height, :width] / side
    turn = rng.uniform(0, np.pi)
    ramp = np.cos(turn) * x + np.sin(turn) * y
    image = 0.45 + 0.25 * rng.uniform(-1, 1, 3) * ramp[..., None]
    image += 0.1 * np.sign(np.sin(2 * np.pi * 3 * ramp))[..., None] * rng.uniform(0, 1, 3)
    for _ in range(5):
        cy, cx, radius = *rng.uniform(0, 1, 2), rng.uniform(0.1, 0.25)
        image[(y - cy) ** 2 + (x - cx) ** 2 < radius**2] = rng.uniform(0, 1, 3)
    texture = ndimage.gaussian_filter(rng.standard_normal((height, width, 1)), (side / 60, side / 60, 0))
    image = image + 0.06 * texture / texture.std()
    return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)


def grey(value: int, side: int = 64) -> np.ndarray:
    return np.full((side, side, 3), value, dtype=np.uint8)


def effect(name: str, severity: int, images: list[np.ndarray]) -> float:
    outs = [corrupt(image, name, severity, index=i) for i, image in enumerate(images)]
    return float(np.mean([np.abs(out.astype(float) - image).mean() for out, image in zip(outs, images, strict=True)]))


def test_the_fifteen_names_in_the_usual_order() -> None:
    assert len(CORRUPTIONS) == 15
    assert CORRUPTIONS[:3] == ("gaussian_noise", "shot_noise", "impulse_noise")
    assert CORRUPTIONS[3:7] == BLURS
    assert CORRUPTIONS[7:11] == ("snow", "frost", "fog", "brightness")
    assert CORRUPTIONS[11:] == ("contrast", "elastic_transform", "pixelate", "jpeg_compression")


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severity_zero_is_a_copy(name: str) -> None:
    image = scene(32, 32)
    out = corrupt(image, name, 0)
    assert np.array_equal(out, image)
    assert not np.shares_memory(out, image)


@pytest.mark.parametrize("shape", [(8, 8), (32, 32), (33, 47), (64, 64), (9, 200), (260, 31)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_any_size_keeps_shape_and_dtype_and_leaves_the_input_alone(name: str, shape: tuple[int, int]) -> None:
    image = scene(*shape)
    image.flags.writeable = False
    before = image.copy()
    for severity in SEVERITIES:
        out = corrupt(image, name, severity)
        assert (out.shape, out.dtype) == (image.shape, np.uint8)
        assert out.flags.writeable
        assert not np.array_equal(out, image), f"severity {severity} does nothing"
    assert np.array_equal(image, before)


def test_black_and_white_are_clipped_and_do_not_wrap_around() -> None:
    assert corrupt(grey(0), "gaussian_noise", 1).max() < 6 * 0.08 * 255
    assert corrupt(grey(255), "gaussian_noise", 1).min() > 255 - 6 * 0.08 * 255
    for name in ("snow", "brightness", "contrast", *BLURS):
        assert (corrupt(grey(255), name, 5) == 255).all(), name


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_seed_and_index_fix_the_draws(name: str) -> None:
    image = scene(32, 32)
    out = corrupt(image, name, 3, seed=1, index=2)
    assert np.array_equal(out, corrupt(image, name, 3, seed=1, index=2))
    for other in ({"seed": 1, "index": 3}, {"seed": 3, "index": 2}, {"seed": 2, "index": 1}):
        assert np.array_equal(out, corrupt(image, name, 3, **other)) == (name not in RANDOM)


def test_order_of_calls_does_not_matter() -> None:
    image = scene(32, 32)
    calls = [(name, severity) for name in CORRUPTIONS for severity in SEVERITIES]
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    first = {call: corrupt(image, *call) for call in calls}
    assert np.array_equal(np.random.get_state()[1], before), "the global stream is not for us"
    np.random.seed(1)
    for call in reversed(calls):
        assert np.array_equal(corrupt(image, *call), first[call]), call


@pytest.mark.parametrize(("side", "count"), [(32, 12), (64, 6), (224, 1)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_effect_grows_with_severity(name: str, side: int, count: int) -> None:
    images = [scene(side, side, seed) for seed in range(count)]
    effects = [effect(name, severity, images) for severity in SEVERITIES]
    if name == "elastic_transform":  # the published constants go from large waves to small ones
        assert effects[1] > effects[0]
        effects = effects[2:]
    assert np.all(np.diff(effects) > 0), effects
    assert effects[0] > 0.8, "hardly to be seen"


@pytest.mark.parametrize("name", [n for n in CORRUPTIONS if n not in ("pixelate", "jpeg_compression")])  # no lengths
def test_small_images_are_corrupted_comparably(name: str) -> None:
    small = effect(name, 3, [scene(32, 32, seed) for seed in range(8)])
    large = effect(name, 3, [scene(224, 224, seed) for seed in range(2)])
    assert 1 / 2.5 < small / large < 2.5


def test_gaussian_noise_has_its_standard_deviation() -> None:
    for severity, sigma in zip((1, 2), (0.08, 0.12), strict=True):
        out = corrupt(grey(128), "gaussian_noise", severity) / 255
        assert out.std() == pytest.approx(sigma, rel=0.03)
        assert out.mean() == pytest.approx(128 / 255, abs=0.004)


def test_severities_share_their_draws() -> None:
    one, two = (corrupt(grey(128), "gaussian_noise", s).astype(float) - 128 for s in (1, 2))
    assert np.abs(two - 1.5 * one)[np.abs(two) < 100].max() <= 1.3  # rounding: 0.5 and 1.5 times 0.5


def test_shot_noise_has_the_variance_of_photons() -> None:
    for value in (50, 100):
        out = corrupt(grey(value), "shot_noise", 1) / 255
        assert out.mean() == pytest.approx(value / 255, rel=0.02)
        assert out.var() == pytest.approx(value / 255 / 60, rel=0.06)


def test_impulse_noise_hits_its_share_with_salt_and_pepper() -> None:
    hit_before = np.zeros((64, 64, 3), dtype=bool)
    for severity, amount in zip(SEVERITIES, (0.03, 0.06, 0.09, 0.17, 0.27), strict=True):
        out = corrupt(grey(128), "impulse_noise", severity)
        hit = out != 128
        assert set(np.unique(out)) == {0, 128, 255}
        assert hit.mean() == pytest.approx(amount, abs=0.012)
        assert (out[hit] == 255).mean() == pytest.approx(0.5, abs=0.1)
        assert (hit >= hit_before).all()
        hit_before = hit


@pytest.mark.parametrize("name", [*BLURS, "elastic_transform", "pixelate", "contrast"])
def test_a_constant_image_stays_constant(name: str) -> None:
    for value in (1, 77, 254):
        assert (corrupt(grey(value, 40), name, 5) == value).all()


@pytest.mark.parametrize(("name", "off"), [("defocus_blur", 0.05), ("glass_blur", 0.5), ("motion_blur", 1.5)])
def test_blurs_keep_the_mean(name: str, off: float) -> None:
    for seed in range(4):
        image = scene(64, 80, seed)
        for severity in SEVERITIES:
            assert corrupt(image, name, severity).mean() == pytest.approx(image.mean(), abs=off)


@pytest.mark.parametrize("side", [32, 64, 224])
@pytest.mark.parametrize("name", BLURS)
def test_blurs_lower_the_local_variance(name: str, side: int) -> None:
    def local_variance(image: np.ndarray) -> float:
        x, size = image.astype(float), (5, 5, 1)
        return float((ndimage.uniform_filter(x**2, size) - ndimage.uniform_filter(x, size) ** 2).mean())

    image = scene(side, side)
    for severity in SEVERITIES:
        assert local_variance(corrupt(image, name, severity)) < 0.97 * local_variance(image)


@pytest.mark.parametrize(("side", "reach"), [(224, 10), (112, 5)])
def test_defocus_reaches_as_far_as_its_radius(side: int, reach: int) -> None:
    image = grey(0, side)
    image[:, side // 2 :] = 200
    row = corrupt(image, "defocus_blur", 5)[side // 2, :, 0].astype(int)
    assert (row[: side // 2 - reach - 2] == 0).all()
    assert (row[side // 2 + reach + 2 :] == 200).all()
    assert (np.diff(row[side // 2 - reach : side // 2 + reach]) > 0).all()
    assert row[side // 2 - 1] + row[side // 2] == pytest.approx(200, abs=1)  # a disk is symmetric


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2, 5])
def test_the_gaussian_has_its_variance_even_below_a_pixel(sigma: float) -> None:
    dot = np.zeros((81, 81))
    dot[40, 40] = 1
    profile = _gaussian(dot, sigma).sum(axis=0)
    assert profile.sum() == pytest.approx(1)
    assert (profile * (np.arange(81) - 40) ** 2).sum() == pytest.approx(sigma**2)


def test_glass_spreads_an_edge_by_its_two_blurs_and_all_its_shifts() -> None:
    image = grey(0, 224)
    image[:, 112:] = 200
    constants = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
    for severity, (sigma, shift, times) in zip(SEVERITIES, constants, strict=True):
        spread = np.diff(corrupt(image, "glass_blur", severity)[..., 0].mean(axis=0)) / 200
        variance = (spread * (np.arange(223) - 111) ** 2).sum()
        interpolation = 1 / 6
        assert variance == pytest.approx(2 * sigma**2 + times * (shift**2 / 3 + interpolation), rel=0.1)


def test_glass_shrinks_more_slowly_than_the_image() -> None:
    image = grey(0, 32)
    image[:, 16:] = 200
    rows = np.concatenate([corrupt(image, "glass_blur", 1, index=i)[..., 0] for i in range(20)])
    variance = (np.diff(rows.mean(axis=0)) / 200 * (np.arange(31) - 15) ** 2).sum()
    shift = 7 ** (-2 / 3)  # a shift by u < 1 moves the share |u| of a pixel by one; |u| is shift / 2 on average
    assert variance == pytest.approx(2 * (0.7 / 7) ** 2 + 2 * shift / 2, rel=0.1)


def test_motion_is_more_level_than_steep() -> None:
    upright = grey(0, 96)
    upright[:, 48:] = 200
    across = [effect("motion_blur", s, [upright] * 6) for s in SEVERITIES]
    along = [effect("motion_blur", s, [upright.transpose(1, 0, 2)] * 6) for s in SEVERITIES]
    assert np.all(np.array(across) > 1.2 * np.array(along))


def test_motion_leaves_a_trail_on_one_side() -> None:
    image = grey(0, 224)
    image[:, 112] = 255
    out = corrupt(image, "motion_blur", 3)[112, :, 0].astype(int)
    assert (out[:110] == 0).all()
    assert (out[113:125] > 0).all()
    assert (np.diff(out[113:130]) <= 0).all()


def test_zoom_keeps_the_centre_and_blurs_the_rim() -> None:
    image = np.random.default_rng(0).integers(0, 256, (65, 65, 3), dtype=np.uint8)
    change = np.abs(corrupt(image, "zoom_blur", 5).astype(float) - image).mean(axis=2)
    assert change[32, 32] == 0
    assert change[31:34, 31:34].mean() < 0.5 * change[:8].mean()


def test_snow_whitens_and_falls_on_black() -> None:
    for severity, mix in zip(SEVERITIES, (0.8, 0.7, 0.7, 0.65, 0.55), strict=True):
        out = corrupt(grey(0, 96), "snow", severity)
        assert (out == out[..., :1]).all()
        assert out.min() == pytest.approx((1 - mix) * 0.5 * 255, abs=6)
        assert out.max() > 150


def test_frost_is_bluish_and_as_bright_as_its_weight() -> None:
    for side in (32, 224):
        for severity, weight in zip(SEVERITIES, (0.4, 0.6, 0.7, 0.7, 0.75), strict=True):
            red, _, blue = np.moveaxis(corrupt(grey(0, side), "frost", severity).astype(int), -1, 0)
            assert blue.max() == pytest.approx(weight * 255, rel=0.15)
            assert (blue >= red).all()
            assert 0.2 < (blue > 0.1 * weight * 255).mean() < 0.95


def test_fog_runs_from_its_darkest_to_the_brightest_of_the_image() -> None:
    v = 200 / 255
    for severity, amount in zip(SEVERITIES, (1.5, 2, 2.5, 2.5, 3), strict=True):
        out = corrupt(grey(200), "fog", severity)  # 64 is a power of two: the whole fractal is seen
        assert out.max() == 200
        assert out.min() == round(255 * v * v / (v + amount))


def test_fog_gets_rougher() -> None:
    steps = [np.abs(np.diff(corrupt(grey(200), "fog", s).astype(float), axis=0)).mean() for s in (2, 3, 4, 5)]
    assert np.all(np.diff(steps) > 0)


def test_brightness_adds_to_the_value_and_keeps_hue_and_saturation() -> None:
    for severity in SEVERITIES:
        for value in (0, 51, 120, 250):
            expected = min(value + 25.5 * severity, 255)
            assert np.abs(corrupt(grey(value), "brightness", severity) - expected).max() <= 0.5 + 1e-9
    image = grey(0)
    image[:] = (98, 49, 0)
    assert (corrupt(image, "brightness", 4) == (200, 100, 0)).all()  # 98 + 102, and its half


def test_contrast_draws_every_channel_to_its_mean() -> None:
    image = grey(100)
    image[:32, :, 0], image[32:, :, 0], image[..., 2] = 50, 150, 30
    for severity, factor in zip(SEVERITIES, (0.4, 0.3, 0.2, 0.1, 0.05), strict=True):
        out = corrupt(image, "contrast", severity)
        assert np.abs(out[:32, :, 0] - (100 - 50 * factor)).max() <= 0.5
        assert np.abs(out[32:, :, 0] - (100 + 50 * factor)).max() <= 0.5
        assert (out[..., 1:] == (100, 30)).all()


def test_elastic_moves_pixels_but_makes_no_new_values() -> None:
    image = grey(40)
    image[16:48, 16:48] = 180
    for severity in SEVERITIES:
        out = corrupt(image, "elastic_transform", severity)
        assert (out.min(), out.max()) == (40, 180)
        assert (out == out[..., :1]).all()


def test_pixelate_makes_blocks_of_means() -> None:
    image = scene(64, 32)
    out = corrupt(image, "pixelate", 5)
    blocks = image.reshape(16, 4, 8, 4, 3)
    assert (out.reshape(16, 4, 8, 4, 3) == out[::4, ::4].reshape(16, 1, 8, 1, 3)).all()
    assert np.abs(out[::4, ::4] - blocks.mean(axis=(1, 3))).max() <= 1


def test_jpeg_is_the_one_of_pillow() -> None:
    image = scene(48, 64)
    for severity, quality in zip(SEVERITIES, (25, 18, 15, 10, 7), strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        assert np.array_equal(corrupt(image, "jpeg_compression", severity), np.asarray(Image.open(file)))


def test_wrong_arguments_say_what_to_do() -> None:
    image = grey(0, 16)
    with pytest.raises(ValueError, match=r"'gausian_noise'; did you mean 'gaussian_noise'\?.*jpeg_compression"):
        corrupt(image, "gausian_noise", 1)
    with pytest.raises(ValueError, match=r"'xyz'\. There are: gaussian_noise"):
        corrupt(image, "xyz", 1)
    for severity in (-1, 6, 2.5):
        with pytest.raises(ValueError, match=f"severity is {severity}; give 0"):
            corrupt(image, "fog", severity)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype float64; give uint8"):
        corrupt(image / 255, "fog", 1)
    for shape in ((16, 16), (3, 16, 16), (16, 16, 4), (7, 16, 3)):
        with pytest.raises(ValueError, match=rf"shape \({shape[0]}, .*give \(H, W, 3\)"):
            corrupt(np.zeros(shape, dtype=np.uint8), "fog", 0)
