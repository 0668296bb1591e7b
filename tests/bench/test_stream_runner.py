"""The protocol equals a plain loop over `trueup.adapt`; sharing, resets and broken images change nothing else."""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup.bench import scorers
from trueup.bench import stream_runner as protocol
from trueup.bench.jobs import Paths, evaluate, failure_record, make_runner, source_images
from trueup.bench.records import reproducible_part
from trueup.bench.settings import PAPER_METHODS, Run
from trueup.bench.stream_runner import Indices, StreamRunner, make_stream
from trueup.core.method import Info, Method
from trueup.core.registry import make_method
from trueup.data.datasets import Dataset
from trueup.data.domains import ArrayDomain, BrokenImageError, Image
from trueup.data.loading import ConcatDomains, Loader
from trueup.model.split_model import Output, SplitModel
from trueup.source.checkpoints import Store
from trueup.source.holdout import split_holdout
from trueup.source.networks import build_network
from trueup.source.recipe import Training
from trueup.testing import convnet, images

FROZEN = [(name, norm) for name in ("source", "bn", "t3a", "lame") for norm in ("source", "batch")]
Seen = list[tuple[Any, Any]]


class BrokenDomain(ArrayDomain):
    """Some of its images cannot be read."""

    def __init__(self, name: str, array: Image, labels: Any, broken: Sequence[int]) -> None:
        super().__init__(name, array, labels)
        self.broken = set(broken)

    def image(self, i: int, size: int | None = None) -> Image:
        if i in self.broken:
            raise BrokenImageError("cut short")
        return super().image(i, size)


def domain(n: int, *, seed: int, shift: float = 0.5, broken: Sequence[int] = ()) -> ArrayDomain:
    x, y = images(n, seed=seed, shift=shift)
    array = (40 * x + 127.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return BrokenDomain(f"d{seed}", array, y.numpy(), broken)


def net() -> nn.Sequential:
    """Trained on images whose values are 127.5 / 40 times as large as the loader's."""
    model = convnet()
    first = model.get_submodule("conv0")
    assert isinstance(first, nn.Conv2d)
    first.weight.data *= 127.5 / 40
    return model


def toy_runner(
    *domains: ArrayDomain, model: nn.Module | None = None, batch: int = 16, seed: int = 0, **more: Any
) -> StreamRunner:
    place = ConcatDomains(domains)
    name = "iid" if len(domains) == 1 else "continual"
    stream = make_stream(place, name, {}, seed=seed, batch=batch, limit=None, reset=more.get("reset", False))
    return StreamRunner(model or net(), Loader(place, 16, "half", keep=True), stream, seed, **more)


def tensor(place: ConcatDomains, indices: Indices) -> Tensor:
    """What the loader makes of images, written out."""
    array = np.concatenate([d.images for d in place.domains if isinstance(d, ArrayDomain)])[indices]
    return torch.from_numpy(array).permute(0, 3, 1, 2).float().sub(127.5).div(127.5)


def by_hand(adapter: Callable[[Tensor], Tensor], place: ConcatDomains, stream: Sequence[Indices]) -> tuple[Any, Any]:
    """Probabilities and labels of a plain loop."""
    probs = [F.softmax(adapter(tensor(place, b)).double(), dim=1).numpy() for b in stream]
    return np.concatenate(probs), np.concatenate([place.labels[b] for b in stream])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The probabilities and labels that were measured, run by run."""
    calls: Seen = []
    measure = scorers.measure_classes

    def note(probs: Any, labels: Any) -> dict[str, Any]:
        calls.append((probs, labels))
        return measure(probs, labels)

    monkeypatch.setattr(scorers, "measure_classes", note)
    return calls


def same(first: tuple[Any, Any], second: tuple[Any, Any]) -> bool:
    return np.array_equal(first[0], second[0]) and np.array_equal(first[1], second[1])


# The loop


@pytest.mark.parametrize("name", [*PAPER_METHODS, "eata"])
def test_run_equals_a_plain_loop(name: str, seen: Seen) -> None:
    runner = toy_runner(domain(41, seed=1))
    assert [len(b) for b in runner.stream] == [16, 16, 9]
    outcome = runner.run(make_method(name, {}))
    adapter = trueup.adapt(net(), name, seed=0)
    probs, labels = by_hand(adapter, runner.loader.place, runner.stream)
    assert same(seen[0], (probs, labels))
    right = [max(range(6), key=row.__getitem__) == y for row, y in zip(probs.tolist(), labels.tolist(), strict=True)]
    assert outcome.results["accuracy"] == sum(right) / 41
    assert (outcome.results["images"], outcome.results["broken"]) == (41, 0)
    assert outcome.results["updates"] == adapter.updates


def test_answer_to_a_batch_is_the_one_before_its_update(seen: Seen) -> None:
    runner = toy_runner(domain(41, seed=1))
    runner.run(make_method("bn", {}))
    runner.run(make_method("tent", {"lr": 0.5}))
    assert np.array_equal(seen[0][0][:16], seen[1][0][:16])
    assert not np.allclose(seen[0][0][16:], seen[1][0][16:])


def test_hyper_parameters_reach_the_method(seen: Seen) -> None:
    runner = toy_runner(domain(41, seed=1))
    runner.run(make_method("tsd", {"lr": 1e-2, "norm": "source", "steps": 2}))
    adapter = trueup.adapt(net(), "tsd", lr=1e-2, norm="source", steps=2)
    assert same(seen[0], by_hand(adapter, runner.loader.place, runner.stream))


def test_model_of_the_runner_is_unchanged_after_all_methods() -> None:
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    runner = toy_runner(domain(41, seed=1), model=model)
    first = {
        name: runner.run(make_method(name, {"lr": 1e-2} if name == "tent" else {})).results for name in PAPER_METHODS
    }
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert {
        name: runner.run(make_method(name, {"lr": 1e-2} if name == "tent" else {})).results for name in PAPER_METHODS
    } == (first)


def test_same_seed_gives_the_same_results_and_another_seed_other_ones() -> None:
    first, again, other = (
        toy_runner(domain(41, seed=1), seed=seed).run(make_method("tsd", {"lr": 1e-2})).results for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_cost_is_in_seconds_images_per_second_and_megabytes() -> None:
    cost = toy_runner(domain(41, seed=1)).run(make_method("tent", {})).cost
    assert set(cost) == {"seconds", "images_per_second", "peak_memory_mb"}
    assert cost["images_per_second"] == pytest.approx(41 / cost["seconds"])
    assert cost["seconds"] > 0
    assert 10 < cost["peak_memory_mb"] < 1e6


def test_progress_is_told_before_each_batch() -> None:
    told: list[tuple[int, int]] = []
    toy_runner(domain(41, seed=1)).run(make_method("tent", {}), lambda done, of: told.append((done, of)))
    assert told == [(0, 3), (1, 3), (2, 3)]


def test_model_may_be_in_training_mode(seen: Seen) -> None:
    runner = toy_runner(domain(41, seed=1))
    runner.run(make_method("source", {}))
    runner.model.train()
    runner.passes.clear()
    runner.run(make_method("source", {}))
    assert same(seen[0], seen[1])
    assert runner.model.training


# Features that are computed once


def counted(sizes: list[int]) -> nn.Module:
    """The network, noting the sizes of the batches that it sees. The probe for its head takes two images."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                sizes.append(len(x))
            answer: Tensor = self.body(x)
            return answer

    return Counted().eval()


@pytest.mark.parametrize(("name", "norm"), FROZEN)
def test_shared_features_give_the_same_answers_to_the_bit(name: str, norm: str, seen: Seen) -> None:
    runner, method = toy_runner(domain(41, seed=1)), make_method(name, {"norm": norm})
    with_others = runner.run(method)
    alone = runner.run(method, share=False)
    assert same(seen[0], seen[1])
    assert with_others.results == alone.results


@pytest.mark.parametrize(("name", "norm"), FROZEN)
def test_shared_features_give_the_same_answers_when_domains_are_reset(name: str, norm: str, seen: Seen) -> None:
    runner = toy_runner(domain(21, seed=1), domain(20, seed=2), reset=True)
    runner.run(make_method(name, {"norm": norm}))
    runner.run(make_method(name, {"norm": norm}), share=False)
    assert same(seen[0], seen[1])


def test_backbone_runs_once_for_each_mode_of_statistics() -> None:
    sizes: list[int] = []
    runner = toy_runner(domain(41, seed=1), model=counted(sizes))
    for name, norm in FROZEN:
        runner.run(make_method(name, {"norm": norm}))
    assert sizes == [16, 16, 16, 9, 16, 16, 9]  # the first is to get warm


def test_time_of_the_shared_pass_is_part_of_every_methods_cost() -> None:
    runner = toy_runner(domain(41, seed=1))
    costs = [runner.run(make_method(name, {})).cost["seconds"] for name in ("source", "t3a")]
    shared = runner.passes["source"]
    assert shared is not None
    assert min(costs) > shared.seconds > 0


@pytest.mark.parametrize("bias", [True, False])
def test_head_without_bias_is_shared_too(bias: bool, seen: Seen) -> None:
    model = net()
    if not bias:
        model.get_submodule("head").bias = None
    runner = toy_runner(domain(41, seed=1), model=model)
    runner.run(make_method("t3a", {}))
    runner.run(make_method("t3a", {}), share=False)
    assert same(seen[0], seen[1])
    assert runner.passes["source"] is not None


class Cosine(nn.Linear):
    """A head of its own kind: cosine similarities at a temperature."""

    def forward(self, x: Tensor) -> Tensor:
        return 8 * F.linear(F.normalize(x, p=2, dim=1), F.normalize(self.weight, p=2, dim=1))


@pytest.mark.parametrize("name", ["source", "t3a", "lame"])
def test_head_of_another_kind_gives_the_same_answers_shared_or_not(name: str, seen: Seen) -> None:
    model = net()
    head = Cosine(24, 6)
    head.load_state_dict(model.get_submodule("head").state_dict())
    model.head = head
    runner = toy_runner(domain(41, seed=1), model=model)
    runner.run(make_method(name, {}))
    runner.run(make_method(name, {}), share=False)
    assert same(seen[0], seen[1])


@pytest.mark.parametrize("name", ["tent", "pl", "shot-im", "eta", "eata", "tsd"])
def test_gradient_methods_do_not_share(name: str) -> None:
    runner = toy_runner(domain(41, seed=1))
    assert runner.shared(make_method(name, {"norm": "source"})) is None
    assert runner.passes == {}


@pytest.mark.parametrize("name", ["source", "bn", "t3a", "lame"])
def test_running_estimates_are_not_shared(name: str, seen: Seen) -> None:
    runner, method = toy_runner(domain(41, seed=1)), make_method(name, {"norm": "ema"})
    assert runner.shared(method) is None
    runner.run(method)
    assert same(seen[0], by_hand(trueup.adapt(net(), method), runner.loader.place, runner.stream))


def test_model_without_a_head_does_without_sharing(seen: Seen) -> None:
    model = nn.Sequential(net(), nn.Softplus())
    runner = toy_runner(domain(41, seed=1), model=model)
    runner.run(make_method("source", {}))
    assert runner.passes == {"source": None}
    assert same(seen[0], by_hand(trueup.adapt(model, "source"), runner.loader.place, runner.stream))


def test_too_many_features_are_not_kept(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    runner = toy_runner(domain(41, seed=1))
    monkeypatch.setattr(protocol, "SHARED", 41 * protocol.WIDEST * 4 - 1)
    runner.run(make_method("t3a", {}))
    assert runner.passes == {"source": None}
    runner.passes.clear()
    monkeypatch.setattr(protocol, "SHARED", 41 * protocol.WIDEST * 4)
    runner.run(make_method("t3a", {}))
    assert runner.passes["source"] is not None
    assert same(seen[0], seen[1])


@dataclass(frozen=True, kw_only=True)
class Views(Method):
    """Asks the model about mirrored images, too."""

    info = Info(name="views", title="Views", paper="none")

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        return out.logits + net(out.x.flip(-1)).logits


@dataclass(frozen=True, kw_only=True)
class Again(Method):
    """Its own forward pass."""

    info = Info(name="again", title="Again", paper="none")

    def forward(self, net: SplitModel, x: Tensor, state: nn.Module) -> Output:
        return net(x.flip(-1), update=True)


@dataclass(frozen=True, kw_only=True)
class Single(Method):
    """Image by image."""

    norm: str = "batch"
    info = Info(name="single", title="Single", paper="none")

    def rows(self, state: Any, n: int) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class Prepared(Method):
    """Subtracts the mean logits of source images."""

    info = Info(name="prepared", title="Prepared", paper="none", needs=("prepare",))

    def init(self, net: SplitModel) -> nn.Module:
        state = nn.Module()
        state.register_buffer("mean", torch.zeros(net.classes))
        return state

    def prepare(self, net: SplitModel, loader: Any, state: Any) -> None:
        state.mean.copy_(torch.cat([net(x).logits.detach() for x in loader]).mean(dim=0))

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        return out.logits - state.mean


@pytest.mark.parametrize("method", [Views(), Again(), Single()], ids=["views", "forward", "rows"])
def test_method_that_looks_at_images_gets_images(method: Method, seen: Seen) -> None:
    runner = toy_runner(domain(41, seed=1))
    runner.run(method)
    assert same(seen[0], by_hand(trueup.adapt(net(), method), runner.loader.place, runner.stream))


def test_method_that_answers_with_nan_fails_instead_of_being_measured() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Nan(Method):
        info = Info(name="nan", title="Nan", paper="none")

        def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
            return out.logits * torch.nan

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="finite"):
            toy_runner(domain(41, seed=1)).run(Nan())


def test_a_head_that_does_not_explain_the_logits_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = toy_runner(domain(41, seed=1))
    alone = runner.run(make_method("t3a", {}), share=False).results
    monkeypatch.setattr(protocol, "_head", lambda adapter: nn.Linear(24, 6))
    assert runner.run(make_method("t3a", {})).results == alone
    assert runner.passes == {"source": None}


# Source images before deployment


@pytest.mark.parametrize("method", [make_method("eata", {"lr": 0.05}), Prepared()], ids=["eata", "frozen"])
def test_method_that_needs_source_images_is_prepared_once(
    method: Method, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    source = [images(20, seed=s)[0] for s in (7, 8)]
    asked: list[int] = []

    def prepare() -> Iterator[Tensor]:
        asked.append(1)
        return iter(source)

    runner = toy_runner(domain(41, seed=1), domain(30, seed=2), reset=True, prepare=prepare)
    with caplog.at_level(logging.WARNING, logger="trueup"):
        runner.run(method)
    assert asked == [1]
    assert not caplog.records
    halves: Seen = []
    for number in (0, 1):
        adapter = trueup.adapt(net(), method)
        adapter.prepare(source)
        mine = [b for b in runner.stream if runner.loader.place.numbers[b[0]] == number]
        halves.append(by_hand(adapter, runner.loader.place, mine))
    assert np.array_equal(seen[0][0], np.concatenate([probs for probs, _ in halves]))


@pytest.mark.parametrize("name", PAPER_METHODS)
def test_other_methods_are_shown_no_source_images(name: str) -> None:
    def prepare() -> Iterator[Tensor]:
        raise AssertionError("nobody asked for source images")

    toy_runner(domain(20, seed=1), prepare=prepare).run(make_method(name, {}))


# Several domains


@pytest.mark.parametrize("name", ["tent", "tsd", "t3a", "lame", "eta"])
def test_reset_at_a_border_is_a_fresh_adapter(name: str, seen: Seen) -> None:
    runner = toy_runner(domain(41, seed=1), domain(23, seed=2, shift=1.0), reset=True)
    hyper = {"lr": 1e-2} if name in ("tent", "tsd") else {}
    outcome = runner.run(make_method(name, hyper))
    place, updates, parts = runner.loader.place, 0, []
    for number in (0, 1):
        adapter = trueup.adapt(net(), name, **hyper)
        mine = [b for b in runner.stream if place.numbers[b[0]] == number]
        parts.append(by_hand(adapter, place, mine))
        updates += adapter.updates
    assert same(seen[0], (np.concatenate([p for p, _ in parts]), np.concatenate([y for _, y in parts])))
    assert outcome.results["updates"] == updates


@pytest.mark.parametrize("name", ["tent", "tsd", "t3a"])
def test_without_reset_one_adapter_goes_on(name: str, seen: Seen) -> None:
    runner = toy_runner(domain(41, seed=1), domain(23, seed=2, shift=1.0))
    assert [len(b) for b in runner.stream] == [16, 16, 16, 16]  # the third has images of both
    runner.run(make_method(name, {}))
    assert same(seen[0], by_hand(trueup.adapt(net(), name), runner.loader.place, runner.stream))


@pytest.mark.parametrize("name", ["continual", "mixed", "gradual", "dirichlet", "class-sorted", "label-shift"])
def test_with_reset_no_batch_mixes_domains_and_every_border_cuts(name: str) -> None:
    place = ConcatDomains([domain(41, seed=1), domain(23, seed=2), domain(30, seed=3)])
    whole = np.concatenate(make_stream(place, name, {}, seed=3, batch=8, limit=None, reset=False))
    cut = make_stream(place, name, {}, seed=3, batch=8, limit=None, reset=True)
    assert np.array_equal(np.concatenate(cut), whole)
    assert all(len(set(place.numbers[b])) == 1 for b in cut)
    borders = sum(a != b for a, b in pairwise(place.numbers[whole]))
    assert sum(place.numbers[a[-1]] != place.numbers[b[0]] for a, b in pairwise(cut)) == borders
    assert all(0 < len(b) <= 8 for b in cut)


def test_streams_of_one_domain_are_the_same_with_and_without_reset() -> None:
    place = ConcatDomains([domain(41, seed=1)])
    both = [make_stream(place, "iid", {}, seed=0, batch=8, limit=None, reset=reset) for reset in (False, True)]
    assert [b.tolist() for b in both[0]] == [b.tolist() for b in both[1]]
    assert sorted(np.concatenate(both[0]).tolist()) == list(range(41))


@pytest.mark.parametrize("reset", [False, True])
def test_limit_takes_the_first_images_of_the_stream(reset: bool) -> None:
    place = ConcatDomains([domain(10, seed=1), domain(10, seed=2)])
    whole, few, many = (
        np.concatenate(make_stream(place, "continual", {}, seed=0, batch=4, limit=limit, reset=reset))
        for limit in (None, 13, 100)
    )
    assert np.array_equal(few, whole[:13])
    assert np.array_equal(many, whole)


def test_options_reach_the_stream() -> None:
    place = ConcatDomains([domain(41, seed=1)])
    long, short = (
        np.concatenate(make_stream(place, "label-shift", {"imbalance": v}, seed=0, batch=8, limit=None, reset=False))
        for v in (1.0, 50.0)
    )
    assert len(long) > len(short)
    with pytest.raises(ValueError, match="'balance'; did you mean 'imbalance'"):
        make_stream(place, "label-shift", {"balance": 2.0}, seed=0, batch=8, limit=None, reset=False)


# Images that cannot be read


@pytest.mark.parametrize("name", ["source", "t3a", "tent"])
def test_broken_images_are_counted_and_labels_stay_aligned(name: str, seen: Seen) -> None:
    whole = toy_runner(domain(41, seed=1))
    first, second, third = whole.stream
    broken = [int(first[0]), int(first[5]), *second.tolist(), int(third[-1])]
    runner = toy_runner(domain(41, seed=1, broken=broken))
    outcome = runner.run(make_method(name, {}))
    assert (outcome.results["broken"], outcome.results["images"]) == (len(broken), 41 - len(broken))
    left = [np.array([i for i in b if i not in broken]) for b in whole.stream]
    expected = by_hand(trueup.adapt(net(), name), whole.loader.place, [b for b in left if len(b)])
    assert same(seen[0], expected)


@pytest.mark.parametrize("name", ["source", "tent"])
def test_broken_images_beyond_the_limit_are_not_counted(name: str) -> None:
    place = ConcatDomains([domain(41, seed=1, broken=range(0, 41, 2))])
    loader = Loader(place, 16, "half", keep=True)
    whole = make_stream(place, "iid", {}, seed=0, batch=8, limit=None, reset=False)
    few = make_stream(place, "iid", {}, seed=0, batch=8, limit=13, reset=False)
    StreamRunner(net(), loader, whole).run(make_method(name, {}))  # the loader has met all of them before
    results = StreamRunner(net(), loader, few).run(make_method(name, {})).results
    lost = [i for i in np.concatenate(few) if i % 2 == 0]
    assert (results["broken"], results["images"]) == (len(lost), 13 - len(lost))


@pytest.mark.parametrize("name", ["source", "tent"])
def test_broken_image_that_is_shown_three_times_is_counted_three_times(name: str) -> None:
    """What was shown is what was answered and what was broken: the two numbers have to add up."""
    place = ConcatDomains([domain(12, seed=1, broken=[3])])
    stream = [np.array([0, 3, 5, 0]), np.array([3, 7, 3, 8])]
    runner = StreamRunner(net(), Loader(place, 16, "half", keep=True), stream)
    for _ in range(2):
        results = runner.run(make_method(name, {})).results
        assert (results["broken"], results["images"], results["broken_files"]) == (3, 5, ["d1[3]"])


def test_reset_happens_although_the_batches_around_the_border_are_broken(seen: Seen) -> None:
    whole = toy_runner(domain(32, seed=1), domain(32, seed=2), reset=True)
    lost = whole.stream[2] - 32  # the first batch of the second domain
    runner = toy_runner(domain(32, seed=1), domain(32, seed=2, broken=lost.tolist()), reset=True)
    runner.run(make_method("tsd", {"lr": 1e-2}))
    expected = by_hand(trueup.adapt(net(), "tsd", lr=1e-2), whole.loader.place, whole.stream[3:])
    assert np.array_equal(seen[0][0][32:], expected[0])


@pytest.mark.parametrize("name", ["source", "tent"])
def test_stream_of_broken_images_alone_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="no image of the stream can be read"):
        toy_runner(domain(20, seed=1, broken=range(20))).run(make_method(name, {}))


# Records


def toy() -> Dataset:
    domains = {f"d{seed}": domain(60, seed=seed, shift=shift) for seed, shift in ((1, 0.0), (2, 0.3), (3, 0.9))}
    return Dataset("toy", tuple("abcdef"), tuple(domains), domains.__getitem__)


def run_of(method: str = "tsd", **more: Any) -> Run:
    values: dict[str, Any] = {
        "dataset": "toy", "target": "d3", "network": "digits-net", "weights": "none", "batch": 16, "method": method,
        "source": Training(iterations=1, size=16, normalize="half", augment="none"),
        "hyper": make_method(method, {}).hyperparameters(),
    }  # fmt: skip
    return Run(**values | more)


def stored(folder: Path, run: Run, dataset: Dataset) -> Store:
    """A store with an untrained network under the run's recipe."""
    store, recipe = Store(folder), run.recipe(dataset)
    assert recipe is not None
    with torch.random.fork_rng():
        torch.manual_seed(run.seed)
        store.save(recipe, build_network("digits-net", 6, size=16), {})
    return store


def record_of(folder: Path, run: Run) -> dict[str, Any]:
    dataset = toy()
    runner = make_runner(run, dataset, stored(folder, run, dataset), Paths(folder))
    return evaluate(run, runner, dataset, lambda done, of: None, Paths(Path()))


@pytest.mark.parametrize("method", ["source", "t3a", "tsd", "eata"])
def test_two_runs_of_one_seed_have_the_same_record_but_for_time(tmp_path: Path, method: str) -> None:
    first, again = (record_of(tmp_path / name, run_of(method)) for name in ("one", "two"))
    assert reproducible_part(first) == reproducible_part(again)
    other = record_of(tmp_path / "one", run_of(method, seed=1))
    assert other["id"] != first["id"]
    assert other["results"] != first["results"]


def test_record_is_one_line_of_json_with_every_knob(tmp_path: Path) -> None:
    run = run_of()
    record = record_of(tmp_path, run)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert list(record) == ["id", "settings", "results", "cost", "environment", "finished"]
    assert Run(**record["settings"]) == run
    assert record["id"] == run.digest()
    assert {"accuracy", "macro", "per_class", "ece", "nll", "images", "updates", "broken"} <= set(record["results"])
    assert {"trueup", "torch", "python", "numpy", "threads", "cpu"} <= set(record["environment"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["finished"])


def test_runner_has_the_targets_images_in_the_runs_order(tmp_path: Path) -> None:
    run, dataset = run_of(limit=20, target="d1+d3", stream="mixed", reset=True), toy()
    runner = make_runner(run, dataset, stored(tmp_path, run, dataset), Paths(tmp_path))
    expected = make_stream(
        ConcatDomains([dataset.domain("d1"), dataset.domain("d3")]), "mixed", {}, seed=0, batch=16, limit=20, reset=True
    )
    assert [b.tolist() for b in runner.stream] == [b.tolist() for b in expected]
    assert (runner.reset, runner.seed) == (True, 0)


def test_source_images_are_training_images_of_the_source_domains_alone() -> None:
    run, dataset = run_of(), toy()
    found = torch.cat(list(source_images(run, dataset)))
    d1, d2 = dataset.domain("d1"), dataset.domain("d2")
    known = tensor(ConcatDomains([d1, d2]), np.arange(120))
    matches = (found[:, None] == known[None]).flatten(2).all(dim=2)
    assert bool((matches.sum(dim=1) == 1).all())
    trains = [split_holdout(d, Training().holdout, run.seed)[0] for d in (d1, d2)]
    assert sorted(matches.int().argmax(dim=1).tolist()) == [*trains[0], *(trains[1] + 60)]


# Failures


def raised(path: str) -> Exception:
    def inner(values: dict[str, int]) -> int:
        return values[path] + 1

    def outer(values: dict[str, int]) -> int:
        return inner(values)

    try:
        outer({})
    except KeyError as error:
        return error
    raise AssertionError


def test_failure_names_the_error_and_its_run() -> None:
    record = failure_record(run_of(), raised("accuracy"))
    assert record["error"] == "KeyError: 'accuracy'"
    assert (record["id"], record["settings"]) == (run_of().digest(), run_of().model_dump(mode="json"))
    assert "results" not in record
    json.dumps(record)


def test_failure_names_the_place_in_the_code() -> None:
    assert "values[path] + 1" in " ".join(failure_record(run_of(), raised("x"))["at"])


def test_failure_of_a_single_frame_names_the_place_alone() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        record = failure_record(run_of(), error)
    assert 'raise ValueError("no")' in " ".join(record["at"])
    assert not any("Traceback" in line for line in record["at"])


def test_failure_in_words_has_no_place() -> None:
    assert failure_record(run_of(), "its process was killed")["error"] == "its process was killed"
    assert failure_record(run_of(), "its process was killed")["at"] == []


def test_failure_does_not_tell_where_things_are(tmp_path: Path) -> None:
    try:
        make_runner(run_of(), toy(), Store(tmp_path), Paths(tmp_path))
    except (ValueError, OSError) as error:
        text = json.dumps(failure_record(run_of(), error))
    assert str(tmp_path) not in text
    assert str(Path(trueup.__file__).parent) not in text
