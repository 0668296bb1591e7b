import pytest
import torch
from byhand import PROBS, X, entropy, identity_head, loss_of

import trueup
from trueup.testing import convnet, images


def test_loss_by_hand() -> None:
    assert loss_of("tent-clf") == pytest.approx(sum(entropy(p) for p in PROBS) / 3)


def test_the_first_step_by_hand() -> None:
    """dH/dp_k = -s_k (log s_k + H); the head's gradient is its mean product with x, and Adam goes lr along its sign."""
    adapter = trueup.adapt(identity_head(), "tent-clf", lr=0.01)
    adapter(X)
    s = torch.tensor(PROBS, dtype=torch.float64)
    h = -(s * s.log()).sum(dim=1, keepdim=True)
    gradient = (-s * (s.log() + h)).T @ X / 3
    expected = torch.eye(2, dtype=torch.float64) - 0.01 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(adapter.net.model.weight.detach(), expected, rtol=0, atol=1e-8)


def test_only_the_head_learns_on_features_of_the_source() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "tent-clf", lr=1e-2)
    x = images(16, seed=0, shift=1.0)[0]
    torch.testing.assert_close(adapter(x), model(x).detach())
    assert list(adapter.net.selected) == ["head.weight", "head.bias"]
    assert not torch.equal(adapter.net.model.head.weight, model.head.weight)
    assert torch.equal(adapter.net.model.conv0.weight, model.conv0.weight)
