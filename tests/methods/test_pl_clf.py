import math

import pytest
import torch
from byhand import PROBS, X, identity_head, loss_of

import trueup
from trueup.testing import convnet, images


def test_loss_by_hand() -> None:
    """Only the second is above 0.9, labelled 1 with 10/11."""
    assert loss_of("pl-clf") == pytest.approx(-math.log(10 / 11))


def test_the_first_step_by_hand() -> None:
    """The gradient of the cross-entropy with label 1 is (s - (0, 1)) xᵀ; Adam goes lr along its sign."""
    adapter = trueup.adapt(identity_head(), "pl-clf", lr=0.01)
    adapter(X)
    gradient = torch.outer(torch.tensor([PROBS[1][0], PROBS[1][1] - 1], dtype=torch.float64), X[1])
    expected = torch.eye(2, dtype=torch.float64) - 0.01 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(adapter.net.model.weight.detach(), expected, rtol=0, atol=1e-8)


def test_nothing_confident_changes_nothing() -> None:
    adapter = trueup.adapt(identity_head(), "pl-clf", lr=0.1)
    adapter(X[2:])
    assert adapter.updates == 0
    assert torch.equal(adapter.net.model.weight, torch.eye(2, dtype=torch.float64))


def test_only_the_head_learns_on_features_of_the_source() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "pl-clf", lr=1e-2, threshold=0.5)
    x = images(16, seed=0, shift=1.0)[0]
    torch.testing.assert_close(adapter(x), model(x).detach())
    assert list(adapter.net.selected) == ["head.weight", "head.bias"]
    assert not torch.equal(adapter.net.model.head.weight, model.head.weight)
