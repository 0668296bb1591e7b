"""The policies of normalisation layers."""

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.norm import make_policy
from trueup.testing import convnet, images

X = images(16, seed=0, shift=1.0)[0]


def buffers(model: nn.Module) -> list[torch.Tensor]:
    return [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("policy", ["batch", "ema"])
def test_buffers_are_back_also_after_an_exception(policy: str) -> None:
    model = convnet()
    before, objects = buffers(model), [id(b) for b in model.buffers()]

    def fail() -> None:
        with make_policy(policy).forward_pass(model, update=True):
            model(X)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert objects == [id(b) for b in model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_reading_uses_the_estimates_as_they_stand() -> None:
    model, policy = convnet(), make_policy("ema")
    source, before = model(X).detach(), buffers(model)
    with torch.no_grad(), policy.forward_pass(model, update=False):
        assert torch.equal(model(X), source)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    with torch.no_grad(), policy.forward_pass(model, update=True):
        moved = model(X)
    assert not torch.equal(before[0], model.bn0.running_mean)
    with torch.no_grad(), policy.forward_pass(model, update=False):
        torch.testing.assert_close(model(X), moved)


def test_second_steps_read() -> None:
    """With several steps per batch the estimates move once per batch."""
    one, three = (trueup.adapt(convnet(), "tent", norm="ema", steps=n, lr=0.0) for n in (1, 3))
    one(X)
    three(X)
    assert torch.equal(one.net.model.bn0.running_mean, three.net.model.bn0.running_mean)


def test_ema_converges_to_the_batch() -> None:
    adapter = trueup.adapt(convnet(), "bn", norm="ema")
    batch = trueup.adapt(convnet(), "bn")
    for _ in range(200):
        answer = adapter(X)
    torch.testing.assert_close(answer, batch(X), rtol=1e-3, atol=1e-3)


def test_unwrap_keeps_the_estimates() -> None:
    adapter = trueup.adapt(convnet(), "bn", norm="ema")
    for _ in range(5):
        adapter(X)
    plain = adapter.unwrap()
    with torch.no_grad(), adapter.net.frozen_statistics():
        adapter.net.policy = make_policy("source")
        assert torch.equal(plain(X), adapter.net(X).logits)


@pytest.mark.parametrize("norm", ["ema", "batch", "source"])
def test_values_too_large_are_refused_or_answered_finitely(norm: str) -> None:
    for scale in (1e6, 1e12, 1e20, 1e30, 3e38):
        adapter = trueup.adapt(convnet(), "tsd", norm=norm)
        adapter(X)
        before = [t.clone() for t in (*adapter.net.buffers(), *adapter.net.parameters())]
        try:
            answer = adapter((X / X.abs().max()) * scale)
        except ValueError:
            after = [*adapter.net.buffers(), *adapter.net.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        else:
            assert answer.isfinite().all()
        for part in (adapter.net, adapter.state):
            assert all(t.isfinite().all() for t in (*part.buffers(), *part.parameters()))
        assert adapter(X).isfinite().all()


def test_statistics_that_are_not_finite_are_refused() -> None:
    adapter = trueup.adapt(convnet(), "bn", norm="ema")
    adapter(X)
    before = buffers(adapter.net)
    with torch.no_grad():
        adapter.net.model.conv1.weight *= 1e25  # finite, but squares of what it makes of a batch are not
    with pytest.raises(ValueError, match="not finite"):
        adapter(X)
    assert all(torch.equal(a, b) for a, b in zip(before, adapter.net.buffers(), strict=True))


def test_a_layer_that_is_used_twice_keeps_its_own_for_a_single_value() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.head = nn.BatchNorm2d(3), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bn(self.bn(x).mean(dim=(2, 3), keepdim=True)).flatten(1))

    assert trueup.adapt(Twice().eval(), "bn")(X[:1]).isfinite().all()


def test_estimates_keep_their_move_where_a_second_call_sees_a_single_value() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.head = nn.BatchNorm2d(3), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bn(self.bn(x).mean(dim=(2, 3), keepdim=True)).flatten(1))

    x = X[:1]
    adapter = trueup.adapt(Twice().eval(), "bn", norm="ema:0.1")
    adapter(x)
    torch.testing.assert_close(adapter.net.model.bn.running_mean, 0.1 * x.mean(dim=(0, 2, 3)))


def test_layers_without_running_estimates_work() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(), nn.LazyLinear(3)
    )
    model(X)
    for norm in ("source", "batch", "ema"):
        assert trueup.adapt(model.eval(), "tent", norm=norm)(X).isfinite().all()


def test_momentum_none_and_other_dimensions() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)).eval()
    x = torch.randn(10, 6) + 2
    tracked = model[0].num_batches_tracked.clone()
    adapter = trueup.adapt(model, "bn")
    expected = model[1]((x - x.mean(dim=0)) / (x.var(dim=0, correction=0) + 1e-5).sqrt())
    torch.testing.assert_close(adapter(x), expected.detach())
    assert torch.equal(adapter.net.model[0].num_batches_tracked, tracked)
