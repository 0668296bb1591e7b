"""Disturbed, repeated and guarded streams: only genuine images are scored, and what is refused is wrong."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_intruders import loader
from torch import Tensor
from toy_jobs import run_of, stored, toy
from toy_streams import Seen, domain, net

import trueup
from trueup.bench.intruders import Intruders, parse_disturbance
from trueup.bench.jobs import Paths, evaluate, holdout_runners, make_runner
from trueup.bench.settings import PAPER_METHODS, make_sweep
from trueup.bench.stream_runner import Refusals, StreamRunner, make_stream
from trueup.bench.sweep import plan
from trueup.core.method import Info, Method
from trueup.core.registry import make_method
from trueup.data.loading import ConcatDomains
from trueup.data.streams import STREAMS
from trueup.model.split_model import Output, SplitModel
from trueup.testing import segnet

SHARES = ("ood:0.25", "replay:0.25", "crafted:0.25")


def toy_runner(text: str, n: int = 50, batch: int = 16) -> StreamRunner:
    what, images, model = parse_disturbance(text), loader(n, shift=1.0), net()
    stream = make_stream(images.place, "iid", {}, seed=0, batch=what.genuine(batch), limit=None, reset=False)
    return StreamRunner(model, images, stream, intruders=Intruders(what, model, images, stream, batch))


# Who is scored


@pytest.mark.parametrize("text", SHARES)
@pytest.mark.parametrize("name", [*PAPER_METHODS, "eata"])
def test_adapter_sees_all_rows_and_the_scorer_the_genuine_ones(name: str, text: str, seen: Seen) -> None:
    runner = toy_runner(text)
    outcome = runner.run(make_method(name, {}))
    adapter = trueup.adapt(net(), name)
    assert runner.intruders is not None
    probs, labels = [], []
    for x, at in runner.intruders.batches():
        answer = F.softmax(adapter(x).double(), dim=1).numpy()
        assert (at < 0).any()
        probs += [answer[row] for row in range(len(x)) if at[row] >= 0]
        labels += [runner.loader.place.labels[i] for i in at.tolist() if i >= 0]
    assert np.array_equal(seen[0][0], np.stack(probs))
    assert seen[0][1].tolist() == labels
    assert (outcome.results["images"], outcome.results["broken"], outcome.results["refused"]) == (50, 0, 0)
    assert "guard" not in outcome.results


@pytest.mark.parametrize("text", SHARES)
@pytest.mark.parametrize("name", ["source", "bn", "t3a", "lame"])
def test_shared_features_of_disturbed_streams_give_the_same_answers(name: str, text: str, seen: Seen) -> None:
    runner = toy_runner(text)
    assert runner.shared(make_method(name, {})) is not None
    runner.run(make_method(name, {}))
    runner.run(make_method(name, {}), share=False)
    assert np.array_equal(seen[0][0], seen[1][0])


@pytest.mark.parametrize("text", ["nan", "huge"])
def test_rows_that_some_refuse_are_seen_as_images(text: str) -> None:
    runner = toy_runner(text)
    runner.run(make_method("t3a", {}))
    assert runner.passes == {}


def test_stream_without_intruders_says_nothing_of_refusals() -> None:
    runner = toy_runner("nan")
    runner.intruders = None
    assert "refused" not in runner.run(make_method("tent", {})).results


def test_domain_of_a_batch_is_that_of_its_genuine_images(seen: Seen) -> None:
    """With an intruder at either end of a batch, a border between domains is still a border and nothing else is."""
    place = ConcatDomains([domain(20, seed=1), domain(20, seed=2)])
    images = loader(1)
    images.place, images.cache = place, {}
    stream = make_stream(place, "continual", {}, seed=0, batch=2, limit=None, reset=True)
    runner = StreamRunner(net(), images, stream, reset=True)
    runner.intruders = Intruders(parse_disturbance("ood:0.5"), net(), images, stream, 4)
    assert {at[0] < 0 for _, at in runner.batches()} == {at[-1] < 0 for _, at in runner.batches()} == {True, False}
    runner.run(make_method("tent", {"lr": 0.01}))
    adapters = [trueup.adapt(net(), "tent", lr=0.01) for _ in range(2)]
    answers = [(adapters[number >= 10](x)[at >= 0]) for number, (x, at) in enumerate(runner.batches())]
    assert np.array_equal(seen[0][0], F.softmax(torch.cat(answers).double(), dim=1).numpy())


# What is refused


@pytest.mark.parametrize("name", ["source", "tent", "tsd", "lame"])
def test_refused_batch_counts_as_uniform_and_wrong(name: str, seen: Seen) -> None:
    runner = toy_runner("nan")
    outcome = runner.run(make_method(name, {}))
    bad = len(runner.stream) // 3
    adapter = trueup.adapt(net(), name)
    right = 0
    for number, (x, at) in enumerate(runner.loader.batches(runner.stream)):
        if number != bad:
            right += int((adapter(x).argmax(dim=1).numpy() == runner.loader.place.labels[at]).sum())
    assert outcome.results["accuracy"] == right / 50
    assert (outcome.results["refused"], outcome.results["images"]) == (1, 50)
    assert outcome.results["updates"] == adapter.updates
    start = 16 * bad
    probs, labels = seen[0][0][start : start + 16], seen[0][1][start : start + 16]
    assert np.allclose(probs, 1 / 6, atol=1e-6)
    assert 0 in labels  # of which a plain argmax of zeros would be right
    assert not (probs.argmax(axis=1) == labels).any()


def test_first_batch_may_be_refused() -> None:
    runner = toy_runner("nan", n=20, batch=10)
    assert len(runner.stream) // 3 == 0
    results = runner.run(make_method("tsd", {})).results
    assert results["refused"] == 1
    assert results["accuracy"] <= 0.5


@dataclass(frozen=True, kw_only=True)
class Lost(Method):
    """Answers with NaN."""

    info = Info(name="lost", title="Lost", paper="none")

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        return out.logits * torch.nan


@dataclass(frozen=True, kw_only=True)
class Helpless(Method):
    """Fails for a reason that is not the batch's."""

    info = Info(name="helpless", title="Helpless", paper="none")

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        raise RuntimeError("out of luck")


def test_answers_that_are_not_finite_are_refusals() -> None:
    results = toy_runner("ood:0.25").run(Lost()).results
    assert (results["accuracy"], results["refused"], results["images"]) == (0.0, 5, 50)


def test_other_errors_are_errors() -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        toy_runner("ood:0.25").run(Helpless())
    quiet = toy_runner("ood:0.25")
    quiet.intruders = None
    with pytest.raises(ValueError, match="not finite"):
        quiet.run(Lost())


@pytest.mark.parametrize("multilabel", [False, True])
def test_refused_masks_are_empty(multilabel: bool) -> None:
    x, at = torch.zeros(3, 3, 32, 32), np.array([4, -1, 2])
    refused = Refusals(segnet(multilabel=multilabel), np.zeros(5, dtype=np.int64), multilabel)
    answer = refused.checked(None, x, at)
    assert answer.shape == (3, 2 if multilabel else 3, 32, 32)
    assert bool((answer < 0).all() if multilabel else (answer.argmax(dim=1) == 0).all())
    assert refused.batches == 1


# Streams that come again


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "iid"])
@pytest.mark.parametrize("limit", [None, 13])
def test_repeated_stream_has_the_same_images_in_other_orders(name: str, limit: int | None) -> None:
    place = ConcatDomains([domain(41, seed=1), domain(20, seed=2)])
    once, thrice = (
        make_stream(place, name, {}, seed=3, batch=8, limit=limit, reset=False, repeat=repeat) for repeat in (1, 3)
    )
    assert [b.tolist() for b in thrice[: len(once)]] == [b.tolist() for b in once]
    assert Counter(np.concatenate(thrice).tolist()) == dict.fromkeys(np.concatenate(once).tolist(), 3)
    first, second, third = np.split(np.concatenate(thrice), 3)
    if name not in ("cases", "class-sorted", "dirichlet") or limit is None:
        assert first.tolist() != second.tolist() != third.tolist() != first.tolist()


def test_repeated_stream_keeps_its_kind_and_its_seed() -> None:
    place = ConcatDomains([domain(60, seed=1)])
    found = make_stream(place, "class-sorted", {}, seed=0, batch=8, limit=None, reset=False, repeat=4)
    for part in np.split(np.concatenate(found), 4):
        assert (np.diff(place.labels[part]) != 0).sum() == 5
    again = make_stream(place, "class-sorted", {}, seed=0, batch=8, limit=None, reset=False, repeat=4)
    assert [b.tolist() for b in found] == [b.tolist() for b in again]
    few = make_stream(place, "few-classes", {"classes": 2}, seed=0, batch=8, limit=None, reset=False, repeat=4)
    assert len(set(place.labels[np.concatenate(few)].tolist())) == 2


# Guards


@pytest.mark.parametrize("text", ["nan", "huge"])
@pytest.mark.parametrize("name", ["source", "t3a", "tent"])
def test_guarded_adapter_answers_the_genuine_rows_of_a_bad_batch(name: str, text: str, seen: Seen) -> None:
    runner = toy_runner(text)
    runner.guard = True
    results = runner.run(make_method(name, {})).results
    assert runner.passes == {}  # no pass without a guard serves one with it
    assert (results["refused"], results["guard"]["quarantined"]) == (0, 1)
    runner.intruders = None
    runner.run(make_method(name, {}))
    assert np.array_equal(seen[0][0], seen[1][0])  # as if the intruder had not been there


def test_guard_belongs_to_the_run_not_to_the_runner(tmp_path: Path) -> None:
    plain, dataset = run_of("t3a", disturb="nan"), toy()
    guarded = plain.model_copy(update={"guard": True})
    runner = make_runner(plain, dataset, stored(tmp_path, plain, dataset), Paths(tmp_path))
    found = [evaluate(run, runner, dataset, lambda done, of: None, Paths(Path())) for run in (plain, guarded, plain)]
    assert [record["results"]["refused"] for record in found] == [1, 0, 1]
    assert ["guard" in record["results"] for record in found] == [False, True, False]
    assert found[0]["results"] == found[2]["results"]
    assert found[1]["settings"]["guard"] is True


# Runs


def test_runner_of_a_run_has_what_the_run_says(tmp_path: Path) -> None:
    run, dataset = run_of("bn", disturb="ood:0.25", repeat=2, limit=30), toy()
    runner = make_runner(run, dataset, stored(tmp_path, run, dataset), Paths(tmp_path))
    assert [len(b) for b in runner.stream] == [12, 12, 6, 12, 12, 6]
    assert [len(x) for x, _ in runner.batches()] == [16, 16, 8, 16, 16, 8]
    record = evaluate(run, runner, dataset, lambda done, of: None, Paths(Path()))
    assert (record["results"]["images"], record["results"]["refused"]) == (60, 0)
    assert (record["settings"]["disturb"], record["settings"]["repeat"]) == ("ood:0.25", 2)
    assert all(s.intruders is None for s in holdout_runners(run, runner, dataset))


def test_runs_with_and_without_a_guard_share_a_runner(tmp_path: Path) -> None:
    sweep = make_sweep({"target": "hand", "seed": 0, "method": ["tsd", "tsd:guard=true", "t3a"], "disturb": "nan"})
    (job,) = plan(sweep, tmp_path).jobs
    assert [(run.method, run.guard) for run in job.runs] == [("tsd", False), ("tsd", True), ("t3a", False)]
    assert job.title == "digits/hand, nan, seed 0"
    others = [make_sweep({"target": "hand", "seed": 0, "method": "bn", **k}) for k in ({}, {"repeat": 2})]
    assert len({plan(other, tmp_path).jobs[0].title for other in others}) == 2
