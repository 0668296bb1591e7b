import math

import pytest
import torch
from byhand import X, entropy, identity_head

import trueup
from trueup.testing import convnet, images


def standardised(rows: list[list[float]]) -> list[list[float]]:
    """Each column less its mean, over the root of its biased variance."""
    columns = []
    for column in zip(*rows, strict=True):
        mean = sum(column) / len(column)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in column) / len(column) + 1e-5)
        columns.append([(v - mean) / deviation for v in column])
    return [list(row) for row in zip(*columns, strict=True)]


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in row)
    return [math.exp(v) / total for v in row]


def test_answer_loss_and_first_step_by_hand() -> None:
    """With the identity for a head the answers are the standardised features; dH/dp_k = -s_k (log s_k + H)."""
    z = standardised(X.tolist())
    adapter = trueup.adapt(identity_head(), "tent-prebn", example=X, lr=0.01)
    loss = adapter.method.loss(adapter.net, adapter.method.forward(adapter.net, X, adapter.state), adapter.state)
    probs = [softmax(row) for row in z]
    assert float(loss.detach()) == pytest.approx(sum(entropy(p) for p in probs) / 3, abs=1e-8)
    torch.testing.assert_close(adapter(X), torch.tensor(z, dtype=torch.float64), rtol=0, atol=1e-8)
    for k in (0, 1):
        slope = [-p[k] * (math.log(p[k]) + entropy(p)) / 3 for p in probs]
        gamma, beta = sum(g * row[k] for g, row in zip(slope, z, strict=True)), sum(slope)
        weight, bias = adapter.state.weight[k].item(), adapter.state.bias[k].item()
        assert weight == pytest.approx(1 - 0.01 * gamma / (abs(gamma) + 1e-8), abs=1e-8)
        assert bias == pytest.approx(-0.01 * beta / (abs(beta) + 1e-8), abs=1e-8)


def test_only_the_new_layer_learns() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "tent-prebn", lr=0.05)
    for s in range(3):
        adapter(images(16, seed=s, shift=1.0)[0])
    assert adapter.updates == 3
    assert {id(p) for g in adapter.optimizer.param_groups for p in g["params"]} == {
        id(adapter.state.weight), id(adapter.state.bias)
    }  # fmt: skip
    assert all(torch.equal(p, q) for p, q in zip(adapter.net.model.parameters(), model.parameters(), strict=True))
    assert not torch.equal(adapter.state.weight, torch.ones_like(adapter.state.weight))
    adapter.reset()
    assert torch.equal(adapter.state.weight, torch.ones_like(adapter.state.weight))
    assert not adapter.state.bias.any()


def test_the_model_may_learn_as_well() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "tent-prebn", params="norm", lr=0.05)
    adapter(images(16, seed=0)[0])
    changed = {
        n for n, p in adapter.net.model.named_parameters() if not torch.equal(p, dict(model.named_parameters())[n])
    }
    assert changed == {"bn0.weight", "bn0.bias", "bn1.weight", "bn1.bias"}
    assert adapter.state.bias.any()


def test_the_answer_is_that_before_the_step() -> None:
    x = images(16, seed=0, shift=1.0)[0]
    for norm in ("source", "batch", "robust"):
        still, quick = (trueup.adapt(convnet(), "tent-prebn", norm=norm, lr=lr) for lr in (0.0, 0.5))
        assert torch.equal(still(x), quick(x))
        assert not torch.allclose(still(x), quick(x))


def test_one_image_is_answered_as_it_is() -> None:
    model, x = convnet(), images(1, seed=0)[0]
    adapter = trueup.adapt(model, "tent-prebn", lr=0.1)
    torch.testing.assert_close(adapter(x), model(x).detach())
    assert adapter.updates == 0


def test_each_label_has_a_layer() -> None:
    adapter = trueup.adapt(convnet(), "tent-prebn", multilabel=True, lr=0.05)
    x = images(16, seed=0)[0]
    z = adapter.net.model.head.in_features
    assert adapter(x).shape == (16, 6)
    assert [part.weight.shape for part in adapter.state] == [(z,)] * 6
    assert all(part.bias.any() for part in adapter.state)


def test_pixels_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="resized"):
        trueup.get_method("tent-prebn", "segmentation")
