"""Stress tests as pure functions of records, against numbers worked out by hand."""

import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image
from studies import record

from trueup.report.render import FORMS, render_table
from trueup.report.stress_tables import StressCell, StressTest, heatmap, stress_tests
from trueup.report.tables import make_tables

VALUES: dict[str, dict[str, dict[str, tuple[float | None, ...]]]] = {
    "source": {"iid": {"a": (0.5, 0.6), "b": (0.3, 0.4)}, "nan": {"a": (0.5, 0.6), "b": (0.3, 0.4)}},
    "tent": {"iid": {"a": (0.7, 0.7), "b": (0.4, 0.4)}, "nan": {"a": (0.1, 0.6), "b": (0.3, 0.2)}},
    "tsd": {"iid": {"a": (0.6, 0.6), "b": (0.2, 0.4)}, "nan": {"a": (0.5, None), "b": (0.5, 0.5)}},
}


def scenario(settings: Any) -> str:
    return str(settings.get("disturb") or settings["stream"])


def ordeals(values: Any = VALUES, **changes: Any) -> list[dict[str, Any]]:
    return [
        record(method, target, seed, value, **({} if name == "iid" else {"disturb": name}), **changes)
        for method, scenarios in values.items()
        for name, targets in scenarios.items()
        for target, row in targets.items()
        for seed, value in enumerate(row)
    ]


def only(records: list[dict[str, Any]], **more: Any) -> StressTest:
    (test,) = stress_tests(records, scenario, **more)
    return test


def cell(test: StressTest, label: str, name: str) -> StressCell:
    row = next(row for row in test.rows if row.label == label)
    found = row.cells[test.scenarios.index(name)]
    assert found is not None
    return found


def near(found: StressCell, *expected: float, where: str) -> None:
    assert (found.mean, found.difference, found.lowest) == pytest.approx(expected, abs=1e-12)
    assert found.where == where


def test_means_differences_and_worst_runs() -> None:
    test = only(ordeals())
    assert test.scenarios == ("iid", "nan")
    assert [row.label for row in test.rows] == ["source", "tent", "tsd"]
    near(cell(test, "tent", "iid"), 0.55, 0.1, 0.0, where="b, seed 1")
    near(cell(test, "tent", "nan"), 0.3, -0.15, -0.4, where="a, seed 0")
    near(cell(test, "tsd", "iid"), 0.45, 0.0, -0.1, where="b, seed 0")
    source = cell(test, "source", "nan")
    assert (source.mean, source.difference, source.lowest) == (pytest.approx(0.45), None, None)


def test_missing_run_is_left_out_of_both_sides() -> None:
    """tsd has three runs in nan: 0.5 - 0.5, 0.5 - 0.3, 0.5 - 0.4; the fourth of source has no counterpart."""
    test = only(ordeals())
    near(cell(test, "tsd", "nan"), 0.5, 0.1, 0.0, where="a, seed 0")
    assert cell(test, "tsd", "nan").runs == 3
    assert "failed runs (1): tsd in nan" in test.notes


def test_worst_scenario_of_each_method() -> None:
    test = only(ordeals())
    assert [row.worst for row in test.rows] == [None, 1, 0]
    assert "tent: worst in nan, -15.0 points; worst single run -40.0 (nan, a, seed 0)" in test.notes
    assert "tsd: worst in iid, +0.0 points; worst single run -10.0 (iid, b, seed 0)" in test.notes
    assert not any(note.startswith("source:") for note in test.notes)


def test_of_one_run_each_there_is_no_worst_one() -> None:
    values = {"source": {"iid": {"a": (0.5,)}}, "tent": {"iid": {"a": (0.4,)}}}
    assert "tent: worst in iid, -10.0 points" in only(ordeals(values)).notes


def test_scenarios_come_in_the_order_that_is_given() -> None:
    assert only(ordeals(), order=["huge", "nan", "iid"]).scenarios == ("nan", "iid")
    assert only(ordeals(), order=["nan"]).scenarios == ("nan", "iid")


def test_scenario_where_everything_failed_stays_a_column() -> None:
    values = {**VALUES, "tent": {"huge": {"a": (None, None)}}}
    test = only(ordeals(values))
    assert test.scenarios == ("iid", "nan", "huge")
    assert [row.cells[2] for row in test.rows] == [None, None]


def test_of_two_records_of_a_run_the_last_counts() -> None:
    first = ordeals()
    again = [{**r, "results": {"accuracy": 0.9}} for r in first if r["settings"]["method"] == "tent"]
    assert cell(only([*first, *again]), "tent", "iid").mean == pytest.approx(0.9)


def test_joined_targets_and_batches_do_not_make_tables_of_their_own() -> None:
    more = [record(m, "a+b", 0, v, stream="mixed", limit=9) for m, v in (("source", 0.2), ("tent", 0.1))]
    more += [record(m, "a", 0, v, stream="gradual", batch=2) for m, v in (("source", 0.2), ("tent", 0.3))]
    test = only(ordeals() + more)
    assert test.scenarios == ("iid", "nan", "mixed", "gradual")
    near(cell(test, "tent", "mixed"), 0.1, -0.1, -0.1, where="a+b, seed 0")
    assert "targets a, b; seeds 0, 1." in test.caption


def test_datasets_and_networks_have_their_own() -> None:
    tests = stress_tests([*ordeals(), *ordeals(dataset="pacs"), *ordeals(network="resnet18")], scenario)
    assert [test.title for test in tests] == ["digits, digits-net", "pacs, digits-net", "digits, resnet18"]


def test_models_of_files_share_a_table() -> None:
    files = [
        record(m, "a", seed, 0.5, source={"checkpoint": f"sha256:{seed}", "size": 32, "sources": ["b"]})
        for m in ("source", "tent")
        for seed in (0, 1)
    ]
    assert cell(only(files), "tent", "iid").runs == 2


def test_without_source_there_are_no_differences() -> None:
    test = only([r for r in ordeals() if r["settings"]["method"] != "source"])
    assert [row.worst for row in test.rows] == [None, None]
    assert "no differences: there are no runs of source" in test.notes


def test_nothing_finished_is_no_test() -> None:
    assert stress_tests([], scenario) == []
    assert stress_tests([record("tent", "a", 0, None)], scenario) == []


def guarded() -> list[dict[str, Any]]:
    usual = [record("tsd", "a", 0, 0.5, hyper={"lr": 1, "norm": "batch"})]
    return [
        *usual,
        record("tsd", "a", 0, 0.6, hyper={"lr": 1, "norm": "ema"}, guard=True),
        record("source", "a", 0, 0.4),
        record("source", "a", 0, 0.1, guard=True),
    ]


def test_guarded_runs_have_rows_of_their_own_and_names_if_one_likes() -> None:
    labels = ["source", "source (guard)", "tsd", 'tsd (norm="ema", guard)']
    assert [row.label for row in only(guarded()).rows] == labels
    assert cell(only(guarded()), "tsd", "iid").difference == pytest.approx(0.1)  # from the source without a guard
    named = only(guarded(), label=lambda s: "tsd, safe" if s.get("guard") and s["method"] == "tsd" else "")
    assert [row.label for row in named.rows] == [*labels[:3], "tsd, safe"]
    assert 'tsd, safe is tsd (norm="ema", guard)' in named.notes
    clash = only(guarded(), label=lambda s: "mine" if s["method"] == "tsd" else "")
    assert [row.label for row in clash.rows] == labels


def test_usual_tables_know_guards_too() -> None:
    (table,) = make_tables(guarded())
    assert [row.label for row in table.rows] == ["source", "source (guard)", "tsd", 'tsd (norm="ema", guard)']


def test_usual_tables_of_stress_records_have_one_for_each_scenario() -> None:
    found = make_tables(ordeals())
    assert len(found) == 2
    assert "disturb nan" in found[1].caption


def test_refused_batches_are_told() -> None:
    records = ordeals()
    records[-1]["results"]["refused"] = 3
    records[-2]["results"]["refused"] = 2
    assert "refused batches, counted as wrong: tsd 5" in only(records).notes


def test_masks_are_measured_by_dice() -> None:
    records = [
        {**record(m, "a", 0, 0.0), "results": {"dice": v, "per_structure": {}}}
        for m, v in (("source", 0.5), ("bn", 0.7))
    ]
    test = only(records)
    assert test.metric.name == "dice"
    near(cell(test, "bn", "iid"), 0.7, 0.2, 0.2, where="a, seed 0")


# Tables and pictures


def test_tables_for_every_form() -> None:
    accuracy, mean, lowest = only(ordeals()).tables()
    assert [column.name for column in accuracy.columns] == ["iid", "nan", "worst"]
    for table in (accuracy, mean, lowest):
        for form in FORMS:
            assert "tent" in render_table(table, form)
    text = render_table(accuracy, "terminal")
    rows = {
        line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith(("source", "tent", "tsd"))
    }
    assert rows["source"] == ["°45.0", "°45.0", "–"]
    assert rows["tent"] == ["*55.0", "30.0", "-15.0"]
    assert rows["tsd"] == ["°45.0", "*50.0", "*+0.0"] or rows["tsd"] == ["45.0", "*50.0", "*+0.0"]
    body = list(csv.DictReader(io.StringIO(render_table(lowest, "csv"))))
    assert [float(row["worst_mean"] or "nan") for row in body[1:]] == pytest.approx([-0.4, -0.1])
    assert float(body[1]["nan_mean"]) == pytest.approx(-0.4)
    body = list(csv.DictReader(io.StringIO(render_table(mean, "csv"))))
    assert float(body[1]["worst_mean"]) == pytest.approx(-0.15)


def test_heat_map_is_a_picture_and_a_drawing(tmp_path: Path) -> None:
    files = heatmap(only(ordeals()), tmp_path / "new" / "stress.png")
    assert [file.name for file in files] == ["stress.png", "stress.svg"]
    with Image.open(files[0]) as picture:
        assert min(picture.size) > 300
    assert ElementTree.parse(files[1]).getroot().tag.endswith("svg")
    first = files[1].read_bytes()
    assert "digits" in first.decode()


def colours(file: Path) -> Counter[str]:
    """How many shapes of a drawing have which colour; the two ends of the scale have one each."""
    parts = (part for part in file.read_text().split('style="') if part.startswith("fill: #"))
    return Counter(part.partition("fill: ")[2][:7] for part in parts)


def test_colours_are_centred_and_clipped(tmp_path: Path) -> None:
    """No difference is nearly white; 30 points and 60 are the same; gains are blue, losses red."""
    values = {"source": 0.5, "none": 0.5, "good": 0.8, "better": 1.0, "bad": 0.2, "worse": 0.0}
    records = [record(name, "a", 0, value) for name, value in values.items()]
    found = colours(heatmap(only(records), tmp_path / "stress.png")[1])
    assert found["#053061"] == found["#67001f"] == 5  # of each: two cells, two of the last column, an end of the scale
    assert found["#f6f7f7"] == 2
