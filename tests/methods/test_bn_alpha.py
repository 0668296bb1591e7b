import math

import torch
from byhand import norm_layer

import trueup


def test_answer_by_hand() -> None:
    """The batch has mean 2 and biased variance 5: used are 0.9 · 4 + 0.1 · 2 = 3.8 and 0.9 · 9 + 0.1 · 5 = 8.6."""
    x = torch.tensor([[-1.0, 1.0], [3.0, 5.0]], dtype=torch.float64).reshape(2, 1, 1, 2)
    expected = (x.flatten(1) - 3.8) / math.sqrt(8.6 + 1e-5)
    adapter = trueup.adapt(norm_layer(), "bn-alpha")
    for _ in range(2):  # nothing is kept
        torch.testing.assert_close(adapter(x), expected, rtol=0, atol=1e-8)


def test_a_single_image_by_hand() -> None:
    """Mean 2 and variance 1 of two pixels count a tenth, also where there is one image."""
    x = torch.tensor([1.0, 3.0], dtype=torch.float64).reshape(1, 1, 1, 2)
    expected = (x.flatten(1) - 3.8) / math.sqrt(8.2 + 1e-5)
    torch.testing.assert_close(trueup.adapt(norm_layer(), "bn-alpha")(x), expected, rtol=0, atol=1e-8)
