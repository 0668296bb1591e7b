"""Ways of running a model: precision, layout, graphs, activations that are worked out again."""

import copy
import functools
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.core import files
from trueup.model import autotune as tuning
from trueup.model.runner import Runner, RunSettings
from trueup.model.split_model import SplitModel
from trueup.testing import convnet, images, scenes, segnet
from trueup.testing.case import difference, play, same

XS = [images(12, seed=i, shift=1.0)[0] for i in range(4)]


def weights(adapter: trueup.Adapter) -> list[Tensor]:
    return [t.detach().clone() for t in adapter.net.model.state_dict().values()]


# Precision and layout


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_and_learns(precision: str) -> None:
    plain, half = (trueup.adapt(convnet(), "tent", precision=p) for p in ("float32", precision))
    for a, b in zip(play(plain, XS), play(half, XS), strict=True):
        assert b.dtype == torch.float32
        assert not torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.15)
    assert half.updates == len(XS)
    assert all(p.dtype == torch.float32 for p in half.net.model.parameters())


def test_small_gradients_survive_fp16() -> None:
    """A gradient of about 1e-9 is zero in fp16; the loss is scaled on its way there, and the gradient back."""
    half = trueup.adapt(convnet(), "tent", precision="fp16")
    assert half.net.runner.loss_scale == 4096
    grads = {}
    for precision in ("float32", "fp16"):
        adapter = trueup.adapt(nn.Linear(2, 2).double().float(), "tent", params="all", precision=precision, lr=0.0)
        with torch.no_grad():
            adapter.net.model.weight.copy_(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
            adapter.net.model.bias.zero_()
        seen: list[Tensor] = []
        x = torch.tensor([[4.0, -4.5]] * 2048)  # the mean over rows makes each row's share small
        adapter(x[:2])
        weight = adapter.net.model.weight
        adapter.optimizer.register_step_pre_hook(lambda *_, w=weight, to=seen: to.append(w.grad.clone()))
        adapter(x)
        grads[precision] = seen[0]
    torch.testing.assert_close(grads["fp16"], grads["float32"], rtol=2e-2, atol=0)
    assert grads["float32"].abs().max() > 0


@pytest.mark.parametrize("method", ["tent", "tsd", "cotta"])
def test_channels_last_answers_the_same(method: str, tmp_path: Path) -> None:
    plain, last = (trueup.adapt(convnet(), method, channels_last=c) for c in (False, True))
    for a, b in zip(play(plain, XS), play(last, XS), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    conv = next(m for m in last.net.modules() if isinstance(m, nn.Conv2d) and m.in_channels > 1)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    last.save(tmp_path / "state")
    other = trueup.adapt(convnet(), method, channels_last=True)
    other.load(tmp_path / "state")
    assert same(play(last, XS), play(other, XS))


# Measuring


class Clock:
    """Seconds go by as the ways say."""

    def __init__(self, cost: Callable[[RunSettings], float]) -> None:
        self.cost, self.now = cost, 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, way: RunSettings) -> None:
        self.now += self.cost(way)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({("float32", False): 1.0, ("float32", True): 0.8, ("bf16", False): 0.9, ("bf16", True): 0.5}, ("bf16", True)),
        ({("float32", False): 1.0, ("float32", True): 0.8, ("bf16", False): 17, ("bf16", True): 17}, ("float32", True)),
        (
            {("float32", False): 1.0, ("float32", True): 0.95, ("bf16", False): 0.92, ("bf16", True): 2},
            ("float32", False),
        ),
    ],
)
def test_the_fastest_way_is_chosen_if_it_is_clearly_faster(
    seconds: dict[tuple[str, bool], float], chosen: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(lambda way: seconds[way.precision, bool(way.channels_last)])
    monkeypatch.setattr(tuning, "time", clock)
    way = tuning.fastest(RunSettings(precision="auto", channels_last="auto"), clock.step, torch.device("cpu"))
    assert (way.precision, way.channels_last) == chosen
    assert not way.unresolved


def test_only_what_is_open_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ways = Clock(lambda way: 1.0), set()
    monkeypatch.setattr(tuning, "time", clock)
    step = lambda way: (ways.add((way.precision, way.channels_last)), clock.step(way))  # noqa: E731
    tuning.fastest(RunSettings(precision="bf16", channels_last="auto"), step, torch.device("cpu"))
    assert ways == {("bf16", False), ("bf16", True)}


def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tuning, "MAX_TIME_RATIO", 0.0)  # nothing is that fast
    with caplog.at_level(logging.INFO, logger="trueup"):
        auto = trueup.adapt(convnet(), "tsd", precision="auto", channels_last="auto")
        plain = trueup.adapt(convnet(), "tsd")
        assert same(play(plain, XS), play(auto, XS))
    assert difference(plain, auto) == []
    assert "measured: float32: " in caplog.text


def test_a_saved_state_brings_its_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is measured on another machine: what goes on is the same, to the bit."""
    way = RunSettings(precision="bf16", channels_last=True, measured=("precision", "channels_last"))
    monkeypatch.setattr(tuning, "fastest", lambda *_: way)
    first = trueup.adapt(convnet(), "tsd", precision="auto", channels_last="auto")
    play(first, XS[:2])
    assert first.net.runner.settings == way
    first.save(tmp_path / "state")
    monkeypatch.setattr(tuning, "fastest", lambda *_: RunSettings())
    for example in (None, XS[0]):
        later = trueup.adapt(convnet(), "tsd", precision="auto", channels_last="auto", example=example)
        later.load(tmp_path / "state")
        assert later.net.runner.settings == way
        assert same(play(copy.deepcopy(first), XS[2:]), play(later, XS[2:]))


class Odd(nn.Module):
    """Has an operation that bf16 does not have, and flattens with a view."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.conv, self.fc, self.half = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(4 * 49, 3), half

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.conv(x)
        if not self.half and z.dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")
        out: Tensor = self.fc(z.view(len(z), -1))
        return out


@pytest.mark.parametrize("half", [False, True])
def test_a_way_that_a_model_cannot_take_is_not_chosen(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_TIME_RATIO", 1e9)  # any other way is fast enough
    torch.manual_seed(0)
    x, model = torch.randn(8, 3, 16, 16), Odd(half)
    tried = []
    clock = Clock(lambda way: 1.0 if way.precision == "float32" else 0.5)
    monkeypatch.setattr(tuning, "time", clock)
    run = tuning.fastest
    step = lambda way, step: (step(way), tried.append(way), clock.step(way))  # noqa: E731
    monkeypatch.setattr(tuning, "fastest", lambda e, s, d: run(e, lambda way: step(way, s), d))
    adapter = trueup.adapt(model, "tent", params="all", precision="auto", channels_last="auto", example=x)
    assert {(way.precision, way.channels_last) for way in tried} == {("float32", False), ("bf16", False)} - (
        set() if half else {("bf16", False)}
    )
    assert (adapter.net.runner.settings.precision, adapter.net.runner.settings.channels_last) == (
        "bf16" if half else "float32",
        False,
    )


def test_each_way_is_measured_in_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one way has moved must not stay so for the next."""
    seen: list[tuple[bool | str | None, bool]] = []
    run = Runner.run

    def spy(runner: Runner, *args: Any) -> Any:
        conv = next(m for m in runner.model.modules() if isinstance(m, nn.Conv2d) and m.in_channels > 1)
        seen.append((runner.settings.channels_last, conv.weight.is_contiguous(memory_format=torch.channels_last)))
        return run(runner, *args)

    monkeypatch.setattr(Runner, "run", spy)
    trueup.adapt(convnet(), "tent", channels_last="auto", example=XS[0])
    assert set(seen) == {(False, False), (True, True)}


@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("method", ["tsd", "cotta", "rotta"])
def test_a_loaded_choice_is_that_of_all_networks(
    method: str, ours: bool, theirs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The weights and those of teachers go where the file says, whatever was chosen here before."""

    def fresh(last: bool) -> trueup.Adapter:
        monkeypatch.setattr(tuning, "fastest", lambda e, *_: replace(e, precision="float32", channels_last=last))
        hyper = {"views": 2, "chunk": 32} if method == "cotta" else {}
        return trueup.adapt(convnet(), method, channels_last="auto", example=XS[0], **hyper)

    first, later = fresh(theirs), fresh(ours)
    play(first, XS[:2])
    first.save(tmp_path / "state")
    later.load(tmp_path / "state")
    nets = [net for net in (*later.modules(), *later.fresh.memory.modules()) if isinstance(net, SplitModel)]
    assert len(nets) >= (1 if method == "tsd" else 3)
    for net in nets:
        conv = next(m for m in net.model.modules() if isinstance(m, nn.Conv2d) and m.in_channels > 1)
        assert net.runner.settings.channels_last is theirs
        assert conv.weight.is_contiguous(memory_format=torch.channels_last) is theirs
    assert same(play(first, XS[2:]), play(later, XS[2:]))


def test_what_was_said_stays_so(tmp_path: Path) -> None:
    """A file brings what was to be found out, not what was said."""
    first = trueup.adapt(convnet(), "tent", precision="auto")
    play(first, XS[:2])
    first.save(tmp_path / "state")
    later = trueup.adapt(convnet(), "tent", precision="auto", channels_last=True)
    later.load(tmp_path / "state")
    assert later.net.runner.settings.channels_last is True


def test_a_file_must_say_how_its_model_ran(tmp_path: Path) -> None:
    first = trueup.adapt(convnet(), "tent", precision="auto", channels_last="auto")
    play(first, XS[:1])
    first.save(tmp_path / "state")
    tensors, header = files.read(tmp_path / "state")
    files.write(tmp_path / "forged", tensors, {**header, "engine": {"precision": "auto", "channels_last": False}})
    with pytest.raises(ValueError, match="does not say how its model ran"):
        trueup.adapt(convnet(), "tent", precision="auto", channels_last="auto").load(tmp_path / "forged")


def test_a_model_may_have_no_part_in_what_is_measured() -> None:
    """Where only an auxiliary head is to be updated, the logits have no gradient."""

    class Aux(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.aux = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.aux(x)
            out: Tensor = self.fc(x)
            return out

    adapter = trueup.adapt(Aux(), "tent", params="aux", precision="auto")
    assert adapter(torch.randn(4, 4)).isfinite().all()


def test_volumes_keep_their_layout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3))
    x = torch.randn(6, 1, 6, 6, 6)
    plain, last = (trueup.adapt(model, "tent", channels_last=c) for c in (False, True))
    assert same([plain(x), plain(x)], [last(x), last(x)])


def test_moments_follow_the_layout_of_their_parameters() -> None:
    """A fused step reads both as they lie in memory."""
    adapter, plain = (trueup.adapt(convnet(), "tsd", lr=1e-2) for _ in range(2))
    play(adapter, XS[:2])
    play(plain, XS[:2])
    adapter.to(memory_format=torch.channels_last)
    state = adapter.optimizer.state
    assert {v.stride() == p.stride() for p, kept in state.items() for v in kept.values() if v.shape == p.shape} == {
        True
    }
    for a, b in zip(play(adapter, XS[2:]), play(plain, XS[2:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("norm", ["ema", "mix", "prior"])
def test_squares_of_halves_do_not_overflow(norm: str) -> None:
    """Activations of 1,000 are fine in fp16; their squares are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    x = torch.randn(16, 4) * 1000
    plain, half = (trueup.adapt(model, "tent", norm=norm, precision=p) for p in ("float32", "fp16"))
    torch.testing.assert_close(plain(x), half(x), rtol=0.05, atol=0.05)


def test_a_scale_that_is_too_large_shrinks(tmp_path: Path) -> None:
    """In fp16 a gradient is multiplied by 4,096 on its way; where that is too much, it is less from then on."""
    torch.manual_seed(0)
    model, x = nn.Linear(64, 5), torch.randn(2, 64) * 1000
    nn.init.normal_(model.weight, std=1e-4)

    def fresh() -> trueup.Adapter:
        return trueup.adapt(model, "tent", params="all", precision="fp16", lr=1e-6)

    adapter = fresh()
    play(adapter, [x] * 6)
    shrunk = adapter.net.runner.steps.shrunk
    assert adapter.updates == 6 - shrunk < 6
    assert adapter.net.runner.loss_scale == 4096 / 4**shrunk > 1
    adapter.save(tmp_path / "state")
    later = fresh()
    later.load(tmp_path / "state")
    assert later.net.runner.loss_scale == adapter.net.runner.loss_scale
    assert same(play(adapter, [x] * 2), play(later, [x] * 2))
    adapter.reset()
    assert adapter.net.runner.loss_scale == 4096
    assert same(play(adapter, [x] * 6), play(fresh(), [x] * 6))


# Graphs


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made, but nothing is compiled to machine code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("norm", ["source", "batch"])
@pytest.mark.parametrize("method", ["tent", "tsd"])
def test_a_graph_answers_the_same(method: str, norm: str, tmp_path: Path) -> None:
    plain, graph = (trueup.adapt(convnet(), method, norm=norm, compile=c) for c in (False, True))
    stream = [*XS, XS[0][:1], XS[1][:5]]
    for a, b in zip(play(plain, stream), play(graph, stream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights(plain), weights(graph), rtol=1e-5, atol=1e-6)
    graph.save(tmp_path / "state")
    twin = copy.deepcopy(graph)
    assert same(play(graph, XS[:1]), play(twin, XS[:1]))
    graph.reset()
    plain.reset()
    torch.testing.assert_close(plain(XS[0]), graph(XS[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("eager")
def test_a_graph_is_made_once_for_all_batches_of_a_size() -> None:
    adapter = trueup.adapt(convnet(), "tsd", compile=True)
    play(adapter, XS[:2])
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    play(adapter, XS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0


@pytest.mark.usefixtures("eager")
def test_every_model_has_its_graphs() -> None:
    """However many there were before; each is made once."""
    for i in range(10):
        model = nn.Sequential(nn.Linear(4, 3 + i), nn.BatchNorm1d(3 + i), nn.Linear(3 + i, 3))
        adapter = trueup.adapt(model, "tent", compile=True)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        play(adapter, [torch.randn(8, 4) for _ in range(3)])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.usefixtures("eager")
def test_small_batches_of_masks_run_without_a_graph_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    def graphs(norm: str) -> int:
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        adapter = trueup.adapt(segnet(), "tent", compile=True, norm=norm)
        play(adapter, [scenes(4, seed=i)[0] for i in range(2)])
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)

    with caplog.at_level(logging.INFO, logger="trueup"):
        assert graphs("source") > 0
        assert "without a graph" not in caplog.text
        assert graphs("batch") == 0
    assert caplog.text.count("run without a graph") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
def test_compiled_code_answers_the_same() -> None:
    plain, fast = (trueup.adapt(convnet(), "tsd", compile=c) for c in (False, True))
    for a, b in zip(play(plain, XS[:2]), play(fast, XS[:2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"precision": "half"}, "precision='half' must be"),
        ({"channels_last": 1}, "channels_last=1 must be"),
        ({"compile": "yes"}, "compile='yes' must be"),
        ({"memory": "small"}, "memory='small' must be"),
        ({"compile": True, "memory": "low"}, "do not go together"),
        ({"compile": True, "norm": "ema"}, "compile=True goes with norm='source' or 'batch'"),
        ({"memory": "low", "norm": "instance:4"}, "memory='low' does not go with"),
    ],
    ids=str,
)
def test_what_does_not_go_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        trueup.adapt(convnet(), "tent", **wrong)
