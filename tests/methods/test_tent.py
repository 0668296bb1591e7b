import pytest
import torch
from byhand import PROBS, entropy, loss_of

import trueup
from trueup.testing import convnet, images


def test_loss_by_hand() -> None:
    assert loss_of("tent") == pytest.approx(sum(entropy(p) for p in PROBS) / 3)


def test_a_step_lowers_the_entropy() -> None:
    x = images(32, seed=3, shift=1.0)[0]
    adapter = trueup.adapt(convnet(), "tent", lr=1e-2)
    answers = [adapter(x) for _ in range(5)]
    h = [float(-(a.softmax(dim=1) * a.log_softmax(dim=1)).sum(dim=1).mean()) for a in answers]
    assert h == sorted(h, reverse=True)
    assert h[-1] < 0.95 * h[0]


def test_adam_on_the_affine_parameters() -> None:
    adapter = trueup.adapt(convnet(), "tent", example=images(2, seed=0)[0])
    assert type(adapter.optimizer) is torch.optim.Adam
    assert list(adapter.net.selected) == ["bn0.weight", "bn0.bias", "bn1.weight", "bn1.bias"]
