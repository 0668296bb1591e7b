import math

import pytest
import torch
import torchvision
from byhand import PROBS, X, entropy, identity_head, loss_of
from torch import Tensor, nn

import trueup
from trueup.testing import convnet, images

E0 = 0.5625  # just above the entropy of the first row, 0.5623
MARGIN = E0 / math.log(2)


def entropies(weight: Tensor, x: Tensor = X) -> Tensor:
    s = (x @ weight.T).softmax(dim=1)
    return -(s * s.log()).sum(dim=1)


def by_hand(weight: Tensor, x: Tensor, limit: float, radius: float = 0.05) -> tuple[Tensor | None, Tensor | None, int]:
    """The gradient of the second pass, its loss, and how many samples are in it."""
    weight = weight.clone().requires_grad_()
    h = entropies(weight, x)
    first = h.detach() < limit
    (g,) = torch.autograd.grad(h[first].mean(), weight)
    up = (weight + radius * g / (g.square().sum().sqrt() + 1e-12)).detach().requires_grad_()
    h = entropies(up, x)
    second = first & (h.detach() < limit)
    if not second.any():
        return None, None, 0
    loss = h[second].mean()
    return torch.autograd.grad(loss, up)[0], loss.detach(), int(second.sum())


def test_loss_by_hand() -> None:
    """E0 = 0.9 ln 2 keeps the first and the second."""
    assert loss_of("sar", margin=0.9) == pytest.approx(sum(entropy(p) for p in PROBS[:2]) / 2)


@pytest.mark.parametrize(("margin", "kept"), [(0.95, 2), (MARGIN, 1)], ids=["all stay", "one leaves"])
def test_two_steps_by_hand(margin: float, kept: int) -> None:
    """Up the gradient the first row's entropy passes E0 where that is near: it is in the first loss alone."""
    adapter = trueup.adapt(identity_head(), "sar", margin=margin, params="all", lr=0.1, recovery=0.0)
    weight, velocity, mean = torch.eye(2, dtype=torch.float64), 0.0, None
    assert int((entropies(weight) < margin * math.log(2)).sum()) == 2
    for step in range(2):
        gradient, loss, samples = by_hand(weight, X, margin * math.log(2))
        assert step or samples == kept
        velocity = 0.9 * velocity + gradient
        weight = weight - 0.1 * velocity
        mean = loss if mean is None else 0.9 * mean + 0.1 * loss
        adapter(X)
        torch.testing.assert_close(adapter.net.model.weight.detach(), weight, rtol=0, atol=1e-8)
        torch.testing.assert_close(adapter.state.mean[0], mean, rtol=0, atol=1e-8)
    assert adapter.updates == 2


def test_who_becomes_reliable_in_the_second_pass_stays_out() -> None:
    """Only the second row was reliable before; both are now."""
    logits = torch.tensor(PROBS[:2], dtype=torch.float64).log().requires_grad_()
    out = trueup.Output(logits, logits, logits, logits)
    out.memo["first"] = first = {"reliable": torch.tensor([False, True])}
    method = trueup.get_method("sar")(margin=0.95)
    loss = method.loss(trueup.SplitModel(nn.Identity()), out, nn.Module())
    assert loss.item() == pytest.approx(entropy(PROBS[1]), abs=1e-12)
    assert first["loss"].item() == loss.item()


def test_nothing_reliable_changes_nothing() -> None:
    adapter = trueup.adapt(identity_head(), "sar", params="all", lr=0.1)
    adapter(X[2:])
    assert adapter.updates == 0
    assert torch.equal(adapter.net.model.weight, torch.eye(2, dtype=torch.float64))
    assert adapter.state.mean.tolist() == [-1.0]


def test_nothing_reliable_up_the_gradient_changes_nothing() -> None:
    assert by_hand(torch.eye(2, dtype=torch.float64), X[:1], E0)[2] == 0
    adapter = trueup.adapt(identity_head(), "sar", params="all", lr=0.1, margin=MARGIN)
    adapter(X[:1])
    assert adapter.updates == 0
    assert torch.equal(adapter.net.model.weight, torch.eye(2, dtype=torch.float64))
    assert adapter.state.mean.tolist() == [-1.0]


def test_a_fresh_start_when_the_mean_loss_is_too_low() -> None:
    """The bound is a part of ln C: the mean loss of the first two rows, in the second pass, is about 0.45."""
    loss = float(by_hand(torch.eye(2, dtype=torch.float64), X, 0.95 * math.log(2))[1])
    for factor, fresh in ((0.99, False), (1.01, True)):
        recovery = factor * loss / math.log(2)
        adapter = trueup.adapt(identity_head(), "sar", margin=0.95, params="all", lr=0.1, recovery=recovery)
        adapter(X)
        assert adapter.updates == 1
        assert torch.equal(adapter.net.model.weight, torch.eye(2, dtype=torch.float64)) == fresh
        assert adapter.state.mean.item() == (-1.0 if fresh else pytest.approx(loss, abs=1e-8))
        assert bool(adapter.optimizer.state) != fresh
    assert trueup.get_method("sar")().recovery * math.log(1000) == pytest.approx(0.2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_does_not_enter_the_mean(bad: float) -> None:
    adapter = trueup.adapt(identity_head(), "sar", margin=0.95, params="all", recovery=0.0)
    adapter(X)
    before = adapter.state.mean.clone()
    out = adapter.net(X)
    out.memo["loss"] = torch.tensor(bad, dtype=torch.float64)
    with torch.no_grad():
        assert adapter.method.after(adapter.net, out, adapter.state) is None
    assert torch.equal(adapter.state.mean, before)
    assert float(before) > 0


@pytest.mark.parametrize("steps", [1, 2])
def test_a_fresh_start_is_told_once(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    adapter = trueup.adapt(identity_head(), "sar", margin=0.95, params="all", recovery=0.9, steps=steps)
    with caplog.at_level("INFO", logger="trueup"):
        adapter(X)
        adapter(X[2:])  # nothing is reliable, nothing happens
    loss = float(by_hand(torch.eye(2, dtype=torch.float64), X, 0.95 * math.log(2))[1])
    expected = f"sar: reset, because the mean loss fell to {loss:.3g}, below {0.9 * math.log(2):.3g}"
    assert [r.getMessage() for r in caplog.records] == [expected]
    with caplog.at_level("INFO", logger="trueup"):
        adapter(X)
    assert len(caplog.records) == 2  # another time


def moving(model: nn.Module, x: Tensor, **hyper: object) -> set[str]:
    adapter = trueup.adapt(model, "sar", example=x, **hyper)
    mine = {id(p) for group in adapter.optimizer.param_groups for p in group["params"]}
    return {name for name, p in adapter.net.selected.items() if id(p) in mine}


def test_the_last_stage_of_a_resnet_is_spared_whatever_its_name() -> None:
    """20 BatchNorm layers, of which the last stage has 5."""
    resnet, x = torchvision.models.resnet18(num_classes=4), torch.zeros(2, 3, 32, 32)
    norms = {f"{n}.{p}" for n, m in resnet.named_modules() if isinstance(m, nn.BatchNorm2d) for p in ("weight", "bias")}
    assert moving(resnet, x) == {name for name in norms if not name.startswith("layer4")}
    assert moving(resnet, x, spared=0.0) == norms
    assert moving(resnet, x, params=r"layer4.*bn1") == {
        f"layer4.{i}.bn1.{p}" for i in (0, 1) for p in ("weight", "bias")
    }
    renamed = nn.Sequential(*(m if n != "fc" else nn.Sequential(nn.Flatten(), m) for n, m in resnet.named_children()))
    assert {name.split(".")[0] for name in moving(renamed, x)} == {"1", "4", "5", "6"}


def test_one_layer_always_learns() -> None:
    assert moving(convnet(), images(2, seed=0)[0]) == {"bn0.weight", "bn0.bias"}
    assert moving(convnet(), images(2, seed=0)[0], spared=1.0) == {"bn0.weight", "bn0.bias"}


def test_spared_layers_stay_and_are_not_perturbed() -> None:
    seen = []

    def note(layer: nn.Module, args: object) -> None:
        seen.append(layer.weight.detach().clone())

    model = convnet()
    adapter = trueup.adapt(model, "sar", lr=0.1, margin=1.0, example=images(2, seed=0)[0])
    adapter.net.model.bn1.register_forward_pre_hook(note)
    for s in range(3):
        adapter(images(16, seed=s, shift=1.0)[0])
        assert all(p.grad is None for p in adapter.net.model.parameters())
    assert adapter.updates == 3
    assert len(seen) == 6
    assert all(torch.equal(weight, model.bn1.weight) for weight in seen)
    assert not torch.equal(adapter.net.model.bn0.weight, model.bn0.weight)


@pytest.mark.parametrize("bad", [{"margin": -1}, {"spared": 2}, {"recovery": -0.1}, {"momentum": 2}], ids=str)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        trueup.adapt(identity_head(), "sar", **bad)
