import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trueup import views
from trueup.views import Normalization, augmix_view, cotta_view, make_normalization, moco_view, roid_view, weak_view

View = Callable[..., Tensor]
PIXELS = Normalization((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
VIEWS = pytest.mark.parametrize("view", [cotta_view, augmix_view, moco_view, roid_view])
STRONG = pytest.mark.parametrize("view", [cotta_view, roid_view])
RANGES = pytest.mark.parametrize("pixels", [PIXELS, None], ids=["range", "free"])


def pictures(n: int, channels: int = 3, height: int = 12, width: int = 12, seed: int = 0) -> Tensor:
    """Values in [0, 1] that reach both ends."""
    x = torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(seed))
    return (1.6 * x - 0.3).clamp(0, 1)


def seen(view: View, x: Tensor, *args: Normalization | None, seed: int = 0, **kwargs: float) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return view(x, *args, **kwargs)


@VIEWS
@RANGES
@pytest.mark.parametrize("shape", [(5, 3, 12, 12), (2, 3, 7, 11), (3, 1, 9, 4), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_shape_and_dtype_stay(
    view: View, pixels: Normalization | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    pixels = Normalization((0.5,), (0.2,)) if pixels is not None and shape[1] == 1 else pixels
    x = pictures(*shape).to(dtype)
    before = x.clone()
    answer = seen(view, x, pixels)
    assert answer.shape == x.shape
    assert answer.dtype == dtype
    assert answer.isfinite().all()
    assert torch.equal(x, before)


@VIEWS
def test_values_stay_in_range(view: View) -> None:
    x = PIXELS.from_unit(pictures(64))
    raw = seen(view, x, PIXELS).double()
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (PIXELS.mean, PIXELS.std))
    unit = raw * std + mean
    assert -1e-6 < float(unit.min()) < 0.05
    assert 0.95 < float(unit.max()) < 1 + 1e-6


@VIEWS
def test_without_a_range_it_does_not_matter_how_channels_were_normalised(view: View) -> None:
    """view(a x + b) = a view(x) + b for each channel: nothing is clipped, and black and white mean nothing."""
    x = pictures(16).double()
    a = torch.tensor([2.0, -50.0, 0.1], dtype=torch.float64).view(1, 3, 1, 1)
    b = torch.tensor([-7.0, 100.0, 3.0], dtype=torch.float64).view(1, 3, 1, 1)
    torch.testing.assert_close(seen(view, a * x + b), a * seen(view, x) + b, rtol=1e-9, atol=1e-9)


@VIEWS
@RANGES
def test_chance_is_torchs_random_state(view: View, pixels: Normalization | None) -> None:
    x = pictures(4)
    assert torch.equal(seen(view, x, pixels, seed=1), seen(view, x, pixels, seed=1))
    assert not torch.equal(seen(view, x, pixels, seed=1), seen(view, x, pixels, seed=2))


@VIEWS
@RANGES
def test_each_image_is_augmix_step_in_its_own_way(view: View, pixels: Normalization | None) -> None:
    answer = seen(view, pictures(1).repeat(16, 1, 1, 1), pixels).flatten(1)
    apart = torch.cdist(answer, answer) + torch.eye(16)
    assert float(apart.min()) > 1e-3


@pytest.mark.parametrize("view", [cotta_view, augmix_view])
@RANGES
def test_without_strength_images_stay(view: View, pixels: Normalization | None) -> None:
    x = pictures(8, height=9, width=13)
    x = x if pixels is None else pixels.from_unit(x)
    torch.testing.assert_close(seen(view, x, pixels, strength=0.0), x, rtol=1e-5, atol=1e-5)
    assert float((seen(view, x, pixels) - x).abs().mean()) > 0.02


@VIEWS
@RANGES
def test_both_precisions_draw_the_same(view: View, pixels: Normalization | None) -> None:
    """Smooth images, for a step of posterising or solarising may fall to either side of a rounded value."""
    ramp = torch.linspace(0.1, 0.6, 12).view(1, 1, 1, 12).expand(6, 3, 12, 12)
    single, double = seen(view, ramp, pixels), seen(view, ramp.double(), pixels)
    assert float((single.double() - double).abs().median()) < 1e-5
    assert float((single.double() - double).abs().mean()) < 1e-2


@pytest.mark.parametrize("view", [cotta_view, augmix_view, moco_view, roid_view, weak_view])
def test_what_is_no_image_is_refused(view: View) -> None:
    with pytest.raises(ValueError, match=r"images \(N, C, H, W\), not of \(4, 7\)"):
        view(torch.zeros(4, 7))


@VIEWS
@pytest.mark.parametrize(("given", "channels"), [(3, 1), (3, 4), (2, 3)])
def test_channels_that_do_not_fit_are_refused(view: View, given: int, channels: int) -> None:
    with pytest.raises(ValueError, match=f"of {given} channels, the images have {channels}: give one number"):
        view(pictures(2, channels), Normalization((0.5,) * given, (0.2,) * given))
    assert seen(view, pictures(2, channels), Normalization((0.5,), (0.2,))).shape == (2, channels, 12, 12)


@pytest.mark.parametrize(
    "value",
    [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), np.array(0.5), [0.5], np.array([0.5]),
     torch.tensor([0.5]), [np.float32(0.5)], (torch.tensor(0.5),)],
    ids=repr,
)  # fmt: skip
def test_numbers_of_any_kind(value: Any) -> None:
    pixels = make_normalization(value, value)
    assert pixels == Normalization((0.5,), (0.5,))
    assert type(pixels.mean[0]) is float


def test_one_number_for_each_channel() -> None:
    assert make_normalization(None, None) is None
    assert make_normalization((0, 1), torch.tensor([1, 2])) == Normalization((0.0, 1.0), (1.0, 2.0))


@pytest.mark.parametrize("value", ["0.5", b"0", "abc", True, [0.5, "0.5"], [[0.5]], [None], torch.ones(2, 2)], ids=repr)
def test_what_is_no_number_is_refused(value: Any) -> None:
    for name, given in (("mean", (value, 0.5)), ("std", (0.5, value))):
        with pytest.raises(ValueError, match=rf"(?s){name}=.* must be a number or one per channel, such as 0\.5"):
            make_normalization(*given)


@pytest.mark.parametrize("given", [(0.5, None), (None, 0.5), ((0.5, 0.5), 0.5), ((), ()), (0.5, 0.0), (math.nan, 1.0)])
def test_mean_and_std_that_mean_nothing_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="mean"):
        make_normalization(*given)


@pytest.mark.parametrize("view", [cotta_view, moco_view, roid_view, weak_view])
def test_about_half_of_the_views_are_mirrored(view: View) -> None:
    ramp = torch.linspace(0, 1, 16).view(1, 1, 1, 16).expand(400, 1, 16, 16)
    answer = seen(view, ramp)
    falls = (answer[..., 0] > answer[..., -1]).float().mean(dim=(1, 2))
    assert set(falls.tolist()) == {0.0, 1.0}
    assert 0.4 < float(falls.mean()) < 0.6


@STRONG
def test_strong_views_turn_by_fifteen_degrees_at_most(view: View) -> None:
    """A plane stays a plane inside of the image: its slopes give the angle (mirrored or not) and the scale."""
    plane = torch.arange(40.0).double().expand(300, 1, 40, 40)
    middle = seen(view, plane)[:, 0, 16:24, 16:24]
    dx = (middle[:, 4, 5] - middle[:, 4, 3]).abs() / 2
    dy = (middle[:, 5, 4] - middle[:, 3, 4]) / 2
    angles = torch.atan2(dy, dx) * 180 / math.pi
    assert 13 < float(angles.abs().max()) <= 15 + 1e-6
    assert bool((angles > 5).any() and (angles < -5).any())


def planes(n: int, side: int) -> Tensor:
    """Images whose two channels are each pixel's column and row, from the middle."""
    along = torch.arange(side).double() - (side - 1) / 2
    return torch.stack([along.expand(side, side), along.unsqueeze(1).expand(side, side)]).expand(n, 2, side, side)


def mapped(view: Tensor) -> tuple[Tensor, Tensor]:
    """Of views of planes: the maps (N, 2, 2) of places in them to places in the images, and where the middle goes."""
    i = view.shape[2] // 2
    middle = view[:, :, i - 1 : i + 1, i - 1 : i + 1]
    across = (middle[..., 1] - middle[..., 0]).mean(dim=2)
    down = (middle[..., 1, :] - middle[..., 0, :]).mean(dim=2)
    return torch.stack([across, down], dim=2), middle.mean(dim=(2, 3))


def plain(x: Tensor, *_: object) -> Tensor:
    return x


def reaches(values: Tensor, low: float, high: float) -> bool:
    """Whether values come near to both ends and pass neither."""
    near = 0.03 * (high - low)
    ends = float(values.min()), float(values.max())
    return low - 1e-9 <= ends[0] < low + near and high - near < ends[1] <= high + 1e-9


@STRONG
def test_strong_views_are_scaled_and_moved_by_as_much_as_published(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 0.9 to 1.1; moved by a sixteenth of an image padded to twice its size. Contrast would change slopes."""
    monkeypatch.setattr(views, "_color_jitter", plain)
    matrix, middle = mapped(seen(view, planes(600, 40)))
    assert reaches(1 / torch.linalg.det(matrix).abs().sqrt(), 0.9, 1.1)
    for shift in middle.unbind(dim=1):
        assert reaches(shift, -40 / 8, 40 / 8)


def test_strong_views_are_blurred_by_half_a_pixel_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spot that is not moved: its neighbour has exp(-1 / 2σ²) of its value."""
    monkeypatch.setattr(views, "_color_jitter", plain)
    monkeypatch.setattr(views, "_warp", plain)
    x = torch.zeros(400, 1, 9, 9, dtype=torch.float64)
    x[:, :, 4, 4] = 1.0
    answer = seen(cotta_view, x)[:, 0, 4]
    sigma = (-2 * (answer[:, 5] / answer[:, 4]).clamp(min=1e-300).log()).rsqrt()
    assert 0.49 < float(sigma.max()) <= 0.5 + 1e-9
    assert float(sigma.min()) < 0.05


def test_strong_views_have_as_much_noise_as_published() -> None:
    """On flat images nothing else differs from pixel to pixel."""
    flat = torch.full((40, 1, 32, 32), 0.4, dtype=torch.float64)
    answer = seen(cotta_view, flat, Normalization((0.0,), (1.0,)))
    assert 0.0048 < float(answer.std(dim=(1, 2, 3)).square().mean().sqrt()) < 0.0052


def test_roids_views_have_no_noise_and_no_blur(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat images stay flat; a spot that is not moved stays a spot."""
    flat = torch.full((40, 1, 32, 32), 0.4, dtype=torch.float64)
    answer = seen(roid_view, flat, Normalization((0.0,), (1.0,)))
    assert float(answer.std(dim=(1, 2, 3)).max()) < 1e-12
    monkeypatch.setattr(views, "_color_jitter", plain)
    monkeypatch.setattr(views, "_warp", plain)
    x = torch.zeros(20, 1, 9, 9, dtype=torch.float64)
    x[:, :, 4, 4] = 1.0
    assert torch.equal(seen(roid_view, x), x)


@pytest.mark.parametrize(("padding", "mode"), [("border", "edge"), ("reflection", "reflect")])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 12)])
def test_what_is_seen_beyond_the_edge(padding: str, mode: Any, height: int, width: int) -> None:
    """Bilinear sampling, pixel by pixel, of an image that numpy has padded."""
    x = pictures(1, height=height, width=width).double()
    angle, shift = 0.3, torch.tensor([[0.1, -0.12]], dtype=torch.float64)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    answer = views._warp(x, turn.unsqueeze(0) / 0.9, shift, padding)[0]
    wide = np.pad(x[0].numpy(), ((0, 0), (height - 1,) * 2, (width - 1,) * 2), mode=mode)
    for i in range(height):
        for j in range(width):
            away = turn.numpy() / 0.9 @ np.array([j - (width - 1) / 2, i - (height - 1) / 2])
            column = away[0] + (width - 1) / 2 + 0.1 * width + width - 1
            row = away[1] + (height - 1) / 2 - 0.12 * height + height - 1
            m, n = int(row), int(column)
            top = wide[:, m, n] * (n + 1 - column) + wide[:, m, n + 1] * (column - n)
            low = wide[:, m + 1, n] * (n + 1 - column) + wide[:, m + 1, n + 1] * (column - n)
            expected = top * (m + 1 - row) + low * (row - m)
            assert answer[:, i, j].tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_roids_views_reflect_and_cottas_repeat_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(views, "_warp", lambda x, matrix, shift, padding="border": used.append(padding) or x)
    seen(cotta_view, pictures(2))
    seen(roid_view, pictures(2))
    assert used == ["border", "reflection"]


def colours_apart(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Images of one colour in two shades, and what a view makes of them, change by change."""
    x = torch.tensor([0.5, 0.3, 0.2]).double().view(1, 3, 1, 1) * torch.ones(800, 3, 2, 2, dtype=torch.float64)
    x[..., 0] *= 1.2
    got: dict[str, Tensor] = {}

    def apart(x: Tensor, colours: list[tuple[View, float]], _: object) -> Tensor:
        got.update({change.__name__: change(x, strength) for change, strength in colours})
        return x

    monkeypatch.setattr(views, "_color_jitter", apart)
    return x, got


@STRONG
def test_colours_of_strong_views_change_by_as_much_as_published(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brightness by 0.4, contrast by 0.3, saturation by 0.5, hue by 0.06 of a circle, gamma by 0.3."""
    x, got = colours_apart(monkeypatch)
    seen(view, x, Normalization((0.0,), (1.0,)))
    luminance = (0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]).expand_as(x)
    middle = x.mean(dim=(2, 3), keepdim=True)
    for name, zero, by in (("_brightness", 0.0, 0.4), ("_contrast", middle, 0.3), ("_saturation", luminance, 0.5)):
        assert reaches((got[name] - zero) / (x - zero), 1 - by, 1 + by), name
    assert reaches(got["_gamma"].log() / x.log(), 0.7, 1.3)
    a, b = (v - v.mean(dim=1, keepdim=True) for v in (x, got["_hue"]))
    turned = torch.acos(((a * b).sum(dim=1) / a.norm(dim=1) / b.norm(dim=1)).clamp(-1, 1)) / (2 * math.pi)
    assert 0.058 < float(turned.max()) <= 0.06 + 1e-6
    assert len(got) == 5


def test_chains_have_one_to_three_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length in a third of the chains, three chains for each image, and every change as often as any other."""
    steps: list[Tensor] = []

    def note(x: Tensor, change: Tensor, tones: object) -> Tensor:
        steps.append(change.clone())
        return x

    monkeypatch.setattr(views, "_augmix_step", note)
    seen(augmix_view, pictures(400), PIXELS)
    changes = torch.stack(steps)
    assert changes.shape == (3, 1200)
    lengths = (changes >= 0).sum(dim=0)
    for length in (1, 2, 3):
        assert 0.29 < float((lengths == length).double().mean()) < 0.38
    assert bool((changes[0] >= 0).all())
    counts = changes[changes >= 0].bincount(minlength=9)
    assert len(counts) == 9
    assert float((counts / counts.sum() - 1 / 9).abs().max()) < 0.025


LIMITS = [("turned", 9 * math.pi / 180), ("sheared", 0.09), ("sheared down", 0.09), ("moved", 4.0), ("moved down", 4.0)]


@pytest.mark.parametrize("change", range(5), ids=[name for name, _ in LIMITS])
def test_how_far_one_change_of_a_chain_goes(change: int) -> None:
    """By up to 9 degrees, by slopes up to 0.09, by a tenth of 40 pixels: AugMix at its severity of 3."""
    most = LIMITS[change][1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        answer = views._augmix_step(planes(600, 40), torch.full((600,), change), ())
    matrix, middle = mapped(answer)
    still = torch.eye(2, dtype=torch.float64).expand(600, 2, 2).clone()
    if change == 0:
        angle = torch.atan2(matrix[:, 1, 0], matrix[:, 0, 0])
        assert reaches(angle, -most, most)
        still = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).reshape(-1, 2, 2)
    elif change < 3:
        row, column = change - 1, 2 - change
        assert reaches(matrix[:, row, column], -most, most)
        still[:, row, column] = matrix[:, row, column]
    else:
        assert reaches(middle[:, change - 3], -most, most)
        middle = middle[:, 4 - change]  # the other way it stays
    torch.testing.assert_close(matrix, still)
    assert float(middle.abs().max()) < 1e-9


def moved(x: Tensor, right: int, down: int) -> Tensor:
    """An image seen so many pixels to the right and down of where it is, pixel by pixel; the edge goes on."""
    height, width = x.shape[-2:]
    rows = [min(max(i + down, 0), height - 1) for i in range(height)]
    columns = [min(max(j + right, 0), width - 1) for j in range(width)]
    return x[..., rows, :][..., columns]


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-3), (torch.float64, 1e-9), (torch.bfloat16, 0.2)])
def test_weak_views_are_moved_by_whole_pixels_and_mirrored(dtype: torch.dtype, slack: float) -> None:
    """A 14th of 28 by 16 pixels: up to two across and one down, mirrored or not, all of which occur."""
    x = pictures(1, height=16, width=28).to(dtype)
    before = x.clone()
    answer = seen(weak_view, x.expand(600, 3, 16, 28))
    assert answer.dtype == dtype
    assert torch.equal(x, before)
    every = [moved(x[0], i, j) for i in range(-2, 3) for j in (-1, 0, 1)]
    every = torch.stack([*every, *(view.flip(2) for view in every)])
    away = (answer.unsqueeze(1) - every).double().flatten(2).norm(dim=2)
    assert float(away.amin(dim=1).max()) < slack
    assert set(away.argmin(dim=1).tolist()) == set(range(30))


def test_weak_views_of_tiny_images_are_mirrored_at_most() -> None:
    x = pictures(40, height=5, width=6)
    answer = seen(weak_view, x)
    for mine, image in zip(answer, x, strict=True):
        assert min(float((mine - other).abs().max()) for other in (image, image.flip(2))) < 1e-5


def parts(least: float, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Where the parts of 500 images begin and end, in pixels (N, 2): two planes show the place of each pixel."""
    row, column = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = views._random_crop(torch.stack([row, column]).expand(500, 2, height, width), least)
    starts, ends = [], []
    for line in (x[:, 0, :, 0], x[:, 1, 0]):
        n = line.shape[1]
        before, after = line[:, n // 2 - 1], line[:, n // 2]  # at the middle, where no edge is repeated
        side, middle = n * (after - before), (before + after) / 2 + 0.5
        starts.append(middle - side / 2)
        ends.append(middle + side / 2)
    return torch.stack(starts, dim=1), torch.stack(ends, dim=1)


@pytest.mark.parametrize(("least", "height", "width"), [(0.2, 24, 24), (0.5, 24, 24), (0.2, 16, 32), (0.2, 40, 30)])
def test_parts_lie_inside_and_are_as_large_and_as_oblong_as_said(least: float, height: int, width: int) -> None:
    start, end = parts(least, height, width)
    size = torch.tensor([height, width]).double()
    assert bool((start > -1e-9).all() and (end < size + 1e-9).all())
    side = end - start
    inner = (side < size - 1e-9).all(dim=1)  # not cut down to the image's own side
    area, shape = (side.prod(dim=1) / size.prod())[inner], (side[:, 1] / side[:, 0])[inner]
    assert least - 1e-9 < float(area.min()) < 1.1 * least
    assert 3 / 4 - 1e-9 < float(shape.min()) < 0.8
    assert 1.25 < float(shape.max()) < 4 / 3 + 1e-9
    place = (start / (size - side))[inner]
    assert float((place.mean(dim=0) - 0.5).abs().max()) < 0.06
    assert float(place.min()) < 0.05
    assert float(place.max()) > 0.95


def test_not_cropped_a_spot_stays_and_is_blurred_by_up_to_two_pixels() -> None:
    """The sum of the spot and its surroundings stays, too; the spot's spread is the width of the Gaussian."""
    x = torch.zeros(400, 1, 31, 31, dtype=torch.float64)
    x[:, :, 15, 15] = 1.0
    answer = seen(moco_view, x, crop=1.0)
    torch.testing.assert_close(answer.sum(dim=(1, 2, 3)), torch.ones(400, dtype=torch.float64))
    spot = (answer - answer[:, :, :1, :1]).sum(dim=(1, 2))  # contrast changes what surrounds it
    away = torch.arange(-15, 16).double()
    assert float((spot @ away).abs().max()) < 1e-9
    spread = (spot @ away.square() / spot.sum(dim=1)).clamp(min=0).sqrt()
    assert 1.8 < float(spread.max()) < 2.0
    assert 0.4 < float((spread < 0.1).double().mean()) < 0.65


def test_how_often_strong_views_are_augmix_step_in_each_way() -> None:
    """Colours in four of five, grey in one of five, blurred in one of two: counted in halves of plain colours."""
    colours = torch.tensor([[0.6, 0.3, 0.4], [0.3, 0.4, 0.5]])
    x = colours.T.reshape(1, 3, 1, 2).repeat_interleave(8, dim=3).expand(1000, 3, 16, 16)
    answer = seen(moco_view, x, Normalization((0.0,), (1.0,)), crop=1.0)
    grey = (answer - answer[:, :1]).abs().amax(dim=(1, 2, 3)) < 1e-6
    assert 0.16 < float(grey.float().mean()) < 0.24
    blurred = (answer[:, :, 8, 0] - answer[:, :, 8, 7]).abs().amax(dim=1) > 1e-5  # far from the border, and at it
    assert 0.4 < float(blurred.float().mean()) < 0.52  # the narrowest do not show
    ends = torch.stack([answer[:, :, 8, 0], answer[:, :, 8, 15]], dim=1)[~grey]
    away = [(ends - either).abs().amax(dim=(1, 2)) for either in (colours, colours.flip(0))]
    same = torch.stack(away).amin(dim=0) < 2e-3  # blurred, half of the image is a little of the other
    assert 0.16 < float(same.float().mean()) < 0.26


def test_colours_change_by_as_much_as_moco_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brightness, contrast and saturation by 0.4, hue by a tenth of a circle: reached, never passed."""
    x, got = colours_apart(monkeypatch)
    seen(moco_view, x, Normalization((0.0,), (1.0,)), crop=1.0)
    grey, middle = views._grey(x), x.mean(dim=(2, 3), keepdim=True)
    for name, zero in (("_brightness", 0.0), ("_contrast", middle), ("_saturation", grey)):
        factor = (got[name] - zero) / (x - zero)
        assert 0.6 - 1e-6 <= float(factor.min()) < 0.61
        assert 1.39 < float(factor.max()) <= 1.4 + 1e-6
    a, b = (v - v.mean(dim=1, keepdim=True) for v in (x, got["_hue"]))
    turned = torch.acos(((a * b).sum(dim=1) / a.norm(dim=1) / b.norm(dim=1)).clamp(-1, 1)) / (2 * math.pi)
    assert 0.098 < float(turned.max()) <= 0.1 + 1e-6


# The changes, one by one


def test_turned_by_a_right_angle() -> None:
    x = pictures(2, height=6, width=6)
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).expand(2, 2, 2)
    torch.testing.assert_close(views._warp(x, turn, torch.zeros(2, 2)), x.rot90(1, dims=(2, 3)))


def test_angles_are_true_in_oblong_images() -> None:
    """A right angle maps the middle column of 3 x 5 onto the middle row's three inner pixels."""
    x = torch.arange(15.0).view(1, 1, 3, 5)
    turn = torch.tensor([[[0.0, -1.0], [1.0, 0.0]]])
    answer = views._warp(x, turn, torch.zeros(1, 2))
    torch.testing.assert_close(answer[0, 0, :, 2], x[0, 0, 1, 1:4].flip(0))


def test_moved_by_a_pixel_and_the_edge_goes_on() -> None:
    x = pictures(2, height=4, width=5)
    answer = views._warp(x, torch.eye(2).expand(2, 2, 2), torch.tensor([[1 / 5, 0.0], [0.0, -1 / 4]]))
    torch.testing.assert_close(answer[0], torch.cat([x[0, :, :, 1:], x[0, :, :, -1:]], dim=2))
    torch.testing.assert_close(answer[1], torch.cat([x[1, :, :1], x[1, :, :-1]], dim=1))


def test_blur_by_hand() -> None:
    x = torch.zeros(2, 1, 7, 7, dtype=torch.float64)
    x[:, :, 3, 3] = 1
    answer = views._blur(x, torch.tensor([0.5, 0.0], dtype=torch.float64).view(2, 1, 1, 1))
    taps = [math.exp(-(d**2) / 0.5) for d in range(-2, 3)]
    for i in range(5):
        for j in range(5):
            assert float(answer[0, 0, 1 + i, 1 + j]) == pytest.approx(taps[i] * taps[j] / sum(taps) ** 2)
    assert torch.equal(answer[1], x[1])
    flat = torch.full((1, 1, 4, 4), 0.7)
    torch.testing.assert_close(views._blur(flat, torch.full((1, 1, 1, 1), 0.5)), flat)
    wide = views._blur(F.pad(x[:1], (5, 5, 5, 5)), torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64), radius=6)
    taps = [math.exp(-(d**2) / 8) for d in range(-6, 7)]
    assert float(wide[0, 0, 2, 11]) == pytest.approx(taps[0] * taps[9] / sum(taps) ** 2)


def test_tones_by_hand() -> None:
    x = torch.tensor([[0.2, 0.2], [0.4, 0.6]]).view(1, 1, 2, 2)
    assert views._autocontrast(x).flatten().tolist() == pytest.approx([0, 0, 0.5, 1])
    assert views._equalize(x).flatten().tolist() == pytest.approx([0, 0, 0.5, 1])  # ranks 2, 2, 3, 4 of 4
    spread = torch.tensor([[0.0, 0.1], [0.2, 1.0]]).view(1, 1, 2, 2)
    assert views._equalize(spread).flatten().tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    flat = torch.full((1, 2, 3, 3), 0.3)
    assert torch.equal(views._autocontrast(flat), flat)
    assert torch.equal(views._equalize(flat), flat)
    many = torch.linspace(0, 1, 1000).view(1, 1, 10, 100)
    assert 8 <= len(views._posterize(many).unique()) <= 16
    inverted = views._solarize(many)
    assert torch.equal(inverted[many < 0.69], many[many < 0.69])
    assert float(inverted[0, 0, -1, -1]) == 0.0


def test_hue_keeps_grey_and_the_sum_of_the_channels() -> None:
    x = pictures(6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        answer = views._hue(x, 1.0)
        grey = x[:, :1].expand(6, 3, 12, 12)
        torch.testing.assert_close(views._hue(grey, 1.0), grey)
    torch.testing.assert_close(answer.sum(dim=1), x.sum(dim=1))
    assert float((answer - x).abs().max()) > 0.05
    assert torch.equal(views._hue(x[:, :1], 1.0), x[:, :1])  # there is none


def test_a_mixture_of_nothing_changes_nothing() -> None:
    """A flat image is the same turned, moved and with more contrast, so weights that sum to one leave it."""
    flat = torch.full((9, 3, 8, 8), 0.37, dtype=torch.float64)
    torch.testing.assert_close(seen(augmix_view, flat), flat)
