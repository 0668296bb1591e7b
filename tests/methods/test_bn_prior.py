import math

import torch
from byhand import norm_layer

import trueup


def test_answer_by_hand() -> None:
    """Two images (four pixels) of mean 2 and biased variance 5 count 2 of 18: images count, not pixels."""
    x = torch.tensor([[-1.0, 1.0], [3.0, 5.0]], dtype=torch.float64).reshape(2, 1, 1, 2)
    mean, variance = (16 * 4 + 2 * 2) / 18, (16 * 9 + 2 * 5) / 18
    expected = (x.flatten(1) - mean) / math.sqrt(variance + 1e-5)
    torch.testing.assert_close(trueup.adapt(norm_layer(), "bn-prior")(x), expected, rtol=0, atol=1e-8)


def test_sixteen_images_count_a_half() -> None:
    x = torch.tensor([[-1.0, 1.0], [3.0, 5.0]], dtype=torch.float64).repeat(8, 1).reshape(16, 1, 1, 2)
    expected = (x.flatten(1) - 3.0) / math.sqrt(7.0 + 1e-5)
    torch.testing.assert_close(trueup.adapt(norm_layer(), "bn-prior")(x), expected, rtol=0, atol=1e-8)


def test_the_number_is_an_option() -> None:
    x = torch.tensor([1.0, 3.0], dtype=torch.float64).reshape(1, 1, 1, 2)
    expected = (x.flatten(1) - 3.5) / math.sqrt((3 * 9 + 1) / 4 + 1e-5)
    torch.testing.assert_close(trueup.adapt(norm_layer(), "bn-prior", norm="prior:3")(x), expected, rtol=0, atol=1e-8)
