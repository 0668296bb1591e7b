import math

import pytest
import torch
from byhand import PROBS, X, entropy, identity_head, loss_of
from torch import nn

import trueup


def test_loss_by_hand() -> None:
    """E0 = 0.9 ln 2 keeps the first (H = 0.56) and the second (0.30) and drops the third (ln 2)."""
    threshold = 0.9 * math.log(2)
    h = [entropy(p) for p in PROBS[:2]]
    expected = sum(math.exp(threshold - v) * v for v in h) / 2
    assert loss_of("eta", margin=0.9) == pytest.approx(expected)


def test_weights_are_constants() -> None:
    """d/dp of exp(E0 - sg[H]) H is exp(E0 - H) dH/dp, with dH/dp_k = -s_k (log s_k + H)."""
    adapter = trueup.adapt(identity_head(), "eta", example=X, margin=0.9, params="all")
    x = X[:1].clone().requires_grad_()
    adapter.method.loss(adapter.net, adapter.net(x), adapter.state).backward()
    h = entropy(PROBS[0])
    factor = math.exp(0.9 * math.log(2) - h)
    expected = [-factor * s * (math.log(s) + h) for s in PROBS[0]]
    assert x.grad[0].tolist() == pytest.approx(expected)


def test_running_mean_by_hand() -> None:
    adapter = trueup.adapt(identity_head(), "eta", margin=0.9, redundancy=2.0, lr=0.0, params="all")
    adapter(X[:2])
    first = [(PROBS[0][k] + PROBS[1][k]) / 2 for k in (0, 1)]
    assert adapter.state.mean.tolist() == pytest.approx(first)
    adapter(X[:1])
    second = [0.9 * first[k] + 0.1 * PROBS[0][k] for k in (0, 1)]
    assert adapter.state.mean.tolist() == pytest.approx(second)
    adapter(X[2:])  # not reliable: nothing moves
    assert adapter.state.mean.tolist() == pytest.approx(second)


def test_redundant_samples_are_left_out() -> None:
    """With m = softmax(x1), x1 itself has cosine 1 and is redundant from ε ≤ 1 on; x0 has cosine 0.41."""
    adapter = trueup.adapt(identity_head(), "eta", margin=0.9, redundancy=0.5, lr=0.0, params="all")
    adapter(X[1:2])
    out = adapter.net(X[:2])
    a, b = PROBS[0], PROBS[1]
    cosine = (a[0] * b[0] + a[1] * b[1]) / math.hypot(*a) / math.hypot(*b)
    assert cosine < 0.5
    h = entropy(a)
    expected = math.exp(0.9 * math.log(2) - h) * h
    loss = adapter.method.loss(adapter.net, out, adapter.state)
    assert float(loss.detach()) == pytest.approx(expected)


def test_nothing_selected_changes_nothing() -> None:
    adapter = trueup.adapt(identity_head(), "eta", params="all", lr=0.1)
    before = adapter.net.model.weight.clone()
    adapter(X[2:])
    assert torch.equal(adapter.net.model.weight, before)
    assert adapter.updates == 0
    assert not adapter.state.mean.any()


def confident(n: int, classes: int) -> torch.Tensor:
    """One-hot like predictions of all classes in turn."""
    return 10 * torch.eye(classes, dtype=torch.float64)[torch.arange(n) % classes]


@pytest.mark.parametrize(("redundancy", "moves"), [(0.05, False), ("auto", True)])
def test_the_reference_value_rejects_all_where_classes_are_few(redundancy: float | str, moves: bool) -> None:
    head = nn.Linear(7, 7, bias=False).double()
    head.weight.data = torch.eye(7, dtype=torch.float64)
    adapter = trueup.adapt(head, "eta", redundancy=redundancy, params="all")
    for _ in range(4):
        adapter(confident(14, 7))
    assert adapter.updates == (4 if moves else 1)


def test_auto_is_the_reference_value_for_many_classes() -> None:
    """At C = 1000 "auto" is max(0.05, 1.25/√1000) = 0.05: a sample at cosine 0.045 passes, one at 0.055 does not."""
    head = nn.Linear(1000, 1000, bias=False).double()
    head.weight.data = torch.eye(1000, dtype=torch.float64)
    adapter = trueup.adapt(head, "eta", params="all", example=torch.zeros(1, 1000, dtype=torch.float64))
    adapter.state.mean[0] = 1.0
    for cosine, passes in ((0.045, True), (0.055, False)):
        # Two peaks whose probabilities have the ratio that gives this cosine with the first axis.
        ratio = cosine / math.sqrt(1 - cosine**2)
        x = torch.full((1, 1000), -40.0, dtype=torch.float64)
        x[0, 0], x[0, 1] = math.log(ratio), 0.0
        assert (adapter.method.loss(adapter.net, adapter.net(x), adapter.state) is not None) == passes


def test_sgd_with_momentum() -> None:
    adapter = trueup.adapt(identity_head(), "eta", example=X, params="all")
    assert type(adapter.optimizer) is torch.optim.SGD
    assert adapter.optimizer.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("bad", [{"margin": -1}, {"redundancy": "none"}, {"redundancy": -1}, {"momentum": 2}], ids=str)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        trueup.adapt(identity_head(), "eta", **bad)
