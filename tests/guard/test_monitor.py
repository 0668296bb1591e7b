"""The guard: what it lets in, its states, what it takes back, and that it otherwise only watches."""

import copy
import dataclasses
import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SMALL
from torch import Tensor, nn

import trueup
from trueup import Event, Guard, rules
from trueup.core.building import make_ready
from trueup.core.guarded_batch import source_logits
from trueup.core.saving import to_file
from trueup.guard.rules import Action, BatchSignals, Rule
from trueup.testing import convnet, images, scenes, segnet
from trueup.testing.case import difference, play, same

XS = [images(16, seed=70 + i, shift=1.0)[0] for i in range(24)]
WINDOW = 32  # two of these batches


@dataclass(frozen=True, kw_only=True)
class Script(Rule):
    """Asks for something at given batches."""

    script: dict[int, str] = dataclasses.field(default_factory=dict)

    def init(self, classes: int) -> nn.Module:
        return rules.buffers(at=torch.tensor(0))

    def after(self, signals: BatchSignals, state: Any, numbers: dict[str, float]) -> Action | None:
        kind: Any = self.script.get(int(state.at))
        state.at += 1
        return None if kind is None else Action(kind, f"the script says {kind}", 0.5)


def scripted(
    script: dict[int, str], method: str = "tent", notify: Any = None, window: int = WINDOW, **hyper: Any
) -> trueup.Adapter:
    guard = Guard(rules=(Script(script=script),), window=window, compare=1, probation=1, notify=notify)
    hyper = {"lr": 1e-2, **hyper} if method in ("tent", "tsd", "pl") else hyper
    return trueup.adapt(convnet(), method, guard=guard, **hyper)


def states(adapter: trueup.Adapter, xs: list[Tensor]) -> list[str]:
    seen = []
    for x in xs:
        adapter(x)
        seen.append(adapter.health.state)
    return seen


def vital(adapter: trueup.Adapter) -> dict[str, Tensor]:
    """Weights, statistics, memory and optimiser; not what the guard remembers, nor the random stream."""
    tensors = {n: t for n, t in to_file(adapter)[0].items() if not n.startswith(("watch", "kept", "random"))}
    return {n: t.detach().clone() for n, t in tensors.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# Only watching


def made(method: str, **how: Any) -> trueup.Adapter:
    adapter = trueup.adapt(convnet(), method, **how)
    if method == "eata":
        adapter.prepare([images(32, seed=s)[0] for s in (1, 2)])
    return adapter


@pytest.mark.parametrize("method", trueup.list_methods())
def test_where_nothing_is_wrong_it_only_watches(method: str) -> None:
    xs = [images(24, seed=900 + i, shift=0.85)[0] for i in range(16)]
    # MEMO's gradients are of one image each: with statistics of its views alone some are spikes, and are left out.
    for how in ({},) if method == "memo" else ({}, {"norm": "robust"}):
        how = {**how, **SMALL.get((method, "classification"), {})}
        plain, guarded = made(method, **how), made(method, guard=True, **how)
        assert same(play(plain, xs), play(guarded, xs))
        assert guarded.health.state == "healthy"
        assert guarded.health.images == 16 * 24
        # On its own the source is watched by a drift alarm, and this is a shift.
        assert {name for name, n in guarded.health.events.items() if n} <= ({"drift"} if method == "source" else set())
        assert equal(vital(plain), vital(guarded))
        assert same(list(plain.random.states.values()), list(guarded.random.states.values()))


@pytest.mark.parametrize("where", ["autocast", "inference", "episodic", "masks", "labels", "label vectors"])
def test_it_only_watches_elsewhere_too(where: str) -> None:
    model = segnet(multilabel=where == "labels") if where in ("masks", "labels") else convnet()
    xs = [scenes(8, seed=i, shift=0.5)[0] for i in range(6)] if where in ("masks", "labels") else XS[:6]
    hyper = {"episodic": where == "episodic", "multilabel": where.startswith("label"), "lr": 1e-3}
    watch = Guard(rules=(Script(),))
    context: Any = nullcontext()
    if where in ("autocast", "inference"):
        context = torch.autocast("cpu", dtype=torch.bfloat16) if where == "autocast" else torch.inference_mode()
    for method in ("tent", "pl"):
        plain, guarded = (trueup.adapt(model, method, guard=g, **hyper) for g in (False, watch))
        with context:
            assert same(play(plain, xs), play(guarded, xs))
        assert equal(vital(plain), vital(guarded))


class Noisy(nn.Module):
    """Draws random numbers and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bn, self.head = nn.BatchNorm2d(3), nn.Linear(3, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head((self.bn(x) + torch.randn_like(x)).mean(dim=(2, 3)))


@pytest.mark.parametrize("norm", ["batch", "ema", "robust"])
def test_asking_the_source_is_pure(norm: str) -> None:
    adapter = trueup.adapt(Noisy().eval(), "tent", norm=norm, lr=0.1, guard=True)
    play(adapter, XS[:3])
    twin, theirs = copy.deepcopy(adapter), torch.get_rng_state()
    source_logits(adapter, XS[3])
    assert difference(twin, adapter) == []
    assert torch.equal(theirs, torch.get_rng_state())
    convolution = trueup.adapt(convnet(), "tent", norm=norm, lr=0.1, guard=True)
    play(convolution, XS[:3])
    with torch.no_grad():
        assert torch.equal(source_logits(convolution, XS[3]), convnet()(XS[3]))


# States


def test_a_suspicion_that_is_not_confirmed() -> None:
    adapter = scripted({1: "suspect"})
    assert states(adapter, XS[:4]) == ["healthy", "suspect", "healthy", "healthy"]
    assert adapter.health.events["suspect"] == 1
    assert adapter.health.events["rollback"] == 0


ILL = dict.fromkeys(range(1, 5), "suspect")
COURSE = ["healthy", *["suspect"] * 2, "rolled back", *["fallback"] * 8, *["probation"] * 4, "healthy", "healthy"]


@pytest.mark.parametrize("norm", ["batch", "ema", "robust"])
def test_the_whole_course(norm: str) -> None:
    """Suspect for half a window, rolled back, no better, the source for a doubled cool-down, probation, healthy."""
    adapter, source = scripted(ILL, norm=norm, window=64), convnet()
    adapter.monitor.kept = []
    parameters = {}
    for i, (x, expected) in enumerate(zip(XS, COURSE, strict=False)):
        answer = adapter(x)
        assert adapter.health.state == expected, i
        parameters[i] = vital(adapter)
        if expected == "fallback" or COURSE[i - 1] == "fallback":
            with torch.no_grad():
                assert torch.equal(answer, source(x))
    assert equal(parameters[1], parameters[2])  # nothing is learnt under suspicion
    assert not equal(parameters[0], parameters[1])
    fresh = scripted(ILL, norm=norm)
    fresh(XS[0])
    fresh.reset()
    assert equal(parameters[4], vital(fresh))  # it tries again from the source
    assert not equal(parameters[5], parameters[4])  # and learns unseen
    assert adapter.health.events == {
        **dict.fromkeys(adapter.health.events, 0),
        "suspect": 1,
        "rollback": 1,
        "fallback": 1,
    }


@pytest.mark.parametrize("method", trueup.list_methods())
@pytest.mark.parametrize("norm", ["batch", "ema", "robust"])
def test_what_is_frozen_learns_nothing(method: str, norm: str) -> None:
    guard = Guard(rules=(Script(script={2: "suspect", 3: "suspect", 4: "rollback"}),), window=128)
    adapter = trueup.adapt(convnet(), method, guard=guard, norm=norm)
    xs = [x[:1] for x in XS] if method == "memo" else XS  # MEMO takes one image at a time
    play(adapter, xs[:3])
    before, updates = vital(adapter), adapter.updates
    adapter(xs[3])
    assert adapter.health.state == "suspect"
    assert equal(before, vital(adapter))
    adapter(xs[4])
    assert adapter.health.state == "rolled back"
    before = vital(adapter)
    play(adapter, xs[5:8])
    assert adapter.health.state == "rolled back"
    assert equal(before, vital(adapter))
    assert adapter.updates == updates


def test_the_cool_down_doubles_and_is_bounded() -> None:
    adapter = scripted(dict.fromkeys(range(40), "rollback"))
    lengths = []
    for x in XS:
        events = sum(adapter.health.events.values())
        adapter(x)
        if sum(adapter.health.events.values()) > events:
            lengths.append(adapter.monitor.marks.until - adapter.health.images)
    assert lengths[:6] == [32, 64, 128, 256, 512, 512]
    assert set(lengths[6:]) == {512}


@pytest.mark.parametrize("method", ["tent", "tsd", "eta", "t3a", "bn"])
@pytest.mark.parametrize("norm", ["batch", "ema", "robust"])
def test_it_goes_back_to_the_older_of_two_good_states(method: str, norm: str) -> None:
    """States are kept after batches 1, 3 and 5; a rollback at batch 6 goes to that after 3, as often as it takes."""
    adapter, twin = (scripted(s, method, norm=norm) for s in ({6: "rollback", 10: "rollback"}, {}))
    play(twin, XS[:4])
    good = vital(twin)
    play(adapter, XS[:7])
    assert adapter.health.state == "rolled back"
    assert equal(good, vital(adapter))
    play(adapter, XS[7:10])
    assert adapter.health.state == "probation"
    assert method in ("bn", "t3a") or norm == "robust" or not equal(good, vital(adapter))
    adapter(XS[10])
    assert adapter.health.events["rollback"] == 2
    assert equal(good, vital(adapter))


def test_a_state_that_was_passed_over_is_not_gone_back_to() -> None:
    """The newer of two states may have been taken when it had begun; so later, too, it is no good state."""
    adapter, twin = (scripted(s) for s in ({6: "rollback", 12: "rollback"}, {}))
    play(twin, XS[:6])
    passed_over = vital(twin)
    play(adapter, XS[:13])
    assert adapter.health.events["rollback"] == 2
    assert not equal(passed_over, vital(adapter))


AGAIN = {**ILL, 13: "pull", 16: "rollback", 19: "reset", 20: "restore", 21: "part"}


@pytest.mark.parametrize(("method", "norm"), [("tent", "batch"), ("tsd", "robust"), ("eta", "ema"), ("t3a", "batch")])
def test_every_state_is_saved_copied_and_forgotten(method: str, norm: str, tmp_path: Path) -> None:
    adapter, fresh = (scripted(AGAIN, method, norm=norm) for _ in range(2))
    make_ready(fresh, XS[0])
    expected = play(adapter, XS)
    assert set(COURSE) <= {adapter.health.state, *COURSE}
    last, adapter = adapter, scripted(AGAIN, method, norm=norm)
    for i, x in enumerate(XS[:-1]):
        assert torch.equal(adapter(x), expected[i])
        if i % 3 and i not in (16, 17):
            continue
        adapter.save(tmp_path / "state")
        later, twin = scripted(AGAIN, method, norm=norm), copy.deepcopy(adapter)
        later.load(tmp_path / "state")
        assert later.health == adapter.health
        assert difference(adapter, later) == []
        assert same(play(later, XS[i + 1 :]), expected[i + 1 :])
        assert difference(last, later) == []
        twin.reset()
        assert difference(fresh, twin) == []
        assert twin.health == fresh.health


def test_the_cap() -> None:
    adapter = trueup.adapt(convnet(), "tsd", guard=Guard(rules=(), cap=3), example=XS[0])
    fresh = vital(adapter)
    expected = play(trueup.adapt(convnet(), "tsd"), XS[:3])
    assert same(play(adapter, XS[:3]), expected)
    assert equal(fresh, vital(adapter))
    assert same(play(adapter, XS[:3]), expected)
    adapter(XS[0])
    assert not equal(fresh, vital(adapter))
    assert adapter.health.events["reset"] == 2


# Words


@dataclass(frozen=True, kw_only=True)
class Never(Rule):
    """Lets no step pass."""

    def before(self, gradient: float, state: Any) -> str:
        return "never"


def test_every_event_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []
    script = {1: "suspect", 3: "pull", 4: "reset", 5: "rollback", 6: "fallback"}
    adapter = scripted(script, notify=told.append)
    adapter.monitor.rules = (*adapter.monitor.rules, Never())
    bad = XS[7].clone()
    bad[3] = torch.nan
    with caplog.at_level(logging.INFO, logger="trueup"):
        play(adapter, [*XS[:7], bad])
    names = [event.name for event in told if event.name != "skipped"]
    assert names == ["suspect", "pull", "reset", "rollback", "fallback", "quarantined"]
    assert [e.images for e in told if e.name != "skipped"] == [32, 64, 80, 96, 112, 127]
    assert {e.reason for e in told if e.name == "skipped"} == {"a step was left out: never"}
    assert adapter.updates == 0
    assert adapter.health.events == {n: [e.name for e in told].count(n) for n in adapter.health.events}
    for event in told:
        lines = [r for r in caplog.records if event.reason in r.message and event.name in r.message]
        assert lines, event
        assert {r.levelno for r in lines} == {
            logging.WARNING if event.name in ("rollback", "fallback", "quarantined") else logging.INFO
        }


def test_health_in_words() -> None:
    health = trueup.Health(
        "suspect", "it looks odd", 12_345, {"flip_rate": 0.25, "drift": 0.123456}, {"reset": 0, "pull": 2}, ()
    )
    assert str(health) == "suspect after 12,345 images: it looks odd; drift 0.123; flip rate 0.25; 2 × pull"
    assert "guard: healthy" in repr(trueup.adapt(convnet(), "tent", guard=True))


class Owner:
    """Holds something that cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.heard = threading.Lock(), 0

    def hear(self, event: Event) -> None:
        self.heard += 1


def test_who_is_told_stays_the_same_after_loading(tmp_path: Path) -> None:
    owner = Owner()
    adapter = scripted({3: "reset"}, notify=owner.hear)
    play(adapter, XS[:2])
    adapter.save(tmp_path / "state")
    later = scripted({3: "reset"}, notify=owner.hear)
    later.load(tmp_path / "state")
    play(copy.deepcopy(later), XS[2:4])
    play(later, XS[2:4])
    assert owner.heard == 2


def test_a_sign_in_probation_does_not_end_it() -> None:
    script = {2: "rollback", 8: "suspect"}
    adapter = scripted(script, window=64)
    seen = states(adapter, XS[:20])
    after = seen[seen.index("suspect") :]
    assert next(state for state in after if state != "suspect") == "probation"


def test_alternating_signs_are_no_clearance() -> None:
    adapter = scripted(dict.fromkeys(range(1, 20, 2), "suspect"), window=128)
    assert "rolled back" in states(adapter, XS[:10])


def test_who_is_told_cannot_stop_an_answer() -> None:
    def fails(event: Event) -> None:
        raise RuntimeError("pager down")

    adapter = scripted({1: "rollback"}, notify=fails)
    assert all(answer.isfinite().all() for answer in play(adapter, XS[:3]))
    assert adapter.health.events["rollback"] == 1


def test_what_is_answered_is_what_is_watched() -> None:
    """LAME and T3A answer something else than the model's logits."""
    for method in ("lame", "t3a"):
        adapter = trueup.adapt(convnet(), method, guard=Guard(compare=1))
        with torch.no_grad():
            flips = [(adapter(x).argmax(dim=1) != convnet()(x).argmax(dim=1)).float().mean() for x in XS[:4]]
        assert adapter.health.numbers["flip_rate"] == pytest.approx(float(torch.stack(flips).mean()), abs=0.05)
