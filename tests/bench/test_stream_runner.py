"""The protocol equals a plain loop over `trueup.adapt`; resets and broken images change nothing else."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy_streams import Seen, by_hand, domain, net, same, toy_runner

import trueup
from trueup.bench.settings import PAPER_METHODS
from trueup.bench.stream_runner import StreamRunner, make_stream
from trueup.core.method import Info, Method
from trueup.core.registry import make_method
from trueup.data.loading import ConcatDomains, Loader
from trueup.model.split_model import Output, SplitModel
from trueup.testing import images

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


# Source images before deployment


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
