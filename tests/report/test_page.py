"""The page read by a parser: its shape, its numbers, what hostile records do to it, and its charts by hand."""

import base64
import gzip
import hashlib
import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from studies import record, study

from trueup.report.chart_axes import ticks
from trueup.report.chart_curves import lines
from trueup.report.chart_fields import outline
from trueup.report.figure_spec import Axis, Bars, Curve, Dots, Lines, Matrix, Picture, Plate
from trueup.report.metrics import METRICS
from trueup.report.page import page
from trueup.report.page_runs import columns
from trueup.report.palette import Style
from trueup.report.render import render
from trueup.report.tables import tables

VOID = {"meta", "link", "br", "input", "image", "use", "path", "rect", "line", "circle"}
NASTY = '</script ><script>alert(1)</script><img src=x onerror="alert(1)">&\'"\u2028\ud800\0<!--'


class Node:
    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        self.name, self.attributes, self.children, self.own = name, attributes, list[Node](), ""

    def all(self, name: str, **wanted: str) -> "Iterator[Node]":
        for child in self.children:
            found = child.name == name and all(child.attributes.get(k.rstrip("_")) == v for k, v in wanted.items())
            if found:
                yield child
            yield from child.all(name, **wanted)

    @property
    def text(self) -> str:
        """Text in its order does not matter to these tests: own text and that of children."""
        return self.own + "".join(child.text for child in self.children)


class Tree(HTMLParser):
    """Fails on a tag that is closed by another's end, so escaping that breaks the shape is seen."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.root = Node("", {})
        self.path = [self.root]
        self.feed(document)
        self.close()
        assert self.path == [self.root], f"never closed: {[node.name for node in self.path]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        assert len(attrs) == len(node.attributes), f"an attribute twice: {attrs}"
        self.path[-1].children.append(node)
        if tag not in VOID:
            self.path.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.path[-1].children.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop().name == tag

    def handle_data(self, data: str) -> None:
        self.path[-1].own += data


def read(document: str) -> Node:
    return Tree(document).root


def every(root: Node) -> Iterator[Node]:
    for child in root.children:
        yield child
        yield from every(child)


def data(root: Node, name: str) -> Any:
    (script,) = root.all("script", id=name)
    if script.attributes["type"] == "text/plain":
        return json.loads(gzip.decompress(base64.b64decode(script.own)))
    return json.loads(script.own)


def plates(word: str = "tsd") -> list[Plate]:
    """One of each kind."""
    x, y = Axis("images seen"), Axis("accuracy in %")
    curves = (
        Curve("source", (100, 200, 300), (50, math.nan, 52), (1, 1, 1)),
        Curve(word, (100, 200, 300), (55, 60, 65)),
    )
    targets = Axis("target", (word, "b"))
    bars = (Curve("source", (0, 1), (50, 40), (2, 3)), Curve(word, (0, 1), (60, 70)))
    mask = np.zeros((8, 8), np.uint8)
    mask[2:5, 3:6] = 1
    image = np.full((8, 8, 3), 128, np.uint8)
    pictures = (Picture("truth", image, {word: mask}, "note"), Picture("answer", image, {word: 1 - mask}, word))
    matrix = Matrix("before", Axis("answer", (word, "1")), Axis("true class", ("0", "1")), ((90.0, 10.0), (35.0, 65.0)))
    return [
        Plate("along", f"Along {word}", f"Caption {word}", (Lines("one", x, y, curves), Lines("two", x, y, curves))),
        Plate("targets", "By target", "Bars.", (Bars("", targets, y, bars),), 1),
        Plate("confusion", "Confusion", "Rows.", (matrix,)),
        Plate("features", "Features", "Dots.", (Dots("", (0.0, 1.0, 2.0), (0.0, 2.0, 1.0), (0, 1, 1), (word, "b")),)),
        Plate("masks", "Masks", "Outlines.", pictures, 4),
    ]


def cells(root: Node) -> list[list[str]]:
    """A table as one reads it, without what only screen readers say."""
    for span in list(root.all("span", class_="unseen")):
        span.own = ""
    return [[_line(cell) for cell in row.children] for row in root.all("tr")]


def _line(cell: Node) -> str:
    return " ".join(cell.text.replace("−", "-").split())


# Shape


def test_the_document_is_whole_and_asks_for_nothing() -> None:
    root = read(page(study(), plates(), title="A study"))
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
    root = read(page(study(), [], title="A study"))
    policy = next(root.all("meta", **{"http-equiv": "Content-Security-Policy"})).attributes["content"]
    (script,) = (node for node in root.all("script") if "type" not in node.attributes)
    digest = base64.b64encode(hashlib.sha256(script.own.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert "connect-src" not in rules
    assert rules["img-src"] == "data:"


def test_landmarks_headings_and_scopes() -> None:
    root = read(page(study(), plates(), title="A study"))
    assert [len(list(root.all(name))) for name in ("main", "nav", "h1", "footer")] == [1, 1, 1, 1]
    assert [node.text for node in root.all("h2")] == ["Results", "Figures", "Runs"]
    assert all(node.attributes.get("scope") in ("row", "col") for node in root.all("th"))
    assert next(root.all("a")).attributes == {"class": "skip", "href": "#main"}
    named = list(root.all("div", role="img"))
    assert len(named) == 7
    assert all(node.attributes["aria-label"] for node in named)
    assert all("tabindex" in node.attributes for node in named[:5])  # pictures have no values to read


# Numbers


def test_tables_are_those_of_the_report_in_every_metric() -> None:
    """The view on the page, and the packed ones of all metrics with their forms."""
    runs = study()
    root = read(page(runs, [], title="A study"))
    packed = data(root, "views-data")["0"]
    assert set(packed) == {"accuracy", "nll", "seconds", "images_per_second", "peak_memory_mb"}
    shown = next(root.all("article"))
    assert next(shown.all("h3")).text == next(read(packed["accuracy"]["view"]).all("h3")).text
    for name, view in packed.items():
        (table,) = tables(runs, metric=name)
        head, *rows = cells(next(read(view["view"]).all("table")))
        assert head == ["method", *(column.name for column in table.columns)]
        for row, line in zip(table.rows, rows, strict=True):
            texts = [c.text(cell) if cell else ("–", "") for c, cell in zip(table.columns, row.cells, strict=True)]
            assert line == [row.label, *(f"{a} ± {b}" if b else a for a, b in texts)]
        assert {form: view[form] for form in ("markdown", "latex", "csv")} == {
            form: render(table, form) for form in ("markdown", "latex", "csv")
        }
    assert cells(next(shown.all("table"))) == cells(next(read(packed["accuracy"]["view"]).all("table")))


def test_best_and_second_are_marked_by_more_than_colour() -> None:
    root = read(page(study(), [], title="A study"))
    rows = {row.children[0].text: row.children[3] for row in next(root.all("tbody")).children}  # average
    assert next(rows["tsd"].all("b")).text == "70.0"
    assert next(rows["tsd"].all("span")).text.strip() == "best"
    assert next(rows["tent"].all("u")).text == "62.5"
    assert not [*rows["source"].all("b"), *rows["source"].all("u")]


def test_the_headline_says_who_is_best_and_that_it_may_be_luck() -> None:
    """Tsd gains 0.2, 0.15 and -0.1 in the three seeds: 8.3 ± 16.1 points."""
    (lede,) = read(page(study(), [], title="A study")).all("div", class_="lede")
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
    (lede,) = read(page(runs, [], title="A study")).all("div", class_="lede")
    own = re.sub(r"<[^>]+>", "", page(runs, [], title="A study").split('class="lede">')[1].split("</div>")[0])
    assert said in own
    assert len(list(lede.all("p"))) == 2


def test_several_groups_have_a_sentence_each_and_many_a_tally() -> None:
    def some(n: int) -> list[dict[str, Any]]:
        return [
            record(method, "a", 0, value, batch=batch)
            for batch in range(1, n + 1)
            for method, value in (("source", 0.5), ("tsd", 0.6 if batch > 1 else 0.4))
        ]

    (lede,) = read(page(some(2), [], title="x")).all("div", class_="lede")
    assert len(list(lede.all("p"))) == 3
    (lede,) = read(page(some(5), [], title="x")).all("div", class_="lede")
    assert [p.text for p in lede.all("p")][2] == "Best on average in the 5 tables: tsd in 4 and source in 1."


def test_failures_and_notes_are_on_top() -> None:
    runs = [*study(), record("tent", "b", 2, None)]
    root = read(page(runs, [], title="x"))
    (alerts,) = root.all("section", class_="alerts")
    failed, notes = alerts.all("details")
    assert cells(failed)[1] == ["tent on digits/b", "2", "RuntimeError: boom"]
    assert "fewer than 3 seeds: tent has 2 on b" in notes.text
    assert "failed runs" not in notes.text


def test_without_a_finished_run_there_are_only_failures() -> None:
    root = read(page([record("tsd", "a", 0, None)], [], title="x"))
    assert "RuntimeError: boom" in next(root.all("section", class_="alerts")).text
    assert not list(root.all("article"))


def test_without_a_record_there_is_no_page() -> None:
    with pytest.raises(ValueError, match="run `trueup bench` first"):
        page([], [], title="x")


# Runs


def test_every_run_is_listed_and_the_last_of_one_id_counts() -> None:
    runs = [record("tsd", "a", 0, 0.5, id="x"), record("tsd", "a", 0, 0.75, id="x"), record("bn", "a", 1, None)]
    (listed,) = read(page(runs, [], title="x")).all("table", class_="runs")
    assert cells(listed)[1:] == [
        ["tsd", "digits", "a", "digits-net", "0", "iid", "75.0", "2.00", "done"],
        ["bn", "digits", "a", "digits-net", "1", "iid", "–", "–", "failed"],
    ]


def test_all_of_a_record_comes_back_from_the_columns() -> None:
    runs: list[dict[str, Any]] = [*study(), record("tsd", "a", 0, None, hyper={"lr": 0.1, "deep": {"er": {"x": [1]}}})]
    stored = json.loads(json.dumps(columns(runs)))
    for i, run in enumerate(runs):
        found = []
        for path, values, which in zip(stored["paths"], stored["values"], stored["which"], strict=True):
            found += [(path, values[which[i] if which else 0])] if which is None or which[i] >= 0 else []
        again: dict[str, Any] = {}
        for path, value in found:
            inner = again
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = value
        assert again == run


def test_what_runs_share_is_there_once() -> None:
    assert page(study(), [], title="x").count('"iterations"') == 1


def test_long_lists_and_digits_that_nobody_reads_are_left_out() -> None:
    run = record("tsd", "a", 0, 1 / 3, hyper={"lr": 1 / 3})
    run["results"] |= {
        "per_class": [0.5] * 345,
        "few": [1 / 3] * 50,
        "per_case": {f"c{i}": {"dice": 0.5} for i in range(51)},
    }
    stored = columns([run])
    said = {tuple(path): values[0] for path, values in zip(stored["paths"], stored["values"], strict=True)}
    assert said["results", "accuracy"] == said["settings", "hyper", "lr"] == 0.333333
    assert said["results", "per_class"] == "345 numbers: see records.jsonl"
    assert said["results", "few"] == [0.333333] * 50
    assert said["results", "per_case"] == "51 numbers: see records.jsonl"


@pytest.mark.parametrize(("classes", "cases"), [(10, 0), (345, 0), (10, 160)])
def test_a_thousand_runs_are_small(classes: int, cases: int) -> None:
    document = page(thousand(classes, cases), [], title="x")
    assert len(document.encode()) < 1.5e6


def thousand(classes: int = 10, cases: int = 0) -> list[dict[str, Any]]:
    """Ten methods, five targets, twenty seeds, with all that a record holds."""
    random = np.random.default_rng(0)
    environment = {f"library{i}": f"{i}.0.1+cu132" for i in range(16)}
    runs = []
    for i in range(1000):
        results = {name: float(random.random()) for name in ("accuracy", "macro", "ece", "nll")}
        results |= {"per_class": random.random(classes).tolist(), "images": 2000}
        results |= {"alignment_per_class": random.random(classes).tolist()}
        results |= {"along": {name: random.random(8).tolist() for name in ("images", "alignment", "uniformity")}}
        dice = random.random((cases, 2, 3)).tolist()
        names = ("dice", "hd95", "assd")
        parts = [
            {part: dict(zip(names, v, strict=True)) for part, v in zip(("disc", "cup"), c, strict=True)} for c in dice
        ]
        results |= {"per_case": {f"case-{n:03}": part for n, part in enumerate(parts)}} if cases else {}
        cost = {name: float(random.random()) for name in ("seconds", "images_per_second", "peak_memory_mb")}
        method, target, seed = ("source", *(f"method{k}" for k in range(1, 10)))[i % 10], f"t{i // 10 % 5}", i // 50
        run = record(method, target, seed, 0.0, results=results, cost=cost, environment=environment, id=f"{i:016x}")
        runs.append(run | {"finished": f"2026-01-01T00:{i // 60:02}:{i % 60:02}Z"})
    return runs


# Hostile records


def hostile() -> list[dict[str, Any]]:
    knobs: dict[str, Any] = {"dataset": NASTY, "network": NASTY, "stream": NASTY, "hyper": {NASTY: NASTY}}
    good = record(f"tsd{NASTY}", NASTY, 0, 0.5, **knobs, environment={NASTY: NASTY})
    base = record("source", NASTY, 0, 0.25, **knobs, environment={NASTY: "else", "x": math.nan})
    bad = record("bn", NASTY, 0, None, **knobs) | {"error": NASTY, "at": [NASTY]}
    return [base, good, bad]


def test_text_of_records_and_plates_is_never_markup() -> None:
    def shape(root: Node) -> list[tuple[str, tuple[str, ...]]]:
        return [(node.name, tuple(node.attributes)) for node in every(root)]

    runs, others = hostile(), [record(f"pl{NASTY}", NASTY, 1, 0.5)]
    document = page(runs, plates(NASTY), title=NASTY, against=others, names=(NASTY, NASTY))
    document.encode()  # no half of a surrogate pair is left
    root = read(document)
    word = "x" * len(NASTY)
    tame = json.loads(json.dumps(runs).replace(json.dumps(NASTY)[1:-1], word))
    mild = [record(f"pl{word}", word, 1, 0.5)]
    plain = page(tame, plates(word), title=word, against=mild, names=(word, word))
    assert shape(root) == shape(read(plain))
    assert not list(root.all("img"))
    assert not any(name.startswith("on") for node in every(root) for name in node.attributes)
    stored = "".join(script.own for script in root.all("script") if "type" in script.attributes)
    assert not set("<>&\u2028") & set(stored)
    for view in data(root, "views-data")["0"].values():
        assert not {node.name for node in every(read(view["view"]))} & {"img", "script"}


def test_data_of_hostile_records_comes_back_as_it_was() -> None:
    stored = data(read(page(hostile(), [], title="x")), "runs-data")
    assert stored["values"][stored["paths"].index(["settings", "dataset"])] == [NASTY]
    assert stored["values"][stored["paths"].index(["environment", "x"])] == ["nan"]


# Two sweeps


def sweeps() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tsd changed by 1, 3 (a) and 2 (b) points, source not at all; one run is on each side only, one failed."""
    mine = {("source", "a", 0): 0.5, ("tsd", "a", 0): 0.61, ("tsd", "a", 1): 0.63, ("tsd", "b", 0): 0.72}
    other = {("source", "a", 0): 0.5, ("tsd", "a", 0): 0.60, ("tsd", "a", 1): 0.60, ("tsd", "b", 0): 0.70}
    new = mine | {("bn", "a", 0): None, ("pl", "a", 0): 0.6}
    old = other | {("bn", "a", 0): 0.4, ("tent", "a", 4): 0.6}
    first, second = ([record(*run, value, code={"x": n}) for run, value in s.items()] for n, s in enumerate((new, old)))
    return first, second


def test_a_comparison_by_hand() -> None:
    mine, other = sweeps()
    root = read(page(mine, [], title="x", against=other, names=("new", "old")))
    (section,) = root.all("section", id="comparison")
    assert cells(next(section.all("table"))) == [
        ["method", "a", "b", "all"],
        ["source", "+0.0", "–", "+0.0"],
        ["tsd", "+2.0 ± 1.4", "+2.0", "+2.0 ± 1.0"],
    ]
    said = next(section.all("p", class_="verdict")).text
    assert said.startswith("4 runs finished in both with the same settings. In accuracy 1 of 4 are equal")
    assert "(new minus old) is +1.5 ± 1.3 points." in said
    lists = {d.children[0].text: [li.text for li in d.all("li")] for d in section.all("details")}
    assert lists == {
        " in new only1 run": ["pl on digits/a, seed 0"],
        " in old only1 run": ["tent on digits/a, seed 4"],
        " in both, but failed in new1 run": ["bn on digits/a, seed 0"],
    }


def test_runs_are_matched_by_id_before_settings() -> None:
    """One whose settings gained a knob since then has kept neither; one with the same id is the same run."""
    mine = [record("tsd", "a", 0, 0.6, id="1"), record("tsd", "b", 0, 0.5, id="2", new=1)]
    other = [record("tsd", "a", 0, 0.5, id="1", old=True), record("tsd", "b", 0, 0.4, id="3")]
    root = read(page(mine, [], title="x", against=other))
    (section,) = root.all("section", id="comparison")
    assert cells(next(section.all("table")))[1] == ["tsd", "+10.0", "+10.0"]
    assert len(list(section.all("details"))) == 2


def test_sweeps_without_a_common_run_say_so() -> None:
    root = read(page([record("tsd", "a", 0, 0.6)], [], title="x", against=[record("tsd", "b", 0, 0.6)]))
    (section,) = root.all("section", id="comparison")
    assert "nothing to compare" in next(section.all("p")).text
    assert not list(section.all("table"))


# Charts


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.31, 0.39) == [0.32, 0.34, 0.36, 0.38]
    assert ticks(-2.5, 2.5) == [-2, -1, 0, 1, 2]


def test_curves_lie_where_their_numbers_are_and_break_where_there_are_none() -> None:
    """Between the ticks of 0 and 100 the place of 25 is a quarter of the way."""
    curve = Curve("tsd", (0, 50, 100, 150, 200), (0, 25, math.nan, 75, 100))
    drawing = lines(Lines("", Axis("x"), Axis("y"), (curve,)), {"tsd": Style("#123456")}, 500)
    (path,) = re.findall(r'class="line" d="([^"]*)"', drawing.svg)
    pieces = [[tuple(map(float, p.split())) for p in piece.split("L")] for piece in path.split("M")[1:]]
    assert [len(piece) for piece in pieces] == [2, 2]
    (x0, y0), (x1, y1), (_, y3), (x4, y4) = (*pieces[0], *pieces[1])
    assert (y1 - y0) / (y4 - y0) == pytest.approx(0.25, abs=0.002)
    assert (x1 - x0) / (x4 - x0) == pytest.approx(0.25, abs=0.002)
    assert (y3 - y0) / (y4 - y0) == pytest.approx(0.75, abs=0.002)
    grid = [float(y) for y in re.findall(r'class="grid" d="M\S+ (\S+?)H', drawing.svg)]
    assert y0 == pytest.approx(grid[0])
    assert y4 == pytest.approx(grid[-1])
    assert [(stop[2], stop[3][0][1]) for stop in drawing.values["stops"]] == [
        ("x: 0", "0"),
        ("x: 50", "25"),
        ("x: 150", "75"),
        ("x: 200", "100"),
    ]


def test_bars_end_at_their_numbers() -> None:
    root = read(page(study(), plates(), title="x"))
    (figure,) = root.all("figure", id="figure-targets")
    marks = [next(g.all("path")).attributes["d"] for g in next(figure.all("div", role="img")).all("g")]
    heights = [[float(a) - float(b) for a, b in re.findall(r"M\S+ ([\d.]+)V([\d.]+)", path)] for path in marks]
    (a, b), (c, d) = heights
    assert [x / a for x in (a, b, c, d)] == pytest.approx([1, 0.8, 1.2, 1.4], abs=0.01)


def test_charts_of_nothing_are_drawn_all_the_same() -> None:
    """One number, no number, no curve: no axis may break on it."""
    x, y, none = Axis("x"), Axis("y"), Curve("tsd", (1.0, 2.0), (math.nan, math.nan))
    one = Curve("tsd", (3.0,), (0.0,), (math.nan,))
    sets: tuple[tuple[Curve, ...], ...] = ((), (none,), (one,))
    made = [kind("", x, y, curves) for curves in sets for kind in (Lines, Bars)]
    logs = [Lines("", Axis("x", log=True), Axis("y", log=True), curves) for curves in sets]
    fields = [Matrix("", x, y, ()), Matrix("", x, y, ((math.nan,),)), Dots("", (), (), (), ("a",))]
    root = read(page(study(), [Plate("all", "", "", (*made, *logs, *fields))], title="x"))
    assert len(list(root.all("div", role="img"))) == 12
    assert "nan" not in "".join(str(node.attributes) for node in every(root))


def test_an_outline_runs_along_the_edges_of_pixels() -> None:
    mask = np.array([[0, 0, 0], [0, 1, 1], [0, 0, 1]])
    assert sorted(re.findall(r"M[^M]+", outline(mask))) == sorted(
        ["M1 1h2", "M1 2h1", "M2 3h1", "M1 1v1", "M2 2v1", "M3 1v2"]
    )


def test_a_picture_that_is_shown_twice_is_sent_once() -> None:
    document = page(study(), plates(), title="x")
    assert document.count("data:image/png;base64,") == 1
    assert document.count('<use href="#image-0"/>') == 1
    blob = re.search(r"base64,([^\"]+)", document)
    assert blob is not None
    assert base64.b64decode(blob[1]).startswith(b"\x89PNG")


def test_a_figure_keeps_its_values_for_the_script() -> None:
    stored = data(read(page(study(), plates(), title="x")), "figure-along-values")
    assert stored["labels"] == ["source", "tsd"]
    first = stored["charts"][0]["stops"]
    assert [stop[2] for stop in first] == ["images seen: 100", "images seen: 200", "images seen: 300"]
    assert [[row[:2] for row in stop[3]] for stop in first] == [
        [[0, "50 ± 1"], [1, "55"]],
        [[1, "60"]],
        [[0, "52 ± 1"], [1, "65"]],
    ]


def test_every_metric_that_some_run_has_can_be_chosen() -> None:
    eyes = [record("tsd", "eye", 0, 1.0, dataset="eyes", results={"dice": 0.5, "hd95": 4.0})]
    root = read(page([*study(), *eyes], [], title="x"))
    (choice,) = root.all("select", id="choose-metric")
    said = {option.attributes["value"]: option.text for option in choice.all("option")}
    assert said.pop("") == "usual: accuracy and dice"
    names = ("accuracy", "dice", "nll", "hd95", "images_per_second", "peak_memory_mb", "seconds")
    assert said == {name: METRICS[name].title for name in names}
