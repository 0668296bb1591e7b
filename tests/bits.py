"""Hashes of every method's answers, states and health on fixed streams: a refactoring must not move a single bit.

python tests/bits.py [words of names]    compare with tests/bits.json; exit 1 if something differs
python tests/bits.py --write             write tests/bits.json

Bits depend on the processor and on torch, so the file says where it was written and is compared nowhere else. This is
no part of the test suite.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

import trueup
from trueup import Guard, rules

FILE = Path(__file__).with_suffix(".json")
SIZE, CLASSES, LABELS, MASKS = 16, 5, 4, 3
TASKS = ("classification", "segmentation", "multilabel")
PIXELS: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3)}

# Small numbers, so that memories fill up and rare code is reached within a few batches.
HYPER: dict[str, dict[str, Any]] = {
    "t3a": {"per_class": 4},
    "lame": {"neighbors": 3},
    "tsd": {"per_class": 8},
    "rdumb": {"every": 3},
    "memo": {"views": 3},
    "note": {"capacity": 16, "every": 16},
    "rotta": {"capacity": 16, "every": 16},
    "cotta": {"views": 4, "chunk": 48, "confidence": 0.9, "restore": 0.05},
    "tast": {"per_class": 6, "members": 3},
    "tast-bn": {"per_class": 4, "capacity": 16},
    "adacontrast": {"neighbors": 3, "warmup": 40, "capacity": 100, "crop": 0.5},
}


# Models and streams


class Body(nn.Sequential):
    """Two convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        for i, (before, width, stride) in enumerate(((3, 8, 1), (8, 12, 2))):
            self.add_module(f"conv{i}", nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(width))
            self.add_module(f"relu{i}", nn.ReLU())


def conv(outputs: int) -> nn.Sequential:
    """A classifier with BatchNorm."""
    model = Body()
    model.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten()))
    model.add_module("head", nn.Linear(12 * 16, outputs))
    return model


def dense(outputs: int) -> nn.Sequential:
    """A segmenter with BatchNorm."""
    model = Body()
    model.add_module("head", nn.Conv2d(12, outputs, 1))
    model.add_module("up", nn.Upsample(scale_factor=2, mode="bilinear"))
    return model


def layers(outputs: int) -> nn.Sequential:
    """A classifier with LayerNorm and dropout."""
    model = nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.Flatten(2), nn.LayerNorm(16), nn.GELU(), nn.Flatten())
    model.extend([nn.Linear(256, 24), nn.LayerNorm(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, outputs)])
    return model


class Keywords(nn.Module):
    """A classifier that is called by keywords and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model("classification")

    def forward(self, pixel_values: Tensor, gain: Tensor | None = None) -> dict[str, Tensor]:
        """Answer, for images with a brightness of their own."""
        x = pixel_values if gain is None else pixel_values * gain.view(-1, 1, 1, 1)
        return {"logits": self.net(x), "other": x}


class Fused(nn.Module):
    """A model that fails in its n-th forward from now, counted over all copies."""

    fuse = -1

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model("classification")

    def forward(self, x: Tensor) -> Tensor:
        """Answer or fail."""
        Fused.fuse -= 1
        if Fused.fuse == 0:
            raise RuntimeError("the fuse has blown")
        answer: Tensor = self.net(x)
        return answer


MODELS: dict[str, tuple[Callable[[int], nn.Sequential], int]] = {
    "classification": (conv, CLASSES),
    "segmentation": (dense, MASKS),
    "multilabel": (conv, LABELS),
    "layers": (layers, CLASSES),
    "labelled masks": (dense, 2),
}


def smooth(generator: torch.Generator, n: int) -> Tensor:
    """Return n random images of few blobs (n, 3, 16, 16)."""
    return F.interpolate(torch.randn(n, 3, 4, 4, generator=generator), size=(SIZE, SIZE), mode="bilinear")


def draw(kind: str, n: int, *, seed: int, shift: float = 0.0, only: int | None = None) -> tuple[Tensor, Tensor]:
    """Return n images with what is to be said of them; shifted they are tinted and noisy."""
    g = torch.Generator().manual_seed(seed)
    patterns = smooth(torch.Generator().manual_seed(77), max(CLASSES, LABELS))
    noise, colour = torch.randn(n, 3, SIZE, SIZE, generator=g), 1 + 0.3 * torch.randn(n, 3, 1, 1, generator=g)
    if kind in ("segmentation", "labelled masks"):
        y = (smooth(g, n)[:, :2].cumsum(dim=1) > 0).sum(dim=1)
        y = torch.full_like(y, only) if only is not None else y
        clean = patterns[:MASKS].mean(dim=(2, 3))[y].permute(0, 3, 1, 2) * 4
        y = torch.stack((y > 0, y > 1), dim=1).float() if kind == "labelled masks" else y
    elif kind == "multilabel":
        y = torch.rand(n, LABELS, generator=g).lt(0.5).float()
        y = torch.full_like(y, 1.0) if only is not None else y
        clean = torch.einsum("nk,kchw->nchw", y, patterns[:LABELS])
    else:
        y = torch.randint(CLASSES, (n,), generator=g)
        y = torch.full_like(y, only) if only is not None else y
        clean = patterns[y]
    tint = torch.tensor([0.9, -0.6, 0.4]).view(1, 3, 1, 1)
    return (0.7 - 0.2 * shift) * clean * colour + (1.2 + 0.3 * shift) * noise + shift * tint, y


@cache
def trained(kind: str) -> nn.Sequential:
    """Return a model after a few steps on what it is for."""
    torch.manual_seed(11)  # all models are made before the first scenario, which has a seed of its own
    model = MODELS[kind][0](MODELS[kind][1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(40):
        x, y = draw(kind, 32, seed=1000 + step)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits if y.is_floating_point() else F.cross_entropy
        loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def make_model(kind: str) -> nn.Module:
    """Return a copy of a trained model."""
    return copy.deepcopy(trained(kind))


@cache
def stream(kind: str, *, broken: bool = False) -> list[Tensor]:
    """Return eight batches: the shift begins in the middle, sizes vary, the last is ragged; perhaps two broken rows."""
    sizes = (24, 24, 12, 24, 24, 1, 24, 13)
    xs = [draw(kind, n, seed=50 + i, shift=float(i > 2))[0] for i, n in enumerate(sizes)]
    if broken:
        xs[3][2, 0, 5, 5] = torch.nan
        xs[6][0] *= 1e9
    return xs


@cache
def harsh(kind: str) -> list[Tensor]:
    """Return 24 batches that break what learns too fast: mixed, then of one class, then mixed again."""
    return [draw(kind, 20, seed=90 + i, shift=0.3, only=1 if 10 <= i < 14 else None)[0] for i in range(24)]


# Traces


class Trace:
    """What a scenario has shown, as three running hashes."""

    def __init__(self) -> None:
        self.parts = {name: hashlib.sha256() for name in ("answers", "state", "health")}
        self.events: list[trueup.Event] = []

    def words(self, part: str, *words: object) -> None:
        """Add values that have a plain form."""
        self.parts[part].update(json.dumps(words, default=str).encode())

    def tensor(self, part: str, t: Tensor) -> None:
        """Add a tensor: dtype, shape, bytes."""
        self.words(part, str(t.dtype), tuple(t.shape))
        self.parts[part].update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def health(self, adapter: trueup.Adapter) -> None:
        """Add how an adapter says it is, all but the words of its reason."""
        h = adapter.health
        numbers = [(name, float(value).hex()) for name, value in sorted(h.numbers.items())]
        self.words("health", h.state, h.images, numbers, sorted(h.events.items()), h.quarantined)
        self.words("health", adapter.batches, adapter.images, adapter.updates, adapter.task)

    def play(self, adapter: trueup.Adapter, xs: Iterable[Tensor]) -> None:
        """Show a stream to an adapter."""
        for x in xs:
            self.tensor("answers", adapter(x))
            self.health(adapter)

    def end(self, adapter: trueup.Adapter, *, unwrap: Tensor | None = None) -> None:
        """Add the whole state, and the answers of the plain model if asked for."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            adapter.save(path)
            with safe_open(path, "pt") as file:
                for name in sorted(file.keys()):
                    self.words("state", name)
                    self.tensor("state", file.get_tensor(name))
        self.health(adapter)
        for statistics in ("adapted", "source") if unwrap is not None else ():
            with torch.no_grad():
                self.tensor("answers", adapter.unwrap(statistics=statistics)(unwrap))

    def short(self) -> dict[str, str]:
        """Return the hashes, with what was told and torch's random state, which adapters must not touch."""
        told = [(event.name, event.images, event.state) for event in self.events]
        self.words("health", told)
        self.tensor("health", torch.get_rng_state())
        return {name: part.hexdigest()[:16] for name, part in self.parts.items()}


Scenario = Callable[[Trace], None]


def adapt(kind: str, method: str, **given: Any) -> trueup.Adapter:
    """Return an adapter with small hyper-parameters, prepared where the method asks for it."""
    if kind == "segmentation" and method == "tsd":
        hyper: Mapping[str, Any] = {"neighbors": 8, "samples": 8, "queries": 200, "capacity": 400}
    else:
        hyper = HYPER.get(method, {})
    options = {"multilabel": kind in ("multilabel", "labelled masks"), **hyper, **given}
    model = options.pop("model", None) or make_model(kind)
    adapter = trueup.adapt(model, method, **options)
    if "prepare" in trueup.get_method(method).info.needs:
        dtype = next(model.parameters()).dtype
        adapter.prepare([draw(kind, 24, seed=s)[0].to(dtype) for s in (1, 2)])
    return adapter


def watchful(trace: Trace, **given: Any) -> Guard:
    """Return a guard with short windows, whose events are noted."""
    return Guard(**{"window": 32, "compare": 2, "probation": 1, "notify": trace.events.append, **given})


# Limits that little passes, so that everything a guard can do happens within a few batches.
TOUCHY: tuple[rules.Rule, ...] = (
    rules.Diversity(suspect=0.97, rollback=0.8, memory=64.0),
    rules.Agreement(suspect=0.7, rollback=0.35, sees=0.1, memory=64.0),
    rules.Concentration(fall=0.9),
    rules.Spike(least=5, deviations=4.0),
    rules.Drift(limit=0.5),
)


@dataclass(frozen=True, kw_only=True)
class Script(rules.Rule):
    """A rule that asks for all there is, at batches that are written down."""

    acts: tuple[tuple[int, str, float], ...] = (
        (4, "suspect", 0.0), (6, "pull", 0.2), (8, "suspect", 0.0), (9, "suspect", 0.0), (10, "suspect", 0.0),
        (14, "rollback", 0.0), (16, "suspect", 0.0), (19, "restore", 0.3), (21, "part", 0.6), (22, "drift", 0.0),
        (24, "check", 0.0), (26, "reset", 0.0), (27, "fallback", 0.0), (30, "rollback", 0.0),
    )  # fmt: skip

    def init(self, classes: int) -> nn.Module:
        """Count batches."""
        return rules.buffers(count=torch.tensor(0))

    def after(self, signs: rules.Signs, state: Any, numbers: dict[str, float]) -> rules.Action | None:
        """Ask for what is written down for this batch, and tell what is seen."""
        state.count.add_(1)
        numbers["entropy seen"] = signs.entropy
        numbers["updates seen"] = float(signs.updates)
        found = [rules.Action(kind, "as written", share) for n, kind, share in self.acts if n == int(state.count)]  # type: ignore[arg-type]
        return found[0] if found else None


def usual(kind: str, method: str, given: Mapping[str, Any], trace: Trace) -> None:
    """Play the usual stream, with broken rows where there is a guard, and unwrap."""
    guarded = bool(given.get("guard") or given.get("preset"))
    adapter = adapt(kind, method, **given)
    trace.play(adapter, stream(kind, broken=guarded))
    trace.end(adapter, unwrap=stream(kind)[4])


def strained(kind: str, method: str, given: Mapping[str, Any], trace: Trace) -> None:
    """Learn much too fast under a watchful guard, so that it takes back, falls back and recovers."""
    fast = {"lr": 1.0} if issubclass(trueup.get_method(method), trueup.GradientMethod) else {}
    adapter = adapt(kind, method, **{"guard": watchful(trace), **fast, **given})
    trace.play(adapter, harsh(kind))
    trace.end(adapter)


def touched(kind: str, method: str, lr: float, trace: Trace) -> None:
    """Learn too fast under a guard that minds little things."""
    strained(kind, method, {"lr": lr, "guard": watchful(trace, rules=TOUCHY, compare=1)}, trace)


def continued(kind: str, method: str, given: Mapping[str, Any], trace: Trace) -> None:
    """Save in the middle, load into a new adapter, go on."""
    xs = stream(kind)
    adapter = adapt(kind, method, **given)
    for x in xs[:5]:
        adapter(x)
    with tempfile.TemporaryDirectory() as folder:
        adapter.save(Path(folder) / "state.safetensors")
        adapter = adapt(kind, method, **given)
        adapter.load(Path(folder) / "state.safetensors")
    trace.health(adapter)
    trace.play(adapter, xs[5:])
    trace.end(adapter)


def grid() -> Iterator[tuple[str, Scenario]]:
    """Yield each method on each task, plain, guarded, safe, strained, continued, with two steps."""
    ways: dict[str, dict[str, Any]] = {"plain": {}, "guard": {"guard": True}, "safe": {"preset": "safe"}}
    for method in trueup.list_methods():
        for kind in TASKS:
            for way, given in ways.items():
                yield f"{method}/{kind}/{way}", partial(usual, kind, method, given)
            yield f"{method}/{kind}/strained", partial(strained, kind, method, {})
        yield f"{method}/classification/continued", partial(continued, "classification", method, {})
        yield (
            f"{method}/classification/continued safe",
            partial(continued, "classification", method, {"preset": "safe"}),
        )
        if issubclass(trueup.get_method(method), trueup.GradientMethod):
            yield f"{method}/classification/steps", partial(usual, "classification", method, {"steps": 2})


# Single scenarios


UNBALANCED = {"balanced": False, "consistency": False, "per_class": 20, "capacity": None}
POLICIES = ("source", "batch", "ema:0.1", "mix:0.3", "prior:8", "instance:4", "robust")
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"norm {norm}": ("classification", "tent", {"norm": norm}) for norm in POLICIES},
    **{f"norm {norm}, guard": ("classification", "tent", {"norm": norm, "guard": True}) for norm in POLICIES},
    **{f"norm {norm}, masks": ("segmentation", "tsd", {"norm": norm}) for norm in POLICIES},
    **{f"norm {norm}, cotta": ("classification", "cotta", {"norm": norm}) for norm in ("ema", "robust", "source")},
    **{f"episodic {name}": ("classification", name, {"episodic": True}) for name in ("tent", "tsd", "memo", "sar")},
    **{
        f"params {params}": ("classification", "tent", {"params": params})
        for params in ("none", "head", "backbone", "all", "trainable", "bn1")
    },
    "params function": ("classification", "tent", {"params": lambda name: name.endswith("bias")}),
    **{f"low memory {name}": ("classification", name, {"memory": "low"}) for name in ("tent", "tsd", "cotta")},
    "low memory, channels first": ("classification", "tsd", {"memory": "low", "channels_last": False}),
    "low memory, masks": ("segmentation", "tsd", {"memory": "low"}),
    "low memory, safe": ("classification", "tent", {"memory": "low", "preset": "safe"}),
    **{f"channels last {name}": ("classification", name, {"channels_last": True}) for name in ("tent", "tsd")},
    **{
        f"bf16 {name}, {kind}": (kind, name, {"precision": "bf16"})
        for name in ("tent", "tsd")
        for kind in ("classification", "segmentation")
    },
    "bf16 safe": ("classification", "tent", {"precision": "bf16", "preset": "safe"}),
    "every tent": ("classification", "tent", {"every": 2}),
    "every tsd": ("classification", "tsd", {"every": 3, "guard": True}),
    "seed": ("classification", "cotta", {"seed": 3}),
    **{f"pixels {name}": ("classification", name, PIXELS) for name in ("memo", "cotta", "adacontrast", "rotta")},
    "head named": ("classification", "tsd", {"head": "head"}),
    "example": ("classification", "tsd", {"example": draw("classification", 4, seed=3)[0]}),
    **{f"layers {name}": ("layers", name, {}) for name in ("tent", "sar", "tsd", "cotta", "t3a")},
    "layers safe": ("layers", "tent", {"preset": "safe"}),
    **{f"labelled masks {name}": ("labelled masks", name, {}) for name in ("tent", "tsd", "eta", "eata", "sar")},
    "labelled masks safe": ("labelled masks", "tsd", {"preset": "safe"}),
    "tsd released": ("classification", "tsd", {"variant": "released", "alignment": 0.1}),
    "tsd all kept": ("classification", "tsd", {"per_class": None}),
    "tsd sketch": ("classification", "tsd", {"search": "sketch"}),
    "tsd masks unbalanced": ("segmentation", "tsd", UNBALANCED),
    "lame rbf": ("classification", "lame", {"affinity": "rbf", "symmetric": True}),
    "lame linear": ("classification", "lame", {"affinity": "linear"}),
    "roid probabilities": ("classification", "roid", {"prior": "probabilities"}),
    "roid none": ("classification", "roid", {"prior": "none"}),
    "eta redundancy": ("classification", "eta", {"redundancy": 0.5}),
    "cotta sure": ("classification", "cotta", {"confidence": 0.1}),
}


def doubles(method: str, trace: Trace) -> None:
    """Run in float64."""
    adapter = adapt("classification", method, model=make_model("classification").double())
    trace.play(adapter, [x.double() for x in stream("classification")])
    trace.end(adapter)


def switched(trace: Trace) -> None:
    """Pause, resume, and start again."""
    xs, adapter = stream("classification"), adapt("classification", "tsd", guard=True)
    trace.play(adapter, xs[:3])
    adapter.pause()
    trace.play(adapter, xs[3:5])
    adapter.resume()
    trace.play(adapter, xs[5:])
    adapter.reset()
    trace.health(adapter)
    trace.play(adapter, xs[:4])
    trace.end(adapter)


def forked(method: str, trace: Trace) -> None:
    """Fork and copy in the middle; all go on, each with other batches."""
    xs, adapter = stream("classification"), adapt("classification", method, preset="safe")
    trace.play(adapter, xs[:4])
    fork, twin = adapter.fork(), copy.deepcopy(adapter)
    for some, rest in ((adapter, xs[4:]), (fork, xs[6:]), (twin, xs[:2])):
        trace.play(some, rest)
        trace.end(some)


def resumed(trace: Trace) -> None:
    """Write states to a folder, and take up the newest."""
    xs = stream("classification")
    with tempfile.TemporaryDirectory() as folder:
        adapter = adapt("classification", "tsd", guard=True)
        trace.words("answers", adapter.checkpoint(folder, every=2, keep=2))
        trace.play(adapter, xs[:5])
        trace.words("answers", sorted(path.name for path in Path(folder).iterdir()))
        adapter = adapt("classification", "tsd", guard=True)
        trace.words("answers", adapter.checkpoint(folder, every=2, keep=2))
        trace.play(adapter, xs[4:])
        trace.end(adapter)


def published(names: tuple[str, ...], trace: Trace) -> None:
    """Watch with published rules beside the usual ones."""
    small: dict[str, dict[str, Any]] = {"rdumb": {"every": 5}, "sar": {"threshold": 0.3}, "cotta": {"chance": 0.1}}
    chosen = tuple(rules.PUBLISHED[name](**small.get(name, {})) for name in names)
    adapter = adapt("classification", "tent", lr=0.05, guard=watchful(trace, rules=(*rules.RULES, *chosen)))
    trace.play(adapter, harsh("classification"))
    trace.end(adapter)


def alarmed(kind: str, method: str, trace: Trace) -> None:
    """Watch for a shift."""
    alarm = rules.Shift(memory=32.0)
    adapter = adapt(
        kind, method, guard=watchful(trace, rules=(*rules.RULES, alarm) if method != "source" else (alarm,))
    )
    calm = [draw(kind, 16, seed=300 + i)[0] for i in range(10)]
    trace.play(adapter, [*calm, *harsh(kind)[:14], *calm])
    trace.end(adapter)


def compared(given: Mapping[str, Any], trace: Trace) -> None:
    """Ask for the source's answers, too."""
    adapter = adapt("classification", "tent", **given)
    for x in stream("classification"):
        answer = adapter.answer(x)
        trace.tensor("answers", answer.adapted)
        trace.tensor("answers", answer.source)
        trace.tensor("answers", adapter.frozen(x))
        trace.health(adapter)
    trace.end(adapter)


def by_keyword(method: str, given: Mapping[str, Any], trace: Trace) -> None:
    """Call by keyword, with a dict, and with a second tensor."""
    xs, adapter = stream("classification"), adapt("classification", method, model=Keywords(), output="logits", **given)
    for i, x in enumerate(xs):
        gain = torch.linspace(0.5, 1.5, len(x))
        answer = adapter(pixel_values=x) if i % 2 else adapter(pixel_values=x, gain=gain)
        trace.tensor("answers", answer)
        trace.health(adapter)
    trace.end(adapter)


def failing(method: str, given: Mapping[str, Any], trace: Trace) -> None:
    """Fail in each of the forwards of a batch, which then has not happened."""
    xs = stream("classification")
    adapter = adapt("classification", method, model=Fused(), **given)
    trace.play(adapter, xs[:3])
    for n in range(1, 7):
        Fused.fuse = n
        try:
            trace.tensor("answers", adapter(xs[3]))
        except RuntimeError:
            trace.words("answers", "failed")
        Fused.fuse = -1
        trace.health(adapter)
    trace.play(adapter, xs[4:])
    trace.end(adapter)


def unusable(trace: Trace) -> None:
    """Batches of which nothing can be used, and others that are all larger than usual for a while."""
    xs, adapter = stream("classification"), adapt("classification", "tsd", guard=watchful(trace))
    trace.play(adapter, xs[:2])
    trace.play(adapter, [torch.full_like(xs[0], torch.nan), *(1e5 * x for x in xs[1:]), *xs])
    trace.end(adapter)


def nowhere(method: str, trace: Trace) -> None:
    """Step so far that parameters are no longer finite."""
    adapter = adapt("classification", method, lr=1e30, guard=watchful(trace))
    trace.play(adapter, harsh("classification"))
    trace.end(adapter)


def without_guard(kind: str, trace: Trace) -> None:
    """Learn too fast with nobody watching, in inference mode."""
    adapter = adapt(kind, "tent", lr=0.5)
    with torch.inference_mode():
        trace.play(adapter, harsh(kind))
    trace.end(adapter)


def texts(trace: Trace) -> None:
    """Adapt a zero-shot classifier."""
    encoder = nn.Sequential(Body(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoder[0].load_state_dict({k: v for k, v in trained("classification").state_dict().items() if "head" not in k})
    text = torch.randn(CLASSES, 12, generator=torch.Generator().manual_seed(8))
    adapter = adapt("classification", "tent", model=trueup.zero_shot(encoder.eval(), text, scale=20.0), guard=True)
    trace.play(adapter, stream("classification"))
    trace.end(adapter)


@dataclass(frozen=True, kw_only=True)
class Squared(trueup.GradientMethod):
    """A method of a user's own, with momentum, a memory and a fresh start now and then."""

    lr: float = 1e-2
    params: Any = "norm"

    info = trueup.Info(name="squared", title="Squared", paper="none", tasks=("classification", "segmentation"))

    def init(self, net: trueup.SplitModel) -> nn.Module:
        """Count batches, and draw something."""
        state = nn.Module()
        state.register_buffer("count", torch.zeros(1))
        state.register_buffer("noise", torch.randn(3))
        return state

    def loss(self, net: trueup.SplitModel, out: trueup.Output, state: Any) -> Tensor:
        """Make answers sure, with noise."""
        return -(F.softmax(out.logits, dim=1).square() * torch.rand_like(out.logits)).mean()

    def after(self, net: trueup.SplitModel, out: trueup.Output, state: Any) -> Any:
        """Start afresh after five batches."""
        state.count += 1
        return "reset" if int(state.count) >= 5 else None

    def optimizer(self, named: Any) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD([p for _, p in named], lr=self.lr, momentum=0.9)


def own_method(kind: str, guard: bool, trace: Trace) -> None:
    """Run a method of a user's own."""
    adapter = trueup.adapt(make_model(kind), Squared(steps=2), guard=guard)
    trace.play(adapter, stream(kind, broken=guard))
    trace.end(adapter)


def scripted(kind: str, method: str, window: int, given: Mapping[str, Any], trace: Trace) -> None:
    """Let a guard do all it can; save and load while it is in each of its states."""
    options = {"guard": watchful(trace, rules=(Script(),), window=window, compare=1), "lr": 0.01, **given}
    if not issubclass(trueup.get_method(method), trueup.GradientMethod):
        del options["lr"]
    adapter = adapt(kind, method, **options)
    with tempfile.TemporaryDirectory() as folder:
        for i, x in enumerate([*harsh(kind), *harsh(kind)[:14]]):
            trace.play(adapter, [x])
            if i % 3 == 2:
                adapter.save(Path(folder) / "state.safetensors")
                adapter = adapt(kind, method, **options)
                adapter.load(Path(folder) / "state.safetensors")
    trace.end(adapter)


def cautious(trace: Trace) -> None:
    """Go back to the source after every fifth batch, whatever happens."""
    strained("classification", "tent", {"lr": 0.01, "guard": watchful(trace, cap=5)}, trace)


def weights(kind: str, trace: Trace) -> None:
    """Hash the source model itself: where that differs, all else does, too."""
    for t in trained(kind).state_dict().values():
        trace.tensor("state", t)


def singles() -> Iterator[tuple[str, Scenario]]:
    """Yield scenarios of one setting each."""
    for kind in MODELS:
        yield f"model/{kind}", partial(weights, kind)
    for name, (kind, method, given) in SETTINGS.items():
        yield f"setting/{name}", partial(usual, kind, method, given)
    for method in ("tent", "tsd", "cotta", "rotta", "adacontrast", "tast-bn"):
        yield f"float64/{method}", partial(doubles, method)
        for way, given in (("plain", {}), ("safe", {"preset": "safe"})):
            yield f"failing/{method}/{way}", partial(failing, method, given)
    for method in ("tent", "tsd", "rotta"):
        yield f"forked/{method}", partial(forked, method)
    for kind in ("segmentation", "multilabel"):
        yield f"continued/{kind}", partial(continued, kind, "tsd", {"preset": "safe"})
    for names in (*((name,) for name in rules.PUBLISHED), tuple(rules.PUBLISHED)):
        yield f"published/{' '.join(names)}", partial(published, names)
    for kind in TASKS:
        yield f"alarm/{kind}/source", partial(alarmed, kind, "source")
        yield f"alarm/{kind}/tent", partial(alarmed, kind, "tent")
    for way, given in (("plain", {}), ("guard", {"guard": True})):
        yield f"compared/{way}", partial(compared, given)
    for method, given in (("tent", {}), ("tsd", {"guard": True}), ("bn", {})):
        yield f"keywords/{method}", partial(by_keyword, method, given)
    for method, lr in (("tent", 0.05), ("tent", 0.3), ("shot-im", 0.05), ("pl", 0.05), ("tsd", 0.05), ("cotta", 0.05)):
        yield f"strained/{method} {lr}", partial(strained, "classification", method, {"lr": lr})
        yield (
            f"strained/{method} {lr} robust",
            partial(strained, "classification", method, {"lr": lr, "norm": "robust"}),
        )
    for kind in ("segmentation", "multilabel"):
        yield f"strained/{kind} tsd 0.05", partial(strained, kind, "tsd", {"lr": 0.05})
        yield f"without guard/{kind}", partial(without_guard, kind)
    for kind in TASKS:
        for method in ("tent", "shot-im", "tsd", "sar", "t3a", "rotta", "cotta", "bn-alpha"):
            if kind == "classification" or method in ("tent", "tsd", "sar"):
                yield f"scripted/{kind}/{method}", partial(scripted, kind, method, 16, {})
                yield f"scripted/{kind}/{method} slow", partial(scripted, kind, method, 50, {})
                yield f"scripted/{kind}/{method} robust", partial(scripted, kind, method, 100, {"norm": "robust"})
        for method in ("tent", "shot-im", "pl", "tsd"):
            for lr in (0.003, 0.02, 0.1):
                yield f"touchy/{kind}/{method} {lr}", partial(touched, kind, method, lr)
    for method in ("tent", "tsd", "tast"):
        yield f"nowhere/{method}", partial(nowhere, method)
    for kind in ("classification", "segmentation"):
        for guard in (False, True):
            yield f"own method/{kind}{'/guard' * guard}", partial(own_method, kind, guard)
    yield from (("switched", switched), ("resumed", resumed), ("unusable", unusable), ("zero-shot", texts))
    yield "strained/cap", cautious


# The run


def measure(scenario: Scenario, seen: dict[str, int] | None = None) -> dict[str, str]:
    """Run a scenario; a refusal counts by its type."""
    trace = Trace()
    torch.manual_seed(5)
    try:
        scenario(trace)
    except Exception as error:
        return {"refused": type(error).__name__}
    for event in trace.events if seen is not None else ():
        assert seen is not None
        seen[event.name] = seen.get(event.name, 0) + 1
    return trace.short()


def processor() -> str:
    """Return the name of the processor."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return ", ".join(sorted({line.split(":")[1].strip() for line in lines if line.startswith("model name")}))
    return "unknown"


def machine() -> dict[str, str]:
    """Return what bits depend on."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "processor": processor(), "instructions": capability}


def run(words: list[str]) -> dict[str, dict[str, str]]:
    """Run the scenarios whose names hold all words, with progress."""
    found: dict[str, dict[str, str]] = {}
    seen: dict[str, int] = {}
    for kind in MODELS:
        trained(kind)
    chosen = [(name, do) for name, do in (*grid(), *singles()) if all(word in name for word in words)]
    for i, (name, scenario) in enumerate(chosen):
        start = time.perf_counter()
        assert name not in found
        found[name] = measure(scenario, seen)
        refused = f"  {found[name]['refused']}" if "refused" in found[name] else ""
        print(f"{i + 1}/{len(chosen)} {name} {time.perf_counter() - start:.1f} s{refused}", file=sys.stderr)
    print(f"guards told of {dict(sorted(seen.items()))}", file=sys.stderr)
    return found


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only scenarios whose names hold all of these")
    parser.add_argument("--write", action="store_true", help="write the file instead of comparing with it")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if asked.write and asked.words:
        parser.error("--write writes the whole file")
    if asked.write:
        FILE.write_text(json.dumps({"about": machine(), "bits": run([])}, indent=1, sort_keys=True) + "\n")
        return 0
    stored = json.loads(FILE.read_text())
    if stored["about"] != machine():
        print(f"{FILE.name} was written on {stored['about']}; here is {machine()}: nothing was compared")
        return 2
    found, before = run(asked.words), stored["bits"]
    names = sorted(found.keys() | (set() if asked.words else before.keys()))
    differing = [name for name in names if found.get(name) != before.get(name)]
    for name in differing:
        ours, theirs = found.get(name, {}), before.get(name, {})
        parts = sorted(p for p in ours.keys() | theirs.keys() if ours.get(p) != theirs.get(p))
        print(f"differs: {name}: {', '.join(parts) if ours and theirs else 'here alone' if ours else 'gone'}")
    print(f"{len(names) - len(differing)} of {len(names)} are the same")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
