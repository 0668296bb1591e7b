"""The page's document and numbers, read by a parser."""

import base64
import hashlib
import re
from typing import Any

import pytest
from pages import cells, data, every, figures, read
from studies import record, study

from trueup.report.metrics import METRICS
from trueup.report.page import render_page
from trueup.report.render import render_table
from trueup.report.tables import make_tables


def test_the_document_is_whole_and_asks_for_nothing() -> None:
    root = read(render_page(study(), figures(), title="A study"))
    (html,) = root.all("html")
    assert html.attributes["lang"] == "en"
    assert next(root.all("title")).text == "A study"
    ids = [node.attributes["id"] for node in every(root) if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for node in every(root):
        for name in ("src", "href", "action", "data", "poster", "srcset", "xlink:href"):
            assert node.attributes.get(name, "#").startswith(("#", "data:")), node.name
        if node.attributes.get("href", "").startswith("#"):
            assert node.attributes["href"][1:] in ids
        for said in ("aria-labelledby", "aria-controls"):
            assert node.attributes.get(said, ids[0]) in ids
    (style,) = root.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text


def test_the_policy_allows_this_script_and_nothing_from_outside() -> None:
    root = read(render_page(study(), [], title="A study"))
    policy = next(root.all("meta", **{"http-equiv": "Content-Security-Policy"})).attributes["content"]
    (script,) = (node for node in root.all("script") if "type" not in node.attributes)
    digest = base64.b64encode(hashlib.sha256(script.own.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert "connect-src" not in rules
    assert rules["img-src"] == "data:"


def test_landmarks_headings_and_scopes() -> None:
    root = read(render_page(study(), figures(), title="A study"))
    assert [len(list(root.all(name))) for name in ("main", "nav", "h1", "footer")] == [1, 1, 1, 1]
    assert [node.text for node in root.all("h2")] == ["Results", "Figures", "Runs"]
    assert all(node.attributes.get("scope") in ("row", "col") for node in root.all("th"))
    assert next(root.all("a")).attributes == {"class": "skip", "href": "#main"}
    named = list(root.all("div", role="img"))
    assert len(named) == 7
    assert all(node.attributes["aria-label"] for node in named)
    assert all("tabindex" in node.attributes for node in named[:5])  # pictures have no values to read


def test_tables_are_those_of_the_report_in_every_metric() -> None:
    """The view on the page, and the packed ones of all metrics with their forms."""
    runs = study()
    root = read(render_page(runs, [], title="A study"))
    packed = data(root, "views-data")["0"]
    assert set(packed) == {"accuracy", "nll", "seconds", "images_per_second", "peak_memory_mb"}
    shown = next(root.all("article"))
    assert next(shown.all("h3")).text == next(read(packed["accuracy"]["view"]).all("h3")).text
    for name, view in packed.items():
        (table,) = make_tables(runs, metric=name)
        head, *rows = cells(next(read(view["view"]).all("table")))
        assert head == ["method", *(column.name for column in table.columns)]
        for row, line in zip(table.rows, rows, strict=True):
            texts = [c.text(cell) if cell else ("–", "") for c, cell in zip(table.columns, row.cells, strict=True)]
            assert line == [row.label, *(f"{a} ± {b}" if b else a for a, b in texts)]
        assert {form: view[form] for form in ("markdown", "latex", "csv")} == {
            form: render_table(table, form) for form in ("markdown", "latex", "csv")
        }
    assert cells(next(shown.all("table"))) == cells(next(read(packed["accuracy"]["view"]).all("table")))


def test_best_and_second_are_marked_by_more_than_colour() -> None:
    root = read(render_page(study(), [], title="A study"))
    rows = {row.children[0].text: row.children[3] for row in next(root.all("tbody")).children}  # average
    assert next(rows["tsd"].all("b")).text == "70.0"
    assert next(rows["tsd"].all("span")).text.strip() == "best"
    assert next(rows["tent"].all("u")).text == "62.5"
    assert not [*rows["source"].all("b"), *rows["source"].all("u")]


def test_the_headline_says_who_is_best_and_that_it_may_be_luck() -> None:
    """Tsd gains 0.2, 0.15 and -0.1 in the three seeds: 8.3 ± 16.1 points."""
    (lede,) = read(render_page(study(), [], title="A study")).all("div", class_="lede")
    first, second = (" ".join(p.text.split()) for p in lede.all("p"))
    assert first == "17 runs of 3 methods on digits (2 targets, 3 seeds) with digits-net."
    assert next(lede.all("strong")).text == "tsd"
    assert "70.0 ± 5.0 % accuracy, +8.3 ± 16.1 points over the frozen source – within the deviation" in second


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"source": (0.5, 0.5), "tsd": (0.8, 0.7)}, "+25.0 ± 7.1 points over the frozen source."),
        ({"source": (0.9, 0.9), "tsd": (0.8, 0.7)}, "; no method gains over the frozen source."),
        ({"source": (0.5,), "tsd": (0.7,)}, "+20.0 points over the frozen source (one seed, so"),
        ({"bn": (0.6, 0.6), "tsd": (0.7, 0.7)}, "; there is no run of source to compare with."),
        ({"source": (0.1, 0.1), "bn": (0.6, 0.7), "tsd": (0.66, 0.68)}, "Its lead over bn (65.0 ± 7.1) is within"),
        ({"tsd": (0.7, 0.7)}, "There is one method only"),
        (
            {"source": (0.1, 0.1), "bn": (0.7, 0.7), "tsd": (0.7, 0.7)},
            "Best on average are bn and tsd with 70.0 ±",
        ),
    ],
)
def test_the_headline_by_case(values: dict[str, tuple[float, ...]], said: str) -> None:
    runs = [record(method, "a", seed, v) for method, row in values.items() for seed, v in enumerate(row)]
    (lede,) = read(render_page(runs, [], title="A study")).all("div", class_="lede")
    own = re.sub(r"<[^>]+>", "", render_page(runs, [], title="A study").split('class="lede">')[1].split("</div>")[0])
    assert said in own
    assert len(list(lede.all("p"))) == 2


def test_several_groups_have_a_sentence_each_and_many_a_tally() -> None:
    def some(n: int) -> list[dict[str, Any]]:
        return [
            record(method, "a", 0, value, batch=batch)
            for batch in range(1, n + 1)
            for method, value in (("source", 0.5), ("tsd", 0.6 if batch > 1 else 0.4))
        ]

    (lede,) = read(render_page(some(2), [], title="x")).all("div", class_="lede")
    assert len(list(lede.all("p"))) == 3
    (lede,) = read(render_page(some(5), [], title="x")).all("div", class_="lede")
    assert [p.text for p in lede.all("p")][2] == "Best on average in the 5 tables: tsd in 4 and source in 1."


def test_failures_and_notes_are_on_top() -> None:
    runs = [*study(), record("tent", "b", 2, None)]
    root = read(render_page(runs, [], title="x"))
    (alerts,) = root.all("section", class_="alerts")
    failed, notes = alerts.all("details")
    assert cells(failed)[1] == ["tent on digits/b", "2", "RuntimeError: boom"]
    assert "fewer than 3 seeds: tent has 2 on b" in notes.text
    assert "failed runs" not in notes.text


def test_without_a_finished_run_there_are_only_failures() -> None:
    root = read(render_page([record("tsd", "a", 0, None)], [], title="x"))
    assert "RuntimeError: boom" in next(root.all("section", class_="alerts")).text
    assert not list(root.all("article"))


def test_without_a_record_there_is_no_page() -> None:
    with pytest.raises(ValueError, match="run `trueup bench` first"):
        render_page([], [], title="x")


def test_every_metric_that_some_run_has_can_be_chosen() -> None:
    eyes = [record("tsd", "eye", 0, 1.0, dataset="eyes", results={"dice": 0.5, "hd95": 4.0})]
    root = read(render_page([*study(), *eyes], [], title="x"))
    (choice,) = root.all("select", id="choose-metric")
    said = {option.attributes["value"]: option.text for option in choice.all("option")}
    assert said.pop("") == "usual: accuracy and dice"
    names = ("accuracy", "dice", "nll", "hd95", "images_per_second", "peak_memory_mb", "seconds")
    assert said == {name: METRICS[name].title for name in names}
