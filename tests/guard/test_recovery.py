"""What a guard does when an adapter is broken on purpose, or has gone astray."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from chatty import Chatty
from torch import Tensor, nn

import trueup
from trueup import Guard, rules
from trueup.core.saving import to_file
from trueup.testing import convnet, images
from trueup.testing.case import difference, frozen_tensors, play

XS = [images(16, seed=70 + i, shift=1.0)[0] for i in range(24)]
QUIET = Guard(rules=(), window=32, compare=1)  # two of these batches; only what is not finite counts


def finite(adapter: trueup.Adapter) -> bool:
    tensors = [*frozen_tensors(adapter), *to_file(adapter)[0].values()]
    return all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())


@torch.no_grad()
def reads(adapter: trueup.Adapter, x: Tensor) -> Tensor:
    """What the weights and statistics of an adapter say, without learning."""
    return adapter.net(x).logits


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
@pytest.mark.parametrize("norm", ["batch", "robust", "source"])
def test_a_parameter_that_was_broken_between_batches(norm: str, value: float) -> None:
    """States are kept after batches 1, 3 and 5, and the older of the last two is the last good one."""
    adapter = trueup.adapt(convnet(), "tent", norm=norm, lr=1e-2, guard=QUIET)
    twin = trueup.adapt(convnet(), "tent", norm=norm, lr=1e-2)
    play(twin, XS[:4])
    play(adapter, XS[:7])
    with torch.no_grad():
        adapter.net.model.bn1.weight.fill_(value)
    answer = adapter(XS[7])
    assert torch.equal(answer, reads(twin, XS[7]))
    assert adapter.health.state == "rolled back"
    assert "not finite" in adapter.health.reason
    assert torch.equal(adapter(XS[8]), reads(twin, XS[8]))
    assert finite(adapter)


@pytest.mark.parametrize("norm", ["batch", "robust", "ema", "source"])
@pytest.mark.parametrize("method", ["tent", "shot-im", "tsd"])
def test_a_step_into_nowhere_is_taken_back_at_once(method: str, norm: str) -> None:
    adapter = trueup.adapt(convnet(), method, norm=norm, lr=1e30, guard=QUIET, example=XS[0])
    fresh, before = copy.deepcopy(adapter), {n: t.detach().clone() for n, t in to_file(adapter)[0].items()}
    answers = play(adapter, XS[:2])
    after = to_file(adapter)[0]
    assert adapter.health.events["rollback"] == 1
    assert finite(adapter)
    assert answers[0].isfinite().all()
    # The batch that broke it is not learnt in another way after the state was taken back.
    assert [n for n in before if not n.startswith("watch") and not torch.equal(before[n], after[n])] == []
    assert after.keys() - before.keys() <= {"random/cpu"}
    assert torch.equal(answers[1], reads(fresh, XS[1]))


def test_a_batch_goes_back_at_most_once() -> None:
    """With several steps the ones after the one that was taken back are not made: then nothing is learnt."""
    adapter = trueup.adapt(convnet(), "tent", lr=1e30, steps=4, guard=QUIET)
    adapter(XS[0])
    assert adapter.health.events["rollback"] == 1
    assert adapter.monitor.marks.cooldown == 2 * QUIET.window
    assert adapter.updates == 1


def test_an_optimiser_that_was_broken() -> None:
    adapter = trueup.adapt(convnet(), "tent", lr=1e-2, guard=QUIET)
    play(adapter, XS[:5])
    for values in adapter.optimizer.state.values():
        values["exp_avg"].fill_(torch.nan)
    adapter(XS[5])
    assert adapter.health.state == "rolled back"
    assert finite(adapter)


def test_parameters_of_a_state_are_watched_too() -> None:
    adapter = trueup.adapt(convnet(), Chatty(limit=10**6, params="none", lr=1e30), guard=QUIET)
    play(adapter, XS[:3])
    assert adapter.health.events["rollback"] >= 1
    assert all(p.abs().max() < 1e3 for p in adapter.state.projector.parameters())


@pytest.mark.parametrize("method", ["t3a", "tsd"])
def test_a_memory_that_was_broken(method: str) -> None:
    adapter = trueup.adapt(convnet(), method, guard=QUIET)
    play(adapter, XS[:6])
    adapter.state.sums.fill_(torch.nan)
    play(adapter, XS[6:8])
    assert adapter(XS[8]).isfinite().all()
    assert finite(adapter)


@pytest.mark.parametrize(("method", "lr"), [("tent", 1.0), ("shot-im", 0.1), ("pl", 0.1), ("tsd", 0.1)])
def test_a_learning_rate_a_thousand_times_too_large(method: str, lr: float) -> None:
    """It is noticed within 256 images, and what was taken back answers about as well as the source."""
    adapter, source = trueup.adapt(convnet(), method, lr=lr, preset="safe"), convnet()
    right, theirs, seen = [], [], []
    for i in range(40):
        x, y = images(32, seed=3000 + i, shift=0.7)
        before, answer = adapter.health.state, adapter(x)
        seen.append(adapter.health.state)
        if before in ("rolled back", "fallback"):
            right.append((answer.argmax(dim=1) == y).float().mean())
            theirs.append((source(x).argmax(dim=1) == y).float().mean())
    assert set(seen[:8]) - {"healthy"}
    assert len(right) >= 8
    assert torch.stack(right).mean() > torch.stack(theirs).mean() - 0.05
    assert finite(adapter)


def test_moving_to_another_precision_takes_the_good_states_along() -> None:
    adapter, plain = (trueup.adapt(convnet(), "tsd", lr=1e-3, guard=g) for g in (QUIET, False))
    play(adapter, XS[:6])
    play(plain, XS[:4])
    adapter.double()
    plain.double()
    with torch.no_grad():
        adapter.net.model.bn1.weight.fill_(torch.nan)
    assert torch.equal(adapter(XS[6].double()), reads(plain, XS[6].double()))
    assert adapter.state.features.dtype == plain.state.features.dtype
    for x in XS[7:12]:
        assert adapter(x.double()).dtype == torch.float64


class Overflowing(nn.Module):
    """Where images are large, finite with statistics of the batch, and not with the source's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bn0, self.mix, self.bn1 = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.mix.weight.data *= 1e15
        self.head.weight.data *= 1e15

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn1(self.mix(self.bn0(x))).amax(dim=(2, 3)))


def test_a_source_without_a_finite_answer_poisons_no_rule() -> None:
    adapter = trueup.adapt(Overflowing().eval(), "tent", guard=True)
    for x in XS[:6]:
        assert adapter(1e11 * x).isfinite().all()
    assert all(t.isfinite().all() for t in adapter.monitor.memory.state_dict().values())
    assert all(v == v for v in adapter.health.numbers.values())


def test_statistics_that_are_not_finite_do_not_stop_a_guarded_stream() -> None:
    """Robust statistics refuse a batch after its forward; it must not come back with the next."""

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.bn, self.head = nn.BatchNorm2d(3), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bn(x * x * x).tanh().mean(dim=(2, 3)))

    adapter = trueup.adapt(Bounded().eval(), "tent", norm="robust", guard=Guard(rules=(), largest=1e30))
    play(adapter, XS[:3])
    before = copy.deepcopy(adapter)
    try:
        answer = adapter(1e9 * XS[3])
    except ValueError:
        assert difference(before, adapter) == []
    else:
        assert answer.isfinite().all()
    for x in XS[4:8]:
        assert adapter(x).isfinite().all()


@dataclass(frozen=True, kw_only=True)
class AskOnce(rules.Rule):
    """Ask for a fallback after the first batch."""

    def init(self, classes: int) -> nn.Module:
        return rules.buffers(count=torch.tensor(0))

    def after(self, signals: rules.BatchSignals, state: Any, numbers: dict[str, float]) -> rules.Action | None:
        state.count.add_(1)
        return rules.Action("fallback", "asked for") if int(state.count) == 1 else None


@pytest.mark.parametrize("method", ["adacontrast", "tent", "sar"])
def test_a_restart_within_a_batch_ends_the_batch(method: str) -> None:
    """During a fallback a step that breaks a parameter restarts the adapter; `after` must not see the new state.

    AdaContrast's would move the head of the source by ten times its distance from the one that was given up.
    """
    adapter = trueup.adapt(convnet(), method, lr=1e-2, guard=Guard(rules=(AskOnce(),), window=512))
    play(adapter, XS[:2])
    assert adapter.health.state == "fallback"
    for group in adapter.optimizer.param_groups:
        group["lr"] = 1e30
    adapter(XS[2])
    assert adapter.health.events["fallback"] == 2
    source = dict(convnet().named_parameters())
    assert [name for name, p in adapter.net.selected.items() if not torch.equal(p, source[name])] == []
