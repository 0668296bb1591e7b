import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trueup import augment
from trueup.augment import Pixels, augmix_view, cotta_view

View = Callable[..., Tensor]
PIXELS = Pixels((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
VIEWS = pytest.mark.parametrize("view", [cotta_view, augmix_view])
RANGES = pytest.mark.parametrize("pixels", [PIXELS, None], ids=["range", "free"])


def pictures(n: int, channels: int = 3, height: int = 12, width: int = 12, seed: int = 0) -> Tensor:
    """Values in [0, 1] that reach both ends."""
    x = torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(seed))
    return (1.6 * x - 0.3).clamp(0, 1)


def seen(view: View, x: Tensor, *args: Pixels | None, seed: int = 0, **kwargs: float) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return view(x, *args, **kwargs)


@VIEWS
@RANGES
@pytest.mark.parametrize("shape", [(5, 3, 12, 12), (2, 3, 7, 11), (3, 1, 9, 4), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_shape_and_dtype_stay(view: View, pixels: Pixels | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pixels = Pixels((0.5,), (0.2,)) if pixels is not None and shape[1] == 1 else pixels
    x = pictures(*shape).to(dtype)
    before = x.clone()
    answer = seen(view, x, pixels)
    assert answer.shape == x.shape
    assert answer.dtype == dtype
    assert answer.isfinite().all()
    assert torch.equal(x, before)


@VIEWS
def test_values_stay_in_range(view: View) -> None:
    x = PIXELS.back(pictures(64))
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
def test_chance_is_torchs_random_state(view: View, pixels: Pixels | None) -> None:
    x = pictures(4)
    assert torch.equal(seen(view, x, pixels, seed=1), seen(view, x, pixels, seed=1))
    assert not torch.equal(seen(view, x, pixels, seed=1), seen(view, x, pixels, seed=2))


@VIEWS
@RANGES
def test_each_image_is_changed_in_its_own_way(view: View, pixels: Pixels | None) -> None:
    answer = seen(view, pictures(1).repeat(16, 1, 1, 1), pixels).flatten(1)
    apart = torch.cdist(answer, answer) + torch.eye(16)
    assert float(apart.min()) > 1e-3


@VIEWS
@RANGES
def test_without_strength_images_stay(view: View, pixels: Pixels | None) -> None:
    x = pictures(8, height=9, width=13)
    x = x if pixels is None else pixels.back(x)
    torch.testing.assert_close(seen(view, x, pixels, strength=0.0), x, rtol=1e-5, atol=1e-5)
    assert float((seen(view, x, pixels) - x).abs().mean()) > 0.02


@VIEWS
@RANGES
def test_both_precisions_draw_the_same(view: View, pixels: Pixels | None) -> None:
    """Smooth images, for a step of posterising or solarising may fall to either side of a rounded value."""
    ramp = torch.linspace(0.1, 0.6, 12).view(1, 1, 1, 12).expand(6, 3, 12, 12)
    single, double = seen(view, ramp, pixels), seen(view, ramp.double(), pixels)
    assert float((single.double() - double).abs().median()) < 1e-5
    assert float((single.double() - double).abs().mean()) < 1e-2


@VIEWS
def test_what_is_no_image_is_refused(view: View) -> None:
    with pytest.raises(ValueError, match=r"images \(N, C, H, W\), not of \(4, 7\)"):
        view(torch.zeros(4, 7))


def test_about_half_of_the_strong_views_are_mirrored() -> None:
    ramp = torch.linspace(0, 1, 16).view(1, 1, 1, 16).expand(400, 1, 16, 16)
    answer = seen(cotta_view, ramp)
    falls = (answer[..., 0] > answer[..., -1]).float().mean(dim=(1, 2))
    assert set(falls.tolist()) == {0.0, 1.0}
    assert 0.4 < float(falls.mean()) < 0.6


def test_strong_views_turn_by_fifteen_degrees_at_most() -> None:
    """A plane stays a plane inside of the image: its slopes give the angle (mirrored or not) and the scale."""
    plane = torch.arange(40.0).double().expand(300, 1, 40, 40)
    middle = seen(cotta_view, plane)[:, 0, 16:24, 16:24]
    dx = (middle[:, 4, 5] - middle[:, 4, 3]).abs() / 2
    dy = (middle[:, 5, 4] - middle[:, 3, 4]) / 2
    angles = torch.atan2(dy, dx) * 180 / math.pi
    assert 13 < float(angles.abs().max()) <= 15 + 1e-6
    assert bool((angles > 5).any() and (angles < -5).any())


# The changes, one by one


def test_turned_by_a_right_angle() -> None:
    x = pictures(2, height=6, width=6)
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).expand(2, 2, 2)
    torch.testing.assert_close(augment._warp(x, turn, torch.zeros(2, 2)), x.rot90(1, dims=(2, 3)))


def test_angles_are_true_in_oblong_images() -> None:
    """A right angle maps the middle column of 3 x 5 onto the middle row's three inner pixels."""
    x = torch.arange(15.0).view(1, 1, 3, 5)
    turn = torch.tensor([[[0.0, -1.0], [1.0, 0.0]]])
    answer = augment._warp(x, turn, torch.zeros(1, 2))
    torch.testing.assert_close(answer[0, 0, :, 2], x[0, 0, 1, 1:4].flip(0))


def test_moved_by_a_pixel_and_the_edge_goes_on() -> None:
    x = pictures(2, height=4, width=5)
    answer = augment._warp(x, torch.eye(2).expand(2, 2, 2), torch.tensor([[1 / 5, 0.0], [0.0, -1 / 4]]))
    torch.testing.assert_close(answer[0], torch.cat([x[0, :, :, 1:], x[0, :, :, -1:]], dim=2))
    torch.testing.assert_close(answer[1], torch.cat([x[1, :, :1], x[1, :, :-1]], dim=1))


def test_blur_by_hand() -> None:
    x = torch.zeros(2, 1, 7, 7, dtype=torch.float64)
    x[:, :, 3, 3] = 1
    answer = augment._blur(x, torch.tensor([0.5, 0.0], dtype=torch.float64).view(2, 1, 1, 1))
    taps = [math.exp(-(d**2) / 0.5) for d in range(-2, 3)]
    for i in range(5):
        for j in range(5):
            assert float(answer[0, 0, 1 + i, 1 + j]) == pytest.approx(taps[i] * taps[j] / sum(taps) ** 2)
    assert torch.equal(answer[1], x[1])
    flat = torch.full((1, 1, 4, 4), 0.7)
    torch.testing.assert_close(augment._blur(flat, torch.full((1, 1, 1, 1), 0.5)), flat)


def test_tones_by_hand() -> None:
    x = torch.tensor([[0.2, 0.2], [0.4, 0.6]]).view(1, 1, 2, 2)
    assert augment._autocontrast(x).flatten().tolist() == pytest.approx([0, 0, 0.5, 1])
    assert augment._equalize(x).flatten().tolist() == pytest.approx([0, 0, 0.5, 1])  # ranks 2, 2, 3, 4 of 4
    spread = torch.tensor([[0.0, 0.1], [0.2, 1.0]]).view(1, 1, 2, 2)
    assert augment._equalize(spread).flatten().tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    flat = torch.full((1, 2, 3, 3), 0.3)
    assert torch.equal(augment._autocontrast(flat), flat)
    assert torch.equal(augment._equalize(flat), flat)
    many = torch.linspace(0, 1, 1000).view(1, 1, 10, 100)
    assert 8 <= len(augment._posterize(many).unique()) <= 16
    inverted = augment._solarize(many)
    assert torch.equal(inverted[many < 0.69], many[many < 0.69])
    assert float(inverted[0, 0, -1, -1]) == 0.0


def test_hue_keeps_grey_and_the_sum_of_the_channels() -> None:
    x = pictures(6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        answer = augment._hue(x, 1.0)
        grey = x[:, :1].expand(6, 3, 12, 12)
        torch.testing.assert_close(augment._hue(grey, 1.0), grey)
    torch.testing.assert_close(answer.sum(dim=1), x.sum(dim=1))
    assert float((answer - x).abs().max()) > 0.05
    assert torch.equal(augment._hue(x[:, :1], 1.0), x[:, :1])  # there is none


def test_a_mixture_of_nothing_changes_nothing() -> None:
    """A flat image is the same turned, moved and with more contrast, so weights that sum to one leave it."""
    flat = torch.full((9, 3, 8, 8), 0.37, dtype=torch.float64)
    torch.testing.assert_close(seen(augmix_view, flat), flat)
