"""Numbers worked out by hand; the forms read back by what reads them."""

import csv
import math
import re
from typing import Any

import pytest

from trueup.report.render import render
from trueup.report.tables import Cell, Row, Table, tables

ROOT2 = math.sqrt(2)
WIDE = ["gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"]
WIDE += ["snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"]


def record(method: str, target: str, seed: int, value: float | None, **changes: Any) -> dict[str, Any]:
    """A run; `changes` are settings, except for `chosen`, `cost`, `environment`, `results` and `id`."""
    settings = {
        "dataset": "digits",
        "target": target,
        "network": "digits-net",
        "method": method,
        "hyper": {},
        "seed": seed,
        "stream": "iid",
        "stream_options": {},
        "batch": 64,
        "limit": None,
        "reset": False,
        "select": "default",
        "source": {"algorithm": "erm", "iterations": 300, "target": target, "seed": seed},
    }
    rest = {name: changes.pop(name) for name in ("id", "chosen", "cost", "environment", "results") if name in changes}
    settings |= changes
    run = {"id": repr(sorted(settings.items())), "settings": settings, "chosen": None}
    run["cost"] = {"seconds": 2.0, "images_per_second": 480.0, "peak_memory_mb": 400.0}
    run |= {"error": "RuntimeError: boom"} if value is None else {"results": {"accuracy": value, "nll": value}}
    return run | rest


def study() -> list[dict[str, Any]]:
    """Two targets, three methods; tent has not finished `b` with seed 2."""
    values = {
        "tent": {"a": (0.5, 0.6, 0.9), "b": (0.7, 0.7)},
        "source": {"a": (0.4, 0.6, 0.8), "b": (0.5, 0.5, 0.9)},
        "tsd": {"a": (0.6, 0.6, 0.6), "b": (0.7, 0.8, 0.9)},
    }
    return [
        record(method, target, seed, value)
        for method, at in values.items()
        for target, row in at.items()
        for seed, value in enumerate(row)
    ]


def row(table: Table, label: str) -> Row:
    return next(row for row in table.rows if row.label == label)


def cell(table: Table, label: str, column: str) -> Cell | None:
    return row(table, label).cells[[c.name for c in table.columns].index(column)]


def labels(table: Table) -> list[str]:
    return [row.label for row in table.rows]


def only(records: list[dict[str, Any]], **options: Any) -> Table:
    (table,) = tables(records, **options)
    return table


def near(found: Cell | None, mean: float, std: float | None, n: int) -> None:
    assert found is not None
    assert (found.mean, found.n) == (pytest.approx(mean, abs=1e-12), n)
    assert found.std == (None if std is None else pytest.approx(std, abs=1e-12))


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


def test_missing_cell_takes_the_average_along() -> None:
    runs = [r for r in study() if (r["settings"]["method"], r["settings"]["target"]) != ("tent", "b")]
    table = only(runs)
    assert [cell(table, "tent", name) for name in ("b", "average", "gain")] == [None, None, None]
    assert re.search(r"tent +\*66\.7 ± 20\.8 +– +– +– +2\.00\n", render(table, "terminal"))
    assert "fewer than 3 seeds: tent has 0 on b" in table.notes


def test_cells_on_fewer_seeds_are_named() -> None:
    assert only(study()).notes == ("fewer than 3 seeds: tent has 2 on b",)


def test_one_seed_has_no_deviation() -> None:
    table = only([r for r in study() if r["settings"]["seed"] == 0])
    near(cell(table, "tsd", "a"), 0.6, None, 1)
    assert "±" not in render(table, "terminal").replace("no ±", "")
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
    assert [row.cells[0].mark for row in table.rows if row.cells[0]] == ["second", "best", ""]
    assert r"$\infty$" in render(table, "latex")
    for form in ("terminal", "markdown", "latex", "csv"):
        assert "nan" in render(table, form)


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
    both = tables([record("tsd", "a", 0, 0.5), record("tsd", "a", 1, 0.7, **changes), record("tsd", "a", 2, 0.9)])
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
    assert "tsd, where its label says nothing else: lr=0.0001" in only(runs).notes
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
    assert [c.mark for c in seconds if c] == ["second", "best"]
    speed = [row.cells[0] for row in only(runs, metric="images_per_second").rows]
    assert [c.mark for c in speed if c] == ["best", "second"]


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
    assert "failed runs (3)" in render(table, "terminal")
    near(cell(table, "tent", "b"), 0.7, 0.0, 2)
    assert labels(table) == ["source", "tent", "tsd"]


def test_target_that_failed_everywhere_stays_a_column() -> None:
    table = only([*study(), record("source", "c", 0, None)])
    assert cell(table, "source", "c") is None
    assert cell(table, "source", "average") is None


def test_group_of_failures_alone_is_a_table_of_notes() -> None:
    first, second = tables([*study(), record("tsd", "a", 0, None, batch=1)])
    assert len(first.rows) == 3
    assert (second.rows, second.notes) == ((), ("failed runs (1): tsd on a (seed 0)",))
    assert second.caption == "Network digits-net, stream iid, batch 1. Source training: algorithm erm, iterations 300."
    for form in ("terminal", "markdown", "latex", "csv"):
        assert render(second, form)


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
        tables([])
    with pytest.raises(ValueError, match=r"no finished runs; .*failed runs \(1\): tsd on a"):
        tables([record("tsd", "a", 0, None)])
    with pytest.raises(ValueError, match=r"did you mean 'accuracy'.*nll.*peak_memory_mb"):
        tables(study(), metric="acuracy")
    with pytest.raises(ValueError, match=r"did you mean 'markdown'.*terminal.*csv"):
        render(only(study()), "markdwn")


# Forms


def awkward() -> Table:
    """Two variants with every sign that a form might trip over."""
    runs = [record("source", "a_b|c", s, 0.5, dataset="50% & #1") for s in (0, 1)]
    for norm in ("a|b*<", "c_d%&#${}~^\\"):
        runs += [record("tsd", "a_b|c", s, 0.6 + s / 10, hyper={"norm": norm}, dataset="50% & #1") for s in (0, 1)]
    return only(runs)


def test_csv_reads_back_to_the_same_numbers() -> None:
    for table in (only(study()), awkward()):
        lines = list(csv.DictReader(render(table, "csv").splitlines()))
        assert [line["label"] for line in lines] == labels(table)
        for line, at in zip(lines, table.rows, strict=True):
            for column, found in zip(table.columns, at.cells, strict=True):
                mean, std, n = (line[f"{column.name}_{part}"] for part in ("mean", "std", "n"))
                read = Cell(float(mean), float(std) if std else None, int(n), found.mark) if found and mean else None
                assert read == found
                assert found or (mean, std, n) == ("", "", "0")


def test_markdown_is_a_table() -> None:
    for table in (only(study()), awkward()):
        lines = [line for line in render(table, "markdown").splitlines() if line.startswith("|")]
        assert len(lines) == 2 + len(table.rows)
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(table.columns) + 2}
        assert len({len(line) for line in lines}) == 1
        assert re.fullmatch(r"\|-+(\|-+:)+\|", lines[1])
    text = render(only(study()), "markdown")
    assert "**80.0** ± 10.0" in text
    assert "<u>70.0</u> ± 0.0" in text
    assert r"a\|b\*\<" in render(awkward(), "markdown")


def test_latex_is_balanced_and_escaped() -> None:
    wide = only([record(m, t, 0, 0.5 + i / 10) for i, m in enumerate(("source", "tsd")) for t in WIDE])
    for table in (only(study()), awkward(), wide):
        text = render(table, "latex")
        bare = re.sub(r"\\[\\{}$&#%_]", "", text)
        assert bare.count("{") == bare.count("}")
        assert bare.count("$") % 2 == 0
        assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text)[::-1]
        body = text[text.index(r"\toprule") : text.index(r"\bottomrule")].splitlines()
        rows = [line for line in body if "&" in line]
        assert len(rows) == 1 + len(table.rows)
        assert {len(re.findall(r"(?<!\\)&", line)) for line in rows} == {len(table.columns)}
        assert all(line.endswith(r" \\") for line in rows)
        assert rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}" in text
        assert (r"\resizebox" in text) == (table is wide)
    text = render(awkward(), "latex")
    assert r"\caption{50\% \& \#1: accuracy in \%," in text
    assert r"a\_b$|$c" in text
    assert r"norm=``c\_d\%\&\#\$\{\}\textasciitilde{}\textasciicircum{}" in text
    text = render(only(study()), "latex")
    assert r"\textbf{80.0} $\pm$ 10.0" in text
    assert r"\underline{70.0} $\pm$ 0.0" in text
    assert r" & -- & " in text
    assert r"\textbf{$+$12.5} $\pm$ 3.5" in text


def test_terminal_lines_up() -> None:
    lines = render(only(study()), "terminal").splitlines()
    assert lines[2:7] == [
        "method            a            b      average          gain  seconds",
        "────────────────────────────────────────────────────────────────────",
        "source °60.0 ± 20.0  63.3 ± 23.1  61.7 ± 20.8      –            2.00",
        "tent   *66.7 ± 20.8 °70.0 ±  0.0 °62.5 ±  3.5 *+12.5 ±  3.5     2.00",
        "tsd    °60.0 ±  0.0 *80.0 ± 10.0 *70.0 ±  5.0  °+8.3 ± 16.1     2.00",
    ]


def test_terminal_has_codes_only_when_asked() -> None:
    table = only(study())
    plain, styled = render(table, "terminal"), render(table, "terminal", color=True)
    assert "\x1b" not in plain
    assert "\x1b[1m80.0\x1b[0m ± 10.0" in styled
    assert "\x1b[4m70.0\x1b[0m ±  0.0" in styled
    bare = re.sub(r"\x1b\[\d+m", "", styled)
    numbers = [re.sub("[*°]", " ", line) for line in plain.splitlines()[:7]]
    assert bare.splitlines()[:7] == numbers


@pytest.mark.parametrize("width", [60, 100, 400])
def test_wide_tables_continue_below(width: int) -> None:
    runs = [record(m, t, s, 0.5 + s / 50) for m in ("source", "tent", "tsd") for t in WIDE for s in range(3)]
    text = render(only(runs), "terminal", width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("\ntsd ") == text.count("─\n") == {60: 5, 100: 3, 400: 1}[width]
    assert text.count("52.0 ± 2.0") == 3 * (15 + 1)
    assert "gaussian_ " in text  # its cells are narrower


def test_terminal_keeps_to_any_width() -> None:
    table = only(study())
    for width in range(40, 80):
        text = render(table, "terminal", width=width)
        assert max(map(len, text.splitlines())) <= width
        assert text.count("─\n") == 1 or width < 68
