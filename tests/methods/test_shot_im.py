import math

import pytest
import torch
from byhand import PROBS, entropy, loss_of

import trueup
from trueup.testing import convnet, images


def test_loss_by_hand() -> None:
    mean = [sum(p[k] for p in PROBS) / 3 for k in (0, 1)]
    expected = sum(entropy(p) for p in PROBS) / 3 + sum(m * math.log(m + 1e-5) for m in mean)
    assert loss_of("shot-im") == pytest.approx(expected)


def test_the_head_stays() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "shot-im", lr=1e-2)
    adapter(images(16, seed=0)[0])
    assert torch.equal(adapter.net.model.head.weight, model.head.weight)
    assert not torch.equal(adapter.net.model.conv0.weight, model.conv0.weight)
