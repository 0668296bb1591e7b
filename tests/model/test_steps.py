"""Steps that a device decides on by itself: left out where the gradient is not finite, and counted when one looks."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.model.runner import Steps
from trueup.model.steps import left_to_device, step_if_finite
from trueup.testing import convnet, images
from trueup.testing.case import difference, play, same

XS = [images(16, seed=i, shift=1.0)[0] for i in range(6)]

AWAY = torch.ones((), device="meta")


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are treated as if they were on a device for which the host waits."""
    monkeypatch.setattr(Tensor, "is_cpu", False)


def stepped(optimizer: torch.optim.Optimizer, p: nn.Parameter, grad: Tensor) -> float:
    p.grad = grad.clone()
    return float(step_if_finite(optimizer, grad.norm()))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 2])
def test_a_step_that_is_left_out_is_none(kind: Any, bad: float, at: int) -> None:
    """Against an optimiser that never saw the bad gradient."""
    g = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    one, other = (kind([p], lr=0.1, fused=True) for p in (ours, theirs))
    assert left_to_device(one, AWAY)
    for i in range(5):
        grad = torch.randn(3, 4, generator=g)
        if i == at:
            spoilt = grad.clone()
            spoilt[1, 2] = bad
            assert stepped(one, ours, spoilt) == 1
        assert stepped(one, ours, grad) == 0
        theirs.grad = grad.clone()
        other.step()
        assert torch.equal(ours, theirs)
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(one.state[ours][key], other.state[theirs][key])
    assert not hasattr(one, "found_inf")


def test_which_optimisers_decide() -> None:
    p = [nn.Parameter(torch.ones(2))]
    assert not left_to_device(torch.optim.Adam(p, fused=False), AWAY)
    assert not left_to_device(torch.optim.SGD(p, lr=0.1, fused=True), AWAY)


def test_one_look_reads_all() -> None:
    steps = Steps()
    for held in (0.0, 1.0, 1.0, 0.0):
        steps.taken(torch.tensor(held))
    assert steps.look(torch.tensor(True)) is True
    assert steps.count == 2
    steps.taken(torch.tensor(1.0))
    assert steps.look(torch.tensor(False)) is False
    assert steps.count == 2
    steps.taken()
    steps.taken(torch.tensor(0.0))
    assert steps.count == 4


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("method", ["tsd", "tent", "pl", "eta"])
def test_far_away_it_goes_as_here(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    far = trueup.adapt(convnet(), method)
    there = play(far, XS)
    monkeypatch.undo()
    near = trueup.adapt(convnet(), method)
    assert same(there, play(near, XS))
    assert far.updates == near.updates
    for (name, a), b in zip(far.net.model.named_parameters(), near.net.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def spoil(adapter: trueup.Adapter) -> Any:
    """The next gradients are not finite."""
    weight = next(iter(adapter.net.selected.values()))
    return weight.register_hook(lambda grad: grad * torch.nan)


@pytest.mark.usefixtures("far")
def test_a_bad_gradient_changes_nothing_and_is_told_later(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "tent", lr=1e-2)
    play(adapter, XS[:2])
    before = copy.deepcopy(adapter)
    hook = spoil(adapter)
    answer = adapter(XS[2])
    hook.remove()
    assert torch.equal(answer, copy.deepcopy(before)(XS[2]))
    assert same(list(adapter.net.selected.values()), list(before.net.selected.values()))
    assert "not finite" not in caplog.text
    twin = copy.deepcopy(adapter)
    with caplog.at_level(logging.WARNING, logger="trueup"):
        assert same([adapter(XS[3])], [before(XS[3])])
    assert caplog.text.count("the gradient is not finite; 1 update is left out") == 1
    assert adapter.updates == before.updates == 3
    assert twin.updates == 2  # to ask is to look
    adapter.save(tmp_path / "state")
    later = trueup.adapt(convnet(), "tent", lr=1e-2)
    later.load(tmp_path / "state")
    assert difference(adapter, later) == []
    twin.reset()
    assert twin.updates == 0


@pytest.mark.usefixtures("far")
def test_a_guard_is_told_at_once() -> None:
    adapter = trueup.adapt(convnet(), "tent", guard=True)
    play(adapter, XS[:2])
    hook = spoil(adapter)
    adapter(XS[2])
    hook.remove()
    assert adapter.monitor.marks.stuck == 1
    assert adapter.updates == 2


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("guard", [None, True])
def test_a_bad_first_batch_changes_nothing(guard: bool | None) -> None:
    adapter = trueup.adapt(convnet(), "tsd", guard=guard)
    bad = XS[0] * torch.nan
    with pytest.raises(ValueError, match="NaN, infinite or"):
        adapter(bad)
    assert same(play(adapter, XS[:2]), play(trueup.adapt(convnet(), "tsd", guard=guard), XS[:2]))
    with pytest.raises(ValueError, match="NaN, infinite or"):
        trueup.adapt(convnet(), "tsd", example=bad)
    if guard is None:
        later = copy.deepcopy(adapter)
        with pytest.raises(ValueError, match=r"rows \[3\]"):
            adapter(torch.cat([XS[2][:3], bad[:1], XS[2][3:]]))
        assert difference(adapter, later) == []
