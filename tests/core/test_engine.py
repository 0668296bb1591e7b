"""Ways of running a model: precision, layout, graphs, activations that are worked out again."""

import copy
import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import trueup
from trueup.core import tuning
from trueup.core.engine import Engine, blocks_of
from trueup.testing import convnet, images
from trueup.testing.case import difference, play, same

XS = [images(12, seed=i, shift=1.0)[0] for i in range(4)]
SMALL = [torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def resnet(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return torchvision.models.resnet18(weights=None, num_classes=5)


def weights(adapter: trueup.Adapter) -> list[Tensor]:
    return [t.detach().clone() for t in adapter.net.model.state_dict().values()]


# Low memory


@pytest.mark.parametrize("norm", ["source", "batch", "ema", "mix", "prior", "robust"])
@pytest.mark.parametrize("params", ["norm", "all"])
def test_low_memory_changes_no_bit(params: str, norm: str) -> None:
    """Of what is learnt: only banks are rounded, and Tent has none."""
    plain, low = (
        trueup.adapt(resnet(), "tent", norm=norm, params=params, lr=1e-3, memory=memory) for memory in ("usual", "low")
    )
    assert same(play(plain, SMALL), play(low, SMALL))
    assert same(weights(plain), weights(low))


def kept_bytes(adapter: trueup.Adapter, x: Tensor) -> int:
    """What autograd keeps for backward, each storage once, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in adapter.net.parameters()}
    seen: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    out = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), adapter.net.normalizing(len(x)):
        out.append(adapter.net(x).logits)  # held, so that no storage is used twice
    return sum(seen.values())


def test_low_memory_keeps_the_inputs_of_blocks_alone() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None, num_classes=5)
    usual, low = (trueup.adapt(model, "tent", params="all", example=SMALL[0], memory=m) for m in ("usual", "low"))
    assert kept_bytes(low, SMALL[0]) < 0.4 * kept_bytes(usual, SMALL[0])


def test_blocks_are_parts_that_follow_one_another() -> None:
    model = resnet()
    names = {module: name for name, module in model.named_modules()}
    assert [names[b] for b in blocks_of(model, "fc")] == [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    vit = torchvision.models.VisionTransformer(32, 16, 3, 2, 8, 16, num_classes=4)
    assert blocks_of(vit, "heads.head") == list(vit.encoder.layers)
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert blocks_of(nn.Sequential(inner, nn.Linear(4, 2)), "1") == []  # layers alone: nothing lies between them


def test_the_block_with_the_head_is_left_alone() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(self.norm(x))
            return out

    model = nn.Sequential(Last(), Last())
    assert blocks_of(model, "1.fc") == [model[0]]


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
    assert Engine(precision="fp16").scale == 4096
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
        adapter._optimizer.register_step_pre_hook(lambda *_, w=weight, to=seen: to.append(w.grad.clone()))
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

    def __init__(self, cost: Callable[[Engine], float]) -> None:
        self.cost, self.now = cost, 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, way: Engine) -> None:
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
    way = tuning.measured(Engine(precision="auto", channels_last="auto"), clock.step, torch.device("cpu"))
    assert (way.precision, way.channels_last) == chosen
    assert not way.open


def test_only_what_is_open_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ways = Clock(lambda way: 1.0), set()
    monkeypatch.setattr(tuning, "time", clock)
    step = lambda way: (ways.add((way.precision, way.channels_last)), clock.step(way))  # noqa: E731
    tuning.measured(Engine(precision="bf16", channels_last="auto"), step, torch.device("cpu"))
    assert ways == {("bf16", False), ("bf16", True)}


def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tuning, "GAIN", 0.0)  # nothing is that fast
    with caplog.at_level(logging.INFO, logger="trueup"):
        auto = trueup.adapt(convnet(), "tsd", precision="auto", channels_last="auto")
        plain = trueup.adapt(convnet(), "tsd")
        assert same(play(plain, XS), play(auto, XS))
    assert difference(plain, auto) == []
    assert "measured: float32: " in caplog.text


def test_a_saved_state_brings_its_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is measured on another machine: what goes on is the same, to the bit."""
    way = Engine(precision="bf16", channels_last=True, measured=True)
    monkeypatch.setattr(tuning, "measured", lambda *_: way)
    first = trueup.adapt(convnet(), "tsd", precision="auto", channels_last="auto")
    play(first, XS[:2])
    assert first.net.engine == way
    first.save(tmp_path / "state")
    monkeypatch.setattr(tuning, "measured", lambda *_: Engine(measured=True))
    for example in (None, XS[0]):
        later = trueup.adapt(convnet(), "tsd", precision="auto", channels_last="auto", example=example)
        later.load(tmp_path / "state")
        assert later.net.engine == way
        assert same(play(copy.deepcopy(first), XS[2:]), play(later, XS[2:]))


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


@pytest.mark.parametrize("method", ["tsd", "t3a"])
def test_low_memory_stores_features_in_half_precision(method: str, tmp_path: Path) -> None:
    plain, low = (trueup.adapt(convnet(), method, memory=memory) for memory in ("usual", "low"))
    for a, b in zip(play(plain, XS), play(low, XS), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.05)
    for name, t in low.state.named_buffers():
        assert t.dtype == (torch.float16 if name in ("features", "probs") else plain.state.get_buffer(name).dtype)
    assert low.state.features.any()
    low.save(tmp_path / "state")
    later = trueup.adapt(convnet(), method, memory="low")
    later.load(tmp_path / "state")
    assert same(play(low, XS), play(later, XS))
