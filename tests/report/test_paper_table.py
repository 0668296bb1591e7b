"""Ours beside the paper's: averages by hand, in the paper's units; what is missing is not there."""

import math
from typing import Any

import pytest

from trueup.bench.records import Entry
from trueup.report.paper_table import compare_with_paper, values_of
from trueup.report.render import render_table


def record(name: str, seed: int, **values: Any) -> dict[str, Any]:
    cost = {key: values.pop(key) for key in ("seconds", "peak_memory_mb") if key in values}
    return {"id": name, "settings": {"seed": seed}, "results": values or {"images": 1}, "cost": cost}


RECORDS = [
    record("a0", 0, accuracy=0.5), record("b0", 0, accuracy=0.7),
    record("a1", 1, accuracy=0.4), record("b1", 1, accuracy=0.7),
    record("c0", 0, accuracy=0.9), record("c1", 1, accuracy=0.8),
    record("d0", 0, seconds=3.0, peak_memory_mb=2048.0), record("e0", 0, seconds=4.5, peak_memory_mb=1024.0),
]  # fmt: skip
FOUND = {r["id"]: r for r in RECORDS}
A = Entry(paper=61.25, deviation=0.5, runs=((0, "a0"), (0, "b0"), (1, "a1"), (1, "b1")))
B = Entry(paper=80.5, runs=((0, "c0"), (1, "c1")))
ENTRIES = {("tsd", "A"): A, ("tsd", "B"): B, ("tsd", "Avg"): Entry(paper=70.9, parts=("A", "B"))}


def test_targets_of_a_seed_are_averaged_then_seeds() -> None:
    assert values_of(("tsd", "A"), ENTRIES, FOUND) == pytest.approx({0: 60.0, 1: 55.0})
    assert values_of(("tsd", "Avg"), ENTRIES, FOUND) == pytest.approx({0: 75.0, 1: 67.5})


def test_a_seed_that_lacks_a_target_does_not_count() -> None:
    assert values_of(("tsd", "A"), ENTRIES, {k: v for k, v in FOUND.items() if k != "b1"}) == pytest.approx({0: 60.0})
    fewer = {k: v for k, v in FOUND.items() if k != "c0"}
    assert values_of(("tsd", "Avg"), ENTRIES, fewer) == pytest.approx({1: 67.5})


def test_seconds_are_summed_and_memory_is_in_gigabytes() -> None:
    runs = ((0, "d0"), (0, "e0"))
    entries = {("x", "t"): Entry(runs=runs, metric="seconds"), ("x", "m"): Entry(runs=runs, metric="peak_memory_mb")}
    assert values_of(("x", "t"), entries, FOUND) == {0: 7.5}
    assert values_of(("x", "m"), entries, FOUND) == {0: 1.5}


def test_table_has_ours_the_papers_and_the_difference() -> None:
    entries = {**ENTRIES, **{("PCL", column): Entry(paper=50.0) for column in ("A", "B", "Avg")}}
    table = compare_with_paper("A title", entries, RECORDS, notes=["a note"], literature=["PCL"])
    assert [c.name for c in table.columns[:3]] == ["A ours", "A paper", "A difference"]
    ours, paper, difference = table.rows[0].cells[:3]
    assert ours is not None
    assert paper is not None
    assert difference is not None
    assert (ours.mean, ours.std, ours.n) == (pytest.approx(57.5), pytest.approx(math.sqrt(12.5)), 2)
    assert (paper.mean, paper.std) == (61.25, 0.5)
    assert difference.mean == pytest.approx(-3.75)
    assert table.rows[1].cells[0] is None
    text = render_table(table, "terminal")
    for printed in (
        "57.50 ± 3.54",
        "61.25 ± 0.50",
        "-3.75",
        "80.5",
        "literature, as the paper prints it: PCL",
        "a note",
    ):
        assert printed in text
    assert "cells are empty" not in text


def test_empty_cells_are_counted() -> None:
    text = render_table(compare_with_paper("t", ENTRIES, []), "terminal")
    assert "3 of our cells are empty" in text
    assert "61.25" in text


def test_columns_that_the_paper_has_no_number_of_are_ours_alone() -> None:
    table = compare_with_paper("t", {("tsd", "A"): A._replace(paper=None, deviation=None)}, RECORDS)
    assert [c.name for c in table.columns] == ["A ours"]


def test_counts_are_whole_numbers() -> None:
    table = compare_with_paper("t", {("SUN09", "3"): Entry(paper=30.0, counted=31.0)}, [])
    text = render_table(table, "markdown")
    assert "| SUN09  |     31 |      30 |" in text
    assert "+1 |" in text
    assert "Numbers of images" in text


def test_a_failed_run_is_a_missing_one() -> None:
    failed = [{**r, "results": {}} if r["id"] == "c0" else r for r in RECORDS]
    found = {r["id"]: r for r in failed if r["results"]}
    assert values_of(("tsd", "B"), ENTRIES, found) == pytest.approx({1: 80.0})


def test_doubts_are_said() -> None:
    other = [{**r, "environment": {"device": "A6000" if r["id"].endswith("0") else "cpu"}} for r in RECORDS]
    other[0] = {**other[0], "results": {"accuracy": 0.5, "broken": 7}, "settings": {"seed": 0, "method": "tsd"}}
    text = " ".join(render_table(compare_with_paper("t", ENTRIES, other), "terminal").split())
    assert "environments differ in device (cpu, A6000)" in text
    assert "could not be read (1)" in text


def test_cells_with_fewer_seeds_are_counted() -> None:
    table = compare_with_paper("t", ENTRIES, [r for r in RECORDS if r["id"] != "c1"])
    assert "2 of our cells have fewer than 2 seeds" in table.notes  # B, and the average


def test_seconds_say_that_they_are_sums() -> None:
    table = compare_with_paper("t", {("x", "t"): Entry(runs=((0, "d0"),), metric="seconds")}, RECORDS)
    assert table.caption.startswith("Seconds, all targets of a seed together.")
