"""The channels that networks see: grey by luminance, values by mean and std, and one form for each normalisation."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from trueup.data.channels import Channels, check_normalize, make_channels
from trueup.data.loading import ConcatDomains, Loader

RGB = np.random.default_rng(0).integers(0, 256, (5, 7, 7, 3), dtype=np.uint8)


def test_grey_is_pillows() -> None:
    grey = make_channels("half", grey=True).take(RGB)
    assert np.array_equal(grey[..., 0], [np.asarray(Image.fromarray(image).convert("L")) for image in RGB])
    assert make_channels("half").take(RGB) is RGB


def test_grey_images_keep_their_values() -> None:
    ramp = np.repeat(np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1), 3, axis=3)
    assert np.array_equal(make_channels("half", grey=True).take(ramp), ramp[..., :1])


def test_batches_of_one_channel() -> None:
    x = Loader(ConcatDomains(()), 7, Channels((0.25,), (0.5,), grey=True)).tensor(list(RGB))
    grey = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in RGB])
    assert x.shape == (5, 1, 7, 7)
    assert np.allclose(x[:, 0].numpy(), (grey / 255 - 0.25) / 0.5, atol=1e-6)


@pytest.mark.parametrize("form", [((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)), ((0.1,), (0.4,))])
def test_batches_of_three_channels(form: Any) -> None:
    x = Loader(ConcatDomains(()), 7, make_channels(form)).tensor(list(RGB))
    expected = (RGB / 255 - np.array(form[0])) / np.array(form[1])
    assert np.allclose(x.numpy(), expected.transpose(0, 3, 1, 2), atol=1e-6)


def test_the_usual_batch_is_the_same_to_the_bit() -> None:
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = torch.from_numpy(RGB).permute(0, 3, 1, 2).to(torch.float32)
    expected = x.sub_(mean.mul(255).view(1, 3, 1, 1)).div_(std.mul(255).view(1, 3, 1, 1))
    assert torch.equal(Loader(ConcatDomains(()), 7).tensor(list(RGB)), expected)


def test_a_grey_network_sees_the_mean_of_three() -> None:
    assert make_channels("imagenet", grey=True) == Channels((0.449,), (0.226,), grey=True)
    assert make_channels("half", grey=True) == Channels((0.5,), (0.5,), grey=True)
    assert (make_channels("half").count, make_channels("half", grey=True).count) == (3, 1)


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ("half", "half"),
        ([0.5, 0.5], "half"),
        ([[0.5, 0.5, 0.5], 0.5], "half"),
        ([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], "imagenet"),
        ([0, 1], ((0.0,), (1.0,))),
        ([[0.2, 0.2, 0.2], [0.3]], ((0.2,), (0.3,))),
        ([[0.1, 0.2, 0.3], 0.5], ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))),
    ],
)
def test_what_networks_see_alike_has_one_form(value: Any, form: Any) -> None:
    assert check_normalize(value) == form
    assert check_normalize(form) == form


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("other", "normalize='other' is not known: it must be imagenet or half"),
        (0.5, "normalize=0.5 must be"),
        ([0.5], "such as"),
        ([[0.5, 0.5], 1.0], "one number, or three"),
        ([0.5, True], "std=True must be one number"),
        ([0.5, 0.0], "finite and above 0"),
        ([float("nan"), 1.0], "must be finite"),
        ([0.5, "a"], "std='a' must be"),
    ],
)
def test_what_means_nothing_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_normalize(value)


def test_a_grey_network_has_one_mean() -> None:
    with pytest.raises(ValueError, match="have 3 channels, but a grey network has one"):
        make_channels(((0.1, 0.2, 0.3), (1.0, 1.0, 1.0)), grey=True)
