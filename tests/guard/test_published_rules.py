"""Published rules, each against its own formula, alone and at work."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trueup
from trueup import Guard
from trueup.core.guarded_batch import restore_part
from trueup.guard.rules import BatchSignals, batch_signals
from trueup.rules import PUBLISHED, Asr, Cotta, RDumb, Roid, Rule, Sar
from trueup.testing import convnet, images
from trueup.testing.case import difference, play, same

XS = [images(16, seed=170 + i, shift=1.0)[0] for i in range(10)]


def seen(logits: Tensor, source: Tensor | None = None) -> BatchSignals:
    step: dict[str, Any] = {"loss": None, "updates": 0, "drift": None}
    return batch_signals(logits, source=None if source is None else batch_signals(source, source=None, **step), **step)


def guarded(*rules: Rule, method: str = "tent", **hyper: Any) -> trueup.Adapter:
    return trueup.adapt(convnet(), method, guard=Guard(rules=rules), **{"lr": 0.05, **hyper})


def selected(adapter: trueup.Adapter) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in adapter.net.selected.items()}


def source_of(adapter: trueup.Adapter) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in convnet().named_parameters() if n in adapter.net.selected}


def entropy(row: list[float]) -> float:
    parts = [math.exp(v - max(row)) for v in row]
    return -math.fsum(p / sum(parts) * math.log(p / sum(parts)) for p in parts if p > 0)


def test_sar() -> None:
    rule = Sar(threshold=0.5, momentum=0.9)
    state, mean = rule.init(3), None
    fired = []
    for i in range(60):
        row = [i / 10, 0.0, 0.0]
        now = entropy(row)
        mean = now if mean is None else 0.9 * mean + 0.1 * now
        action = rule.after(seen(torch.tensor([row] * 4)), state, {})
        assert (action is not None) == (mean < 0.5 * math.log(3)), i
        if action is not None:
            assert action.kind == "reset"
            mean = None  # it starts anew
            fired.append(i)
        elif mean is not None:
            assert float(state.mean) == pytest.approx(mean, rel=1e-4)
    assert len(fired) > 2
    assert Sar().threshold * math.log(1000) == pytest.approx(0.2)


def test_sar_takes_a_model_back() -> None:
    adapter = guarded(Sar(threshold=1.0))
    adapter(XS[0])  # an entropy below the greatest is enough
    assert adapter.health.events["reset"] == 1
    assert all(torch.equal(p, source_of(adapter)[n]) for n, p in selected(adapter).items())
    assert adapter.health.state == "healthy"


def test_rdumb() -> None:
    adapter, fresh = guarded(RDumb(every=4)), guarded(RDumb(every=4))
    answers = play(adapter, XS[:8])
    assert adapter.health.events["reset"] == 2
    assert all(torch.equal(p, source_of(adapter)[n]) for n, p in selected(adapter).items())
    expected = play(fresh, XS[:4])
    fresh.reset()
    assert same(answers, expected + play(fresh, XS[4:8]))
    assert Guard(cap=4).all_rules[-1] == RDumb(every=4)


def test_asr_by_hand() -> None:
    rule = Asr()
    state, mean = rule.init(4), math.log(0.5 * 4)
    rows = [
        [0.1, 0.0, 0.2, 0.1],
        [1.0, 0.0, 0.5, 0.2],
        [0.4, 0.0, 1.0, 0.2],
        [2.0, 0.0, 0.0, 0.0],
        [9.0, 0.0, 0.0, 0.0],
    ]
    acted = 0
    for i, row in enumerate(rows * 4):
        logits = torch.tensor([row] * 4)
        source = logits.clone()
        source[: i % 3, 3] = 20.0  # so many of four predictions differ
        flips = (i % 3) / 4 if i % 2 else 0.0
        now = entropy(row)
        action = rule.after(seen(logits, source if i % 2 else None), state, {})
        assert (action is not None) == (now < mean), i
        if action is not None:
            assert action.kind == "part"
            assert action.share == pytest.approx(1 - max(0.5 - 20 * (mean - now), 0.0), abs=1e-4)
            acted += 1
        mean += 0.15 * (1 - flips) * (now - mean)
        assert float(state.mean) == pytest.approx(mean, rel=1e-4)
    assert acted > 3


@pytest.mark.parametrize(("share", "layers"), [(0.0, 0), (0.2, 1), (0.5, 2), (0.6, 3), (1.0, 5)])
def test_the_last_part_of_the_layers(share: float, layers: int) -> None:
    """conv0, bn0, conv1, bn1 and the head have parameters."""
    adapter = guarded(method="pl", threshold=0.0)
    play(adapter, XS[:2])
    before, source = selected(adapter), source_of(adapter)
    restore_part(adapter.net, adapter.source, share)
    back = {"conv0": 0, "bn0": 1, "conv1": 2, "bn1": 3, "head": 4}
    for name, p in selected(adapter).items():
        assert torch.equal(p, source[name] if back[name.split(".")[0]] >= 5 - layers else before[name]), name
        assert not torch.equal(before[name], source[name])


def test_cotta_restores_by_chance() -> None:
    adapter, plain = (guarded(*rules, method="pl", threshold=0.0) for rules in ((Cotta(chance=0.3),), ()))
    adapter(XS[0])
    plain(XS[0])
    source, moved, here = source_of(adapter), selected(plain), selected(adapter)
    back = torch.cat([(here[n] == source[n]).flatten() for n in here if not torch.equal(moved[n], source[n])])
    still = torch.cat([(moved[n] == source[n]).flatten() for n in here if not torch.equal(moved[n], source[n])])
    count, drawn = int((~still).sum()), int((back & ~still).sum())
    assert abs(drawn - 0.3 * count) < 4 * math.sqrt(0.3 * 0.7 * count)
    for n in here:
        assert ((here[n] == source[n]) | (here[n] == moved[n])).all()


@pytest.mark.parametrize(("chance", "which"), [(0.0, "moved"), (1.0, "source")])
def test_cotta_at_its_ends(chance: float, which: str) -> None:
    adapter, plain = (guarded(*rules) for rules in ((Cotta(chance=chance),), ()))
    adapter(XS[0])
    plain(XS[0])
    expected = source_of(adapter) if which == "source" else selected(plain)
    assert all(torch.equal(p, expected[n]) for n, p in selected(adapter).items())


def test_cotta_draws_from_the_stream_of_the_adapter(tmp_path: Path) -> None:
    torch.manual_seed(1)
    adapter = guarded(Cotta(chance=0.3))
    theirs = torch.get_rng_state()
    play(adapter, XS[:3])
    assert torch.equal(theirs, torch.get_rng_state())
    torch.manual_seed(2)  # of no consequence
    twin = guarded(Cotta(chance=0.3))
    play(twin, XS[:3])
    assert difference(adapter, twin) == []
    adapter.save(tmp_path / "state")
    later = guarded(Cotta(chance=0.3))
    later.load(tmp_path / "state")
    assert same(play(adapter, XS[3:6]), play(later, XS[3:6]))
    assert difference(adapter, later) == []
    other = trueup.adapt(convnet(), "tent", lr=0.05, seed=7, guard=Guard(rules=(Cotta(chance=0.3),)))
    play(other, XS[:3])
    assert any(not torch.equal(p, selected(twin)[n]) for n, p in selected(other).items())


def test_roid_goes_a_hundredth_of_the_way() -> None:
    adapter, plain = (trueup.adapt(convnet().double(), "tent", lr=0.05, guard=Guard(rules=r)) for r in ((Roid(),), ()))
    adapter(XS[0].double())
    plain(XS[0].double())
    for name, source in source_of(adapter).items():
        source, moved = source.double(), selected(plain)[name]
        torch.testing.assert_close(selected(adapter)[name], 0.99 * moved + 0.01 * source, rtol=1e-12, atol=1e-14)
    assert adapter.health.events["pull"] == 0  # it is no event


def test_they_go_with_any_method() -> None:
    for rule in PUBLISHED.values():
        for method in ("tsd", "t3a", "lame", "bn"):
            adapter = trueup.adapt(convnet(), method, guard=Guard(rules=(rule(),)))
            twin = copy.deepcopy(adapter)
            assert same(play(adapter, XS[:3]), play(twin, XS[:3]))
            assert adapter(XS[3]).isfinite().all()


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        (Sar, {"threshold": 2.0}), (Sar, {"momentum": -1.0}), (RDumb, {"every": 0}), (RDumb, {"every": 2.0}),
        (Asr, {"start": -1.0}), (Asr, {"momentum": 1.5}), (Asr, {"keep": 2.0}), (Asr, {"slope": -1.0}),
        (Cotta, {"chance": 1.5}), (Roid, {"momentum": -0.1}),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_by_name(rule: type[Rule], settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        rule(**settings)


@pytest.mark.parametrize("rule", [Sar(), Asr(), Cotta(), Roid(), RDumb()])
@pytest.mark.parametrize("logits", [torch.zeros(1, 1000), torch.zeros(5, 2), 1e30 * torch.eye(6)])
def test_degenerate_answers(rule: Rule, logits: Tensor) -> None:
    state = rule.init(logits.shape[1])
    for _ in range(20):
        action = rule.after(seen(logits, logits), state, {})
        assert action is None or 0 <= action.share <= 1
    assert all(t.isfinite().all() for t in state.buffers())
