"""Numbers worked out by hand; the forms read back by what reads them."""

import math
import re
from typing import Any

import pytest
from studies import cell, labels, near, only, record, row, study

from trueup.report.render import render_table
from trueup.report.tables import make_tables

ROOT2 = math.sqrt(2)


# Numbers


def test_cells_are_the_mean_and_the_sample_deviation_over_seeds() -> None:
    table = only(study())
    near(cell(table, "source", "a"), 0.6, 0.2, 3)
    near(cell(table, "tent", "b"), 0.7, 0.0, 2)
    near(cell(table, "tsd", "b"), 0.8, 0.1, 3)
    assert labels(table) == ["source", "tent", "tsd"]
    assert [c.name for c in table.columns] == ["a", "b", "average", "gain", "seconds"]


def test_average_takes_targets_within_a_seed_and_only_complete_seeds() -> None:
    table = only(study())
    near(cell(table, "source", "average"), (0.45 + 0.55 + 0.85) / 3, math.sqrt(0.13 / 3), 3)
    near(cell(table, "tent", "average"), 0.625, 0.05 / ROOT2, 2)  # 0.6, 0.65: seed 2 has no `b`
    near(cell(table, "tsd", "average"), 0.7, 0.05, 3)


def test_gain_pairs_seeds_and_targets() -> None:
    """Tent's seed 2 is incomplete; unpaired, its gain would be 0.625 - 0.6167."""
    table = only(study())
    near(cell(table, "tent", "gain"), 0.125, 0.05 / ROOT2, 2)  # 0.6 - 0.45, 0.65 - 0.55
    near(cell(table, "tsd", "gain"), (0.2 + 0.15 - 0.1) / 3, math.sqrt((49 + 16 + 121) / 9 / 2) / 20, 3)
    assert cell(table, "source", "gain") is None


def test_gain_needs_the_same_seeds_in_both_rows() -> None:
    runs = [
        record("source", "a", 0, 0.5),
        record("source", "a", 1, 0.7),
        record("bn", "a", 1, 0.8),
        record("bn", "a", 2, 1),
    ]
    near(cell(only(runs), "bn", "gain"), 0.1, None, 1)
    assert cell(only([runs[0], runs[3]]), "bn", "gain") is None


def test_source_models_of_several_seeds_are_runs_of_their_own() -> None:
    runs = [record("tsd", "a", 0, value, source={"seed": seed}) for seed, value in enumerate((0.5, 0.7))]
    near(cell(only(runs), "tsd", "a"), 0.6, 0.2 / ROOT2, 2)


def masks(method: str, target: str, dice: float | None, **changes: Any) -> dict[str, Any]:
    """A run of a segmenter."""
    return record(method, target, 0, 1.0, **{"results": {"dice": dice, "hd95": 4.0, "images": 8}, **changes})


def test_without_a_metric_masks_show_dice_and_classes_accuracy() -> None:
    """Each table for itself, though both are in one folder; a metric that is named holds for all."""
    eyes = [masks("source", "eye", 0.5, dataset="eyes"), masks("tsd", "eye", 0.75, dataset="eyes")]
    first, second = make_tables([*study(), *eyes])
    assert (first.metric.name, second.metric.name) == ("accuracy", "dice")
    near(cell(first, "tsd", "b"), 0.8, 0.1, 3)
    near(cell(second, "tsd", "eye"), 0.75, None, 1)
    near(cell(second, "tsd", "gain"), 0.25, None, 1)
    assert "| tsd" in render_table(second, "markdown")
    assert "75.0" in render_table(second, "markdown")
    near(cell(only(eyes, metric="hd95"), "source", "eye"), 4.0, None, 1)
    assert only(eyes, metric="accuracy").rows[0].cells[0] is None


def test_masks_of_which_one_run_failed_or_has_no_dice_still_show_dice() -> None:
    runs = [record("source", "eye", 0, None, dataset="eyes"), masks("bn", "eye", None, dataset="eyes")]
    table = only([*runs, masks("tsd", "eye", 0.75, dataset="eyes")])
    assert table.metric.name == "dice"
    assert cell(table, "bn", "eye") is None
    near(cell(table, "tsd", "eye"), 0.75, None, 1)


def test_missing_cell_takes_the_average_along() -> None:
    runs = [r for r in study() if (r["settings"]["method"], r["settings"]["target"]) != ("tent", "b")]
    table = only(runs)
    assert [cell(table, "tent", name) for name in ("b", "average", "gain")] == [None, None, None]
    assert re.search(r"tent +\*66\.7 ± 20\.8 +– +– +– +2\.00\n", render_table(table, "terminal"))
    assert "fewer than 3 seeds: tent has 0 on b" in table.notes


def test_cells_on_fewer_seeds_are_named() -> None:
    assert only(study()).notes == ("fewer than 3 seeds: tent has 2 on b",)


def test_one_seed_has_no_deviation() -> None:
    table = only([r for r in study() if r["settings"]["seed"] == 0])
    near(cell(table, "tsd", "a"), 0.6, None, 1)
    assert "±" not in render_table(table, "terminal").replace("no ±", "")
    assert "batch 64, seed 0." in table.caption
    assert "One seed per cell, so no ±." in table.caption


def test_seconds_are_the_mean_over_runs() -> None:
    runs = [record("tsd", t, s, 0.5, cost={"seconds": x}) for t, s, x in (("a", 0, 1.0), ("a", 1, 2.0), ("b", 0, 6.0))]
    near(cell(only(runs), "tsd", "seconds"), 3.0, None, 3)
    assert [c.name for c in only(runs, metric="seconds").columns] == ["a", "b", "average"]


def test_metric_a_record_lacks_is_missing_not_zero() -> None:
    runs = [record("tsd", "a", 0, 0.5), record("tsd", "a", 1, 0.5, cost={"peak_memory_mb": None})]
    near(cell(only(runs, metric="peak_memory_mb"), "tsd", "a"), 400.0, None, 1)


def test_zero_is_a_number() -> None:
    near(cell(only([record("tsd", "a", 0, 0.0), record("tsd", "a", 1, 1.0)]), "tsd", "a"), 0.5, 1 / ROOT2, 2)


def test_numbers_that_are_not_finite_pass_and_are_not_the_best() -> None:
    values = {"source": math.inf, "bn": 0.5, "tent": math.nan}
    table = only([record(m, "a", s, v) for m, v in values.items() for s in (0, 1)], metric="nll")
    assert [row.cells[0].mark for row in table.rows if row.cells[0]] == ["", "best", ""]
    assert r"$\infty$" in render_table(table, "latex")
    for form in ("terminal", "markdown", "latex", "csv"):
        assert "nan" in render_table(table, form)


# Groups, rows, columns


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 1},
        {"stream": "mixed"},
        {"stream_options": {"alpha": 0.1}},
        {"limit": 100},
        {"reset": True},
        {"network": "vit"},
        {"dataset": "pacs"},
        {"source": {"algorithm": "erm", "iterations": 301}},
        {"something": "new"},
    ],
)
def test_runs_that_differ_in_a_knob_are_never_averaged(changes: dict[str, Any]) -> None:
    both = make_tables([record("tsd", "a", 0, 0.5), record("tsd", "a", 1, 0.7, **changes), record("tsd", "a", 2, 0.9)])
    assert [round(row.cells[0].mean, 9) for t in both for row in t.rows if row.cells[0]] == [0.7, 0.7]
    assert [row.cells[0].n for t in both for row in t.rows if row.cells[0]] == [2, 1]
    assert both[0].title + both[0].caption.replace("seeds 0, 2", "") != both[1].title + both[1].caption


def test_caption_says_the_constant_knobs() -> None:
    text = only([record("tsd", "a", s, 0.5, stream_options={"alpha": 0.1}, limit=100) for s in (0, 10, 2)]).caption
    assert text.startswith(
        "Network digits-net, stream iid, stream_options (alpha 0.1), batch 64, limit 100, seeds 0, 2, 10."
    )
    assert "Source training: algorithm erm, iterations 300, same seeds." in text
    assert "± is the sample standard deviation over seeds." in text


def test_rows_of_one_method_are_labelled_with_what_differs() -> None:
    hypers = [{"lr": 1e-4, "norm": "batch", "k": 1}, {"lr": 1e-5, "norm": "batch", "k": 1}]
    runs = [record("tsd", "a", 0, 0.5, hyper=hyper) for hyper in hypers] + [record("bn", "a", 0, 0.5, hyper={"lr": 3})]
    assert labels(only(runs)) == ["tsd", "tsd (lr=1e-05)", "bn"]
    assert "tsd, unless its label says otherwise: lr=0.0001" in only(runs).notes
    more = record("tsd", "a", 0, 0.5, hyper=hypers[0] | {"norm": "source"})
    assert labels(only([*runs, more])) == [
        "tsd",
        "tsd (lr=1e-05)",
        'tsd (norm="source")',
        "bn",
    ]


def test_what_a_search_chose_makes_no_row() -> None:
    runs = [record("tsd", "a", 0, 0.4, hyper={"lr": 1.0, "k": 1})]
    for seed, lr in enumerate((0.1, 0.2)):
        for select in ("source", "oracle"):
            chosen = {"lr": lr}
            runs.append(record("tsd", "a", seed, 0.5, select=select, chosen=chosen, hyper={"lr": lr, "k": 1}))
    table = only(runs)
    assert labels(table) == ["tsd", "tsd (searched)", "tsd (oracle)"]
    near(cell(table, "tsd (searched)", "a"), 0.5, 0.0, 2)
    wider = record("tsd", "a", 0, 0.5, select="source", chosen={"lr": 1, "k": 2}, hyper={"lr": 1, "k": 2})
    assert labels(only([*runs, wider])) == ["tsd", "tsd (k=1, searched)", "tsd (oracle)", "tsd (searched)"]


def test_oracle_is_labelled_even_alone_and_never_marked() -> None:
    assert labels(only([record("tsd", "a", 0, 0.5, select="oracle")])) == ["tsd (oracle)"]
    runs = [record("source", "a", 0, 0.5), record("bn", "a", 0, 0.6), record("tent", "a", 0, 0.7)]
    table = only([*runs, record("tsd", "a", 0, 0.99, select="oracle")])
    assert [row.cells[0].mark for row in table.rows if row.cells[0]] == ["", "second", "best", ""]
    assert all(c is None or c.mark == "" for c in row(table, "tsd (oracle)").cells)
    assert any(note.startswith("oracle:") for note in table.notes)


def test_targets_in_the_order_asked_for() -> None:
    runs = [record("source", target, 0, 0.5) for target in "abc"]
    assert [c.name for c in only(runs, order=["c", "nowhere", "a"]).columns][:3] == ["c", "a", "b"]
    assert [c.name for c in only(runs).columns][:3] == ["a", "b", "c"]


def test_without_source_there_is_no_gain() -> None:
    table = only([record("tsd", "a", 0, 0.5)])
    assert [c.name for c in table.columns] == ["a", "average", "seconds"]
    assert table.notes == ("no gain: there is no run of source with these settings",)


# Marks


def marks(values: dict[str, float], **options: Any) -> list[str]:
    table = only([record(method, "a", 0, value) for method, value in values.items()], **options)
    return [row.cells[0].mark for row in table.rows if row.cells[0]]


def test_ties_as_printed_share_the_mark() -> None:
    values = {"source": 0.5, "bn": 0.70041, "tent": 0.69961, "tsd": 0.6, "pl": 0.6}
    assert marks(values) == ["", "best", "best", "second", "second"]


def test_lower_is_better_for_errors_and_costs() -> None:
    assert marks({"source": 0.3, "bn": 0.1, "tsd": 0.2}, metric="nll") == ["", "best", "second"]
    runs = [record("source", "a", 0, 0.5), record("bn", "a", 0, 0.5, cost={"seconds": 1.0, "images_per_second": 9})]
    seconds = [row.cells[-1] for row in only(runs).rows]
    assert [c.mark for c in seconds if c] == ["", ""], "noise in time makes no winner beside another metric"
    seconds = [row.cells[0] for row in only(runs, metric="seconds").rows]
    assert [c.mark for c in seconds if c] == ["", "best"], "the second of two is the last"
    speed = [row.cells[0] for row in only(runs, metric="images_per_second").rows]
    assert [c.mark for c in speed if c] == ["best", ""]


def test_gain_of_an_error_is_best_when_most_negative() -> None:
    table = only([record(m, "a", 0, v) for m, v in {"source": 0.5, "bn": 0.4, "tsd": 0.2}.items()], metric="nll")
    found = cell(table, "tsd", "gain")
    assert found is not None
    assert (round(found.mean, 9), found.mark) == (-0.3, "best")


def test_a_single_row_is_not_the_best_of_anything() -> None:
    assert marks({"tsd": 0.5}) == [""]


# Records that need a word


def test_failures_are_listed_and_not_counted() -> None:
    runs = [*study(), *(record("tent", "b", seed, None) for seed in (2, 3)), record("eata", "a", 0, None)]
    table = only(runs)
    assert table.notes[0] == "failed runs (3): tent on b (seed 2, 3); eata on a (seed 0)"
    assert "failed runs (3)" in render_table(table, "terminal")
    near(cell(table, "tent", "b"), 0.7, 0.0, 2)
    assert labels(table) == ["source", "tent", "tsd"]


def test_target_that_failed_everywhere_stays_a_column() -> None:
    table = only([*study(), record("source", "c", 0, None)])
    assert cell(table, "source", "c") is None
    assert cell(table, "source", "average") is None


def test_group_of_failures_alone_is_a_table_of_notes() -> None:
    first, second = make_tables([*study(), record("tsd", "a", 0, None, batch=1)])
    assert len(first.rows) == 3
    assert (second.rows, second.notes) == ((), ("failed runs (1): tsd on a (seed 0)",))
    assert second.caption == "Network digits-net, stream iid, batch 1. Source training: algorithm erm, iterations 300."
    for form in ("terminal", "markdown", "latex", "csv"):
        assert render_table(second, form)


def test_last_record_of_an_id_counts() -> None:
    runs = [record("tsd", "a", 0, None, id="x"), record("tsd", "a", 1, 0.2, id="y"), record("tsd", "a", 0, 0.4, id="x")]
    table = only(runs)
    near(cell(table, "tsd", "a"), 0.3, 0.1 * ROOT2, 2)
    assert not any("failed" in note for note in table.notes)


def test_repeated_and_broken_runs_and_environments_are_named() -> None:
    runs = [record("tsd", "a", 0, 0.2, id="x", environment={"threads": 1, "torch": "2"})]
    runs += [record("tsd", "a", 0, 0.4, id="y", environment={"threads": 2, "torch": "2"})]
    runs[1]["results"]["broken"] = 3
    table = only(runs)
    near(cell(table, "tsd", "a"), 0.4, None, 1)
    assert table.notes[1:] == (
        "runs with images that could not be read (1): tsd on a (seed 0)",
        "runs repeated with the same settings (1): the last counts",
        "environments differ in threads (1, 2); costs may not compare",
    )


def test_no_records_and_unknown_names_say_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"no finished runs; run `trueup bench` first$"):
        make_tables([])
    with pytest.raises(ValueError, match=r"no finished runs; .*failed runs \(1\): tsd on a"):
        make_tables([record("tsd", "a", 0, None)])
    with pytest.raises(ValueError, match=r"did you mean 'accuracy'.*nll.*peak_memory_mb"):
        make_tables(study(), metric="acuracy")
    with pytest.raises(ValueError, match=r"did you mean 'markdown'.*terminal.*csv"):
        render_table(only(study()), "markdwn")
