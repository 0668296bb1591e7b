import math

import pytest
import torch
from byhand import PROBS, entropy, identity_head, loss_of

import trueup
from trueup.testing import convnet, images

MEAN = [sum(p[k] for p in PROBS) / 3 for k in (0, 1)]
MAXIMISATION = sum(entropy(p) for p in PROBS) / 3 + sum(m * math.log(m + 1e-5) for m in MEAN)


def test_loss_by_hand() -> None:
    """Above 0.9 is the second alone, labelled 1 with 10/11; above 0.6 also the first, labelled 0 with 3/4."""
    assert loss_of("shot") == pytest.approx(MAXIMISATION - 0.1 * math.log(10 / 11), abs=1e-8)
    both = -(math.log(0.75) + math.log(10 / 11)) / 2
    assert loss_of("shot", threshold=0.6, label_weight=0.5) == pytest.approx(MAXIMISATION + 0.5 * both, abs=1e-8)


def test_without_confident_predictions_it_is_shot_im() -> None:
    """The threshold is strict: predictions of one half are not above it."""
    assert loss_of("shot", threshold=0.95) == pytest.approx(MAXIMISATION, abs=1e-8)
    x = torch.zeros(2, 2, dtype=torch.float64)
    assert loss_of("shot", x, threshold=0.5) == loss_of("shot-im", x)


def test_the_head_stays() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "shot", lr=1e-2, threshold=0.3)
    adapter(images(16, seed=0)[0])
    assert torch.equal(adapter.net.model.head.weight, model.head.weight)
    assert not torch.equal(adapter.net.model.conv0.weight, model.conv0.weight)


@pytest.mark.parametrize("bad", [{"threshold": 1.1}, {"label_weight": -1}], ids=str)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        trueup.adapt(identity_head(), "shot", **bad)
