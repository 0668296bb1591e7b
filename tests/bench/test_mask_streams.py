"""The protocol on masks equals a plain loop over `trueup.adapt`; streams, searches and records of them."""

import json
import re
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scans
import torch
from torch import Tensor, nn
from toy_jobs import reproducible_part, run_sweep

import trueup
from trueup.bench.jobs import Paths, evaluate, holdout_runners, make_runner, source_images
from trueup.bench.records import FILE, read_records
from trueup.bench.settings import MASK_METHODS, Run, make_sweep, resolve_hyper
from trueup.bench.stream_runner import StreamRunner, make_stream
from trueup.core.registry import make_method
from trueup.data.datasets import Dataset, open_dataset
from trueup.data.loading import ConcatDomains, Loader
from trueup.data.slices import SliceDomain
from trueup.report.tables import make_tables
from trueup.source.checkpoints import Store
from trueup.source.networks import build_network
from trueup.source.recipe import Training
from trueup.source.tasks import split_holdout

METHODS = (*MASK_METHODS, "eata")
HYPER: dict[str, dict[str, Any]] = {"tent": {"lr": 0.05}, "tsd": {"lr": 0.01}, "pl": {"threshold": 0.3}}


def net(channels: int = 3) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return build_network("small-unet", channels).eval()


def images_of(place: ConcatDomains, at: Any) -> Tensor:
    """What the loader makes of slices, written out."""
    return scans.tensor(np.stack([domain.image(i) for domain, i in map(place.find, at.tolist())]))


def toy_runner(
    *domains: SliceDomain, stream: str = "iid", batch: int = 3, multilabel: bool = False, **more: Any
) -> StreamRunner:
    place = ConcatDomains(domains)
    batches = make_stream(
        place, stream, {}, seed=0, batch=batch, limit=more.pop("limit", None), reset=more.get("reset", False)
    )
    loader = Loader(place, scans.SIDE, "half", keep=True)
    model = net(2 if multilabel else 3)
    return StreamRunner(model, loader, batches, structures=scans.STRUCTURES, multilabel=multilabel, **more)


def by_hand(runner: StreamRunner, adapter: Any) -> dict[str, float]:
    """A plain loop: adapt, argmax or threshold, then Dice of each case and structure, pixel by pixel."""
    place, said = runner.loader.place, {}
    for at in runner.stream:
        for i, logits in zip(at.tolist(), adapter(images_of(place, at)), strict=True):
            said[i] = [(logits[k] > 0).numpy() for k in range(2)]
            if not runner.multilabel:
                said[i] = [np.isin(logits.argmax(dim=0).numpy(), part) for part in scans.STRUCTURES.values()]
    cases: dict[str, list[int]] = {}
    for i in sorted(said):
        domain, j = place.find(i)
        assert isinstance(domain, SliceDomain)
        cases.setdefault(domain.cases[domain.place(j)[0]].name, []).append(i)
    scores = {}
    for k, (name, part) in enumerate(scans.STRUCTURES.items()):
        each = []
        for members in cases.values():
            truth = [place.find(i)[0].mask(place.find(i)[1]) for i in members]  # type: ignore[attr-defined]
            each.append(scans.dice(np.stack([said[i][k] for i in members]), np.isin(np.stack(truth), part)))
        scores[name] = float(np.mean([d for d in each if d is not None]))
    return scores


# The loop


@pytest.mark.parametrize("stream", ["iid", "cases"])
@pytest.mark.parametrize("name", METHODS)
def test_run_equals_a_plain_loop(name: str, stream: str) -> None:
    runner, hyper = toy_runner(scans.domain("blue", level=25), stream=stream), HYPER.get(name, {})
    results = runner.run(make_method(name, hyper, "segmentation")).results
    adapter = trueup.adapt(net(), name, **hyper)
    expected = by_hand(runner, adapter)
    assert {k: v["dice"] for k, v in results["per_structure"].items()} == pytest.approx(expected)
    assert results["dice"] == pytest.approx(sum(expected.values()) / 2)
    assert (results["images"], results["broken"], results["cases"]) == (10, 0, 5)
    assert results["updates"] == adapter.updates


@pytest.mark.parametrize("name", ["source", "tent", "tsd"])
def test_run_of_labels_equals_a_plain_loop(name: str) -> None:
    runner, hyper = toy_runner(scans.domain("blue", level=25), multilabel=True), HYPER.get(name, {})
    results = runner.run(make_method(name, hyper, "segmentation")).results
    expected = by_hand(runner, trueup.adapt(net(2), name, multilabel=True, **hyper))
    assert {k: v["dice"] for k, v in results["per_structure"].items()} == pytest.approx(expected)


def test_reset_at_a_border_is_a_fresh_adapter() -> None:
    domains = [scans.domain("amber", 3), scans.domain("blue", 3, level=25)]
    runner = toy_runner(*domains, stream="continual", batch=4, reset=True)
    outcome = runner.run(make_method("tent", HYPER["tent"], "segmentation"))
    whole, updates = runner.stream, 0
    for number in (0, 1):
        adapter = trueup.adapt(net(), "tent", **HYPER["tent"])
        runner.stream = [at for at in whole if runner.loader.place.numbers[at[0]] == number]
        expected = by_hand(runner, adapter)
        assert outcome.results["per_domain"][domains[number].name] == pytest.approx(sum(expected.values()) / 2)
        updates += adapter.updates
    assert outcome.results["updates"] == updates


def test_no_features_are_shared_where_there_are_masks() -> None:
    runner = toy_runner(scans.domain("amber"))
    for name in ("source", "bn"):
        method = make_method(name, {}, "segmentation")
        assert runner.shared(method) is None
        assert runner.run(method).results == runner.run(method, share=False).results
    assert runner.passes == {}


def test_model_of_the_runner_is_unchanged_and_runs_can_be_repeated() -> None:
    runner = toy_runner(scans.domain("amber"))
    before = {name: t.clone() for name, t in runner.model.state_dict().items()}
    first, again = (runner.run(make_method("tsd", HYPER["tsd"], "segmentation")).results for _ in range(2))
    assert first == again
    assert all(torch.equal(t, before[name]) for name, t in runner.model.state_dict().items())


def test_cases_that_cannot_be_read_are_counted_by_slices() -> None:
    runner = toy_runner(scans.domain("amber", 5, lost=(1, 4)))
    results = runner.run(make_method("source", {}, "segmentation")).results
    assert (results["images"], results["broken"], results["cases"]) == (6, 4, 3)
    assert results["broken_files"] == ["amber-1[0]", "amber-1[1]", "amber-4[0]", "amber-4[1]"]
    assert list(results["per_case"]) == ["amber-0", "amber-2", "amber-3"]


def test_limit_counts_slices() -> None:
    runner = toy_runner(scans.domain("amber"), stream="cases", limit=5)
    results = runner.run(make_method("source", {}, "segmentation")).results
    assert (results["images"], results["cases"]) == (5, 3)
    expected = by_hand(runner, trueup.adapt(net(), "source"))
    assert results["dice"] == pytest.approx(sum(expected.values()) / 2)


# Streams


@pytest.mark.parametrize("reset", [False, True])
def test_stream_of_cases_mixes_no_patients(reset: bool) -> None:
    """Patients of two scans with three slices each, in batches of four; both domains number theirs from 0."""
    domains = [scans.domain(name, 4, scans=2, slices=3) for name in ("amber", "blue")]
    place = ConcatDomains(domains)
    batches = make_stream(place, "cases", {}, seed=1, batch=4, limit=None, reset=reset)
    assert [len(b) for b in batches] == [3, 3] * 8  # evenly, not four and two
    whole = np.concatenate(batches)
    assert sorted(whole.tolist()) == list(range(48))
    for batch in batches:
        assert len({(i // 24, i % 24 // 6) for i in batch.tolist()}) == 1
    patients = [key for key, _ in groupby(whole.tolist(), key=lambda i: i // 6)]
    assert len(patients) == 8  # one after the other, each once
    assert patients[:4] != sorted(patients[:4])
    for patient in patients:
        own = [i for i in whole.tolist() if i // 6 == patient]
        assert own == sorted(own)  # as the slices lie


def test_two_patients_of_one_number_in_two_domains_share_no_batch() -> None:
    place = ConcatDomains([scans.domain(name, 1, slices=3) for name in ("amber", "blue")])
    batches = make_stream(place, "cases", {}, seed=0, batch=8, limit=None, reset=False)
    assert [b.tolist() for b in batches] == [[0, 1, 2], [3, 4, 5]]


def test_other_streams_of_masks_mix_as_they_like() -> None:
    place = ConcatDomains([scans.domain("amber", 4)])
    batches = make_stream(place, "iid", {}, seed=0, batch=4, limit=None, reset=False)
    assert [len(b) for b in batches] == [4, 4]
    assert len({i // 2 for i in batches[0].tolist()}) > 2


# Runs on a runner


def run_of(method: str, select: str = "default", **more: Any) -> Run:
    values: dict[str, Any] = {
        "dataset": "scans", "target": "coral", "network": "small-unet", "weights": "none", "batch": 4,
        "method": method, "select": select, "hyper": resolve_hyper(method, {}, select, "segmentation"),  # type: ignore[arg-type]
        "source": Training(iterations=1, size=scans.SIDE, normalize="half", augment="none", holdout=0.4),
    }  # fmt: skip
    return Run(**values | more)


def record_of(run: Run, dataset: Dataset, path: Path) -> dict[str, Any]:
    store, recipe = Store(path), run.recipe(dataset)
    assert recipe is not None
    store.save(recipe, net(recipe.classes), {})
    runner = make_runner(run, dataset, store, Paths(path))
    return evaluate(run, runner, dataset, lambda done, of: None, Paths(Path()))


@pytest.mark.parametrize("multilabel", [False, True])
def test_record_of_masks_is_one_line_of_json(multilabel: bool, tmp_path: Path) -> None:
    source = run_of("tsd").source.model_copy(update={"multilabel": multilabel})
    run = run_of("tsd", source=source)
    record = record_of(run, scans.dataset(), tmp_path)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert Run(**record["settings"]) == run
    results = record["results"]
    assert {"dice", "hd95", "assd", "per_structure", "per_case", "cases", "images", "updates", "broken"} == set(results)
    runner = toy_runner(scans.domain("coral", level=50), batch=4, multilabel=multilabel)
    expected = by_hand(runner, trueup.adapt(net(2 if multilabel else 3), "tsd", multilabel=multilabel))
    assert results["dice"] == pytest.approx(sum(expected.values()) / 2)


def test_search_on_held_out_patients_takes_the_best_dice(tmp_path: Path) -> None:
    """Each candidate over each source domain, by hand."""
    run, dataset = run_of("tent", "source"), scans.dataset()
    record = record_of(run, dataset, tmp_path)
    assert [entry["lr"] for entry in record["search"]] == [1e-6, 1e-5, 1e-4, 1e-3]
    for entry in record["search"]:
        scores = []
        for name in ("amber", "blue"):
            domain = dataset.domain(name)
            _, held = split_holdout(domain, 0.4, 0)
            assert len(held) == 4
            order = np.random.default_rng(0).permutation(held)
            runner = StreamRunner(
                net(), Loader(ConcatDomains([domain]), scans.SIDE, "half"), [order], structures=scans.STRUCTURES
            )
            expected = by_hand(runner, trueup.adapt(net(), "tent", lr=entry["lr"]))
            scores.append(sum(expected.values()) / 2)
        assert entry["dice"] == pytest.approx(sum(scores) / 2)
    best = max(record["search"], key=lambda entry: (entry["dice"], -entry["lr"]))
    assert record["chosen"] == {"lr": best["lr"]}
    assert record["settings"]["select"] == "source"


def test_runner_of_a_search_are_as_the_runs_own_but_for_their_images(tmp_path: Path) -> None:
    run, dataset = run_of("tent", "source", reset=True, seed=3), scans.dataset()
    store, recipe = Store(tmp_path), run.recipe(dataset)
    assert recipe is not None
    store.save(recipe, net(), {})
    runner = make_runner(run, dataset, store, Paths(tmp_path))
    runner.warm.add("gradient")
    runners = list(holdout_runners(run, runner, dataset))
    assert [s.loader.place.domains[0].name for s in runners] == ["amber", "blue"]
    for each in runners:
        assert (each.structures, each.multilabel, each.seed, each.reset) == (scans.STRUCTURES, False, 3, False)
        assert each.warm == set()
        assert each.passes == {}
        assert each.model is runner.model
    assert runner.warm == {"gradient"}


def test_oracle_search_uses_the_targets_masks(tmp_path: Path) -> None:
    record = record_of(run_of("tsd", "oracle"), scans.dataset(), tmp_path)
    assert len(record["search"]) == 8
    assert record["results"]["dice"] == max(entry["dice"] for entry in record["search"])


def test_source_images_are_of_patients_that_trained() -> None:
    run, dataset = run_of("eata"), scans.dataset()
    found = torch.cat(list(source_images(run, dataset)))
    expected = []
    for level, name in ((0, "amber"), (25, "blue")):
        trains, _ = split_holdout(dataset.domain(name), 0.4, 0)
        expected += [(level, i // 2, i % 2) for i in trains.tolist()]
    said = []
    for image in found:
        level = int((image[0] * 127.5 + 127.5).round().min())
        said.append((level, *scans.decode(image[None], level)[1][0]))
    assert sorted(said) == sorted(expected)


# From one line to a table


SMALL: dict[str, Any] = {
    "dataset": "fundus-sim", "target": "handheld", "seed": 0, "limit": 16,
    "training": {"iterations": 2, "size": 32, "batch": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, one by one in this process."""
    path = tmp_path_factory.mktemp("runs")
    for method in ("source", "bn", "tsd"):
        trueup.run(path, method=method, **SMALL)
    return path


def test_run_gives_a_record_with_dice(finished: Path) -> None:
    record = trueup.run(finished, method="tsd", **SMALL)
    results = record["results"]
    assert (results["images"], results["cases"], results["broken"], results["updates"]) == (16, 16, 0, 2)
    assert 0 <= results["dice"] <= 1
    assert list(results["per_structure"]) == ["disc", "cup"]
    assert "vcdr_error" in results
    assert all(re.fullmatch(r"handheld-\d{3}", name) for name in results["per_case"])
    assert record["settings"]["hyper"]["neighbors"] == 64
    assert record["settings"]["source"]["size"] == 32


def test_tables_show_dice_by_themselves(finished: Path) -> None:
    records = read_records(finished)
    (table,) = make_tables(records)
    assert table.metric.name == "dice"
    assert table.title.startswith("fundus-sim: Dice in %")
    assert [row.label for row in table.rows] == ["source", "bn", "tsd"]
    for row, record in zip(table.rows, records, strict=True):
        cell = row.cells[0]
        assert cell is not None
        assert cell.mean == record["results"]["dice"]
    (other,) = make_tables(records, metric="hd95")
    assert other.metric.name == "hd95"


def test_finished_runs_are_not_run_again(finished: Path) -> None:
    before = (finished / FILE).read_bytes()
    models = {p: p.stat().st_mtime_ns for p in (finished / "checkpoints").iterdir()}
    assert len(models) == 1  # one source model for all methods
    again = trueup.run(finished, method="bn", **SMALL)
    assert (finished / FILE).read_bytes() == before
    assert again["results"] == next(r for r in read_records(finished) if r["settings"]["method"] == "bn")["results"]
    assert {p: p.stat().st_mtime_ns for p in (finished / "checkpoints").iterdir()} == models


@pytest.mark.slow
def test_a_sweep_goes_on_with_what_is_missing(finished: Path, tmp_path: Path) -> None:
    """The record of tsd is lost, and half of bn's: both are made anew, in a process of their own, to the same end."""
    lines = (finished / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text(lines[0] + lines[1][:40])
    done: list[str] = []

    def tell(event: str, job: Any, value: Any) -> None:
        if event == "record":
            done.append(value["settings"]["method"])

    sweep = make_sweep(SMALL | {"method": ["source", "bn", "tsd"]})
    summary = run_sweep(sweep, tmp_path, workers=1, checkpoints=finished / "checkpoints", on_event=tell)
    assert not summary.failures
    assert done == ["bn", "tsd"]
    records = [{r["id"]: reproducible_part(r) for r in read_records(path)} for path in (finished, tmp_path)]
    for one_, other in zip(*(map(dict.values, records)), strict=True):
        assert {k: v for k, v in one_.items() if k != "environment"} == {
            k: v for k, v in other.items() if k != "environment"
        }


def test_batches_of_a_stream_are_the_runs_own() -> None:
    """Of volumes by cases the batches of a patient are alike, and nothing is lost in between."""
    run = make_sweep({"dataset": "cardiac-sim", "seed": 0, "method": "bn", "stream": "cases", "batch": 5}).runs()[0]
    place = ConcatDomains([open_dataset("cardiac-sim").domain("lge")])
    batches = make_stream(place, run.stream, {}, seed=0, batch=run.batch, limit=run.limit, reset=run.reset)
    assert [len(b) for b in batches] == [4, 4] * 24
    assert all(b == a + 1 for batch in batches for a, b in pairwise(batch.tolist()))
