"""The page of records with gaps: what it says where runs failed, numbers are NaN, or names are those of columns."""

import re
from typing import Any

import pytest
from pages import cells, figures, read, sweeps
from studies import cell, only, record

from trueup.report.chart_marks import HATCHES
from trueup.report.figure_spec import Axis, BarPanel, Curve, FigureSpec
from trueup.report.page import render_page
from trueup.report.palette import MARKERS, OUTLINES

NAN = float("nan")


def runs_of(values: dict[str, dict[str, tuple[float | None, ...]]]) -> list[dict[str, Any]]:
    """Of each method, by target, the accuracy by seed; None: the run failed."""
    return [
        record(method, target, seed, value)
        for method, targets in values.items()
        for target, row in targets.items()
        for seed, value in enumerate(row)
    ]


def said(runs: list[dict[str, Any]]) -> list[str]:
    """The sentences under the title."""
    lede = render_page(runs, [], title="x").split('class="lede">')[1].split("</div>")[0]
    return [re.sub(r"<[^>]+>", "", paragraph) for paragraph in re.findall(r"<p>(.*?)</p>", lede)]


# The headline


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"source": {"a": (0.5,), "b": (None,)}, "tsd": {"a": (0.7,), "b": (0.7,)}},
            "Only tsd has a seed with every target, so there is nothing to compare.",
        ),
        ({"tsd": {"a": (0.7,), "b": (0.7,)}}, "There is one method only, so nothing to compare."),
        (
            {"source": {"a": (0.5,), "b": (None,)}, "tsd": {"a": (0.7,), "b": (None,)}},
            "No method has a seed with every target, so there is no average to compare.",
        ),
        (
            {"source": {"a": (NAN,)}, "tsd": {"a": (NAN,)}},
            "No average can be compared: each is NaN, or an oracle's.",
        ),
        (
            {"source": {"a": (NAN,)}, "tsd": {"a": (0.5,)}},
            "Only tsd has an average that can be compared, so there is nothing to compare.",
        ),
        (
            {"source": {"a": (0.5, None)}, "bn": {"a": (0.6, 0.6)}, "tsd": {"a": (None, 0.7)}},
            "Best on average is tsd (1 of 2 seeds) with 70.0 % accuracy; no seed in common with source has every "
            "target, so there is no gain. ",
        ),
        (
            {"source": {"a": (0.5, 0.5, None)}, "tsd": {"a": (0.8, 0.7, 0.9)}},
            "Best on average is tsd with 80.0 ± 10.0 % accuracy, +25.0 ± 7.1 points over the frozen source "
            "(2 of 3 seeds).",
        ),
        (
            {"source": {"a": (0.5, None, None)}, "tsd": {"a": (0.8, 0.7, 0.9)}},
            "Best on average is tsd with 80.0 ± 10.0 % accuracy, +30.0 points over the frozen source "
            "(one of 3 seeds, so the deviation is not known).",
        ),
        (
            {"source": {"a": (0.5, 0.9)}, "tsd": {"a": (0.6, None)}},
            "Best on average is source with 70.0 ± 28.3 % accuracy; in the seeds that both have, some method gains "
            "over it.",
        ),
        (
            {"source": {"a": (NAN, NAN)}, "bn": {"a": (0.6, 0.6)}, "tsd": {"a": (0.7, 0.7)}},
            "Best on average is tsd with 70.0 ± 0.0 % accuracy; its gain over the frozen source is NaN.",
        ),
    ],
)
def test_the_headline_says_no_more_than_the_runs_do(values: Any, sentence: str) -> None:
    assert said(runs_of(values))[1].startswith(sentence.strip())


def test_a_lead_of_two_rows_is_doubted_as_well() -> None:
    assert (
        "Its lead over bn (65.0 ± 7.1) is within"
        in said(runs_of({"bn": {"a": (0.6, 0.7)}, "tsd": {"a": (0.66, 0.68)}}))[1]
    )


def test_what_records_do_not_say_is_not_called_none() -> None:
    runs = runs_of({"source": {"a": (0.5,)}, "tsd": {"a": (0.6,)}})
    del runs[0]["settings"]["network"], runs[1]["settings"]["source"]
    first, *rest = said(runs)
    assert first == "2 runs of 2 methods on digits (1 target, 1 seed) with digits-net."
    assert all(sentence[0].isupper() for sentence in rest)
    document = render_page(runs, [], title="x")
    assert "Source training: ." not in document
    assert "Source training: algorithm erm" in document


# Notes and marks


def test_numbers_that_are_none_are_noted_on_top() -> None:
    runs = runs_of({"source": {"a": (0.5, NAN)}, "tsd": {"a": (0.6, 0.7)}})
    (alerts,) = read(render_page(runs, [], title="x")).all("section", class_="alerts")
    assert "accuracy is NaN in 1 run, and so is each mean over them" in alerts.text


def test_one_note_for_records_that_do_not_say_where_they_ran() -> None:
    many = {f"library{i}": "1" for i in range(17)}
    runs = [record("tsd", "a", seed, 0.5, environment=many if seed else {}) for seed in range(3)]
    runs.append(record("tsd", "a", 3, 0.5, environment=many | {"library0": "2"}))
    assert only(runs).notes[-2:] == (
        "some records (1) do not say where they ran",
        "environments differ in library0 (1, 2); costs may not compare",
    )


def test_the_worse_of_two_is_not_second_best() -> None:
    two = only(runs_of({"source": {"a": (0.5,)}, "bn": {"a": (0.4,)}, "tsd": {"a": (0.6,)}}))
    marks = {label: [cell(two, label, name) for name in ("a", "gain")] for label in ("source", "bn", "tsd")}
    assert [each.mark if each else None for row in marks.values() for each in row] == [
        *("second", None),
        *("", ""),
        *("best", "best"),
    ]


@pytest.mark.parametrize("name", ["all", "average", "gain", "seconds"])
def test_a_target_may_have_the_name_of_a_column(name: str) -> None:
    runs = runs_of({"source": {name: (0.9,), "b": (0.1,)}, "tsd": {name: (0.5,), "b": (0.9,)}})
    assert "Best on average is tsd with 70.0 % accuracy, +20.0 points" in said(runs)[1]
    root = read(render_page(runs, [], title="x", against=runs))
    for table in root.all("table", class_="numbers"):
        heads = [th for th in table.all("th", scope="col") if "data-target" in th.attributes]
        assert [th.attributes["data-target"] for th in heads] == [name, "b"]
        assert not any("class" in th.attributes for th in heads)
    shown = next(root.all("table", class_="numbers"))
    assert [b.text for b in shown.all("b")] == ["90.0", "90.0", "70.0"]  # each target's best, and the average's


# Comparison


def test_sweeps_that_differ_in_a_setting_say_which() -> None:
    mine = [record("tsd", "a", seed, 0.6, code={"x": 1}) for seed in (0, 1)]
    other = [record("tsd", "a", seed, 0.6, batch=16, code={"x": 2}) for seed in (0, 1)]
    for run in other:
        run["settings"]["source"] = {**run["settings"]["source"], "algorithm": "swad", "iterations": None}
    root = read(render_page(mine, [], title="x", against=other, names=("new", "old")))
    verdict = next(next(root.all("section", id="comparison")).all("p")).text
    assert (
        "nothing to compare. They differ in batch (new: 64; old: 16), source algorithm (new: erm; old: swad)" in verdict
    )
    assert verdict.endswith(" and source iterations (new: 300; old: none).")
    assert "code" not in verdict
    assert "seed (" not in verdict


def test_failures_of_pairs_say_in_which_sweep() -> None:
    mine, other = sweeps()
    mine += [record("pl", "b", 0, None), record("bn", "b", 0, 0.5)]
    other += [record("pl", "b", 0, None), record("bn", "b", 0, None)]
    root = read(render_page(mine, [], title="x", against=other, names=("new", "old")))
    (section,) = root.all("section", id="comparison")
    lists = {d.children[0].text: [li.text for li in d.all("li")] for d in section.all("details")}
    assert lists[" in both, but failed in new1 run"] == ["bn on digits/a, seed 0"]
    assert lists[" in both, but failed in old1 run"] == ["bn on digits/b, seed 0"]
    assert lists[" in both, but failed in both1 run"] == ["pl on digits/b, seed 0"]


# Figures


def test_bars_of_many_rows_are_told_apart_without_colour() -> None:
    """The ninth and the first have one colour; of the first nine every bar is hatched in its own way."""
    curves = tuple(Curve(f"m{i}", (0,), (50.0,)) for i in range(20))
    root = read(
        render_page(
            [record("tsd", "a", 0, 0.5)],
            [FigureSpec("x", "", "", (BarPanel("", Axis("", ("a",)), Axis(""), curves),), 1)],
            title="x",
        )
    )
    (figure,) = root.all("figure")
    (chart,) = figure.all("div", role="img")

    def looks(groups: Any) -> list[tuple[str, ...]]:
        return [(g.attributes["style"], *(p.attributes.get("fill", "") for p in g.all("path"))) for g in groups]

    bars = looks(chart.all("g", class_="series"))
    assert len(set(bars)) == 20
    assert len({look[1:] for look in bars[:9]}) == 9
    assert looks(next(figure.all("div", class_="keys")).all("g")) == bars
    patterns = {f"url(#{pattern.attributes['id']})" for pattern in root.all("pattern")}
    assert {fill for look in bars for fill in look[1:] if fill} == patterns
    assert set(MARKERS) - set(HATCHES) == {"o"}


def test_structures_have_the_colours_of_the_files() -> None:
    root = read(render_page([record("tsd", "a", 0, 0.5)], figures()[-1:], title="x"))
    (key,) = next(root.all("div", class_="keys")).all("g")
    assert key.attributes["style"] == f"--c:{OUTLINES[0]}"


def test_a_whole_table_is_copied_and_the_button_says_so() -> None:
    (copy,) = read(render_page([record("tsd", "a", 0, 0.5)], [], title="x")).all("div", class_="copy")
    assert cells(copy) == []
    assert copy.text.startswith("Copy whole table as")
