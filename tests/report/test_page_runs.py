"""The list of runs, and records with hostile text."""

import json
from typing import Any

from pages import NASTY, Node, cells, data, every, figures, hostile, read, thousand
from studies import record, study

from trueup.report.page import render_page
from trueup.report.page_tables import run_columns


def test_every_run_is_listed_and_the_last_of_one_id_counts() -> None:
    runs = [record("tsd", "a", 0, 0.5, id="x"), record("tsd", "a", 0, 0.75, id="x"), record("bn", "a", 1, None)]
    (listed,) = read(render_page(runs, [], title="x")).all("table", class_="runs")
    assert cells(listed)[1:] == [
        ["tsd", "digits", "a", "digits-net", "0", "iid", "75.0", "2.00", "done"],
        ["bn", "digits", "a", "digits-net", "1", "iid", "–", "–", "failed"],
    ]


def test_all_of_a_record_comes_back_from_the_columns() -> None:
    runs: list[dict[str, Any]] = [*study(), record("tsd", "a", 0, None, hyper={"lr": 0.1, "deep": {"er": {"x": [1]}}})]
    stored = json.loads(json.dumps(run_columns(runs)))
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
    assert render_page(study(), [], title="x").count('"iterations"') == 1


def test_long_lists_and_digits_that_nobody_reads_are_left_out() -> None:
    run = record("tsd", "a", 0, 1 / 3, hyper={"lr": 1 / 3})
    run["results"] |= {
        "per_class": [0.5] * 345,
        "few": [1 / 3] * 50,
        "per_case": {f"c{i}": {"dice": 0.5} for i in range(51)},
    }
    stored = run_columns([run])
    said = {tuple(path): values[0] for path, values in zip(stored["paths"], stored["values"], strict=True)}
    assert said["results", "accuracy"] == said["settings", "hyper", "lr"] == 0.333333
    assert said["results", "per_class"] == "345 numbers: see records.jsonl"
    assert said["results", "few"] == [0.333333] * 50
    assert said["results", "per_case"] == "51 numbers: see records.jsonl"


def test_a_thousand_runs_are_small() -> None:
    document = render_page(thousand(classes=345, cases=20), [], title="x")
    assert len(document.encode()) < 1.5e6


def test_text_of_records_and_figures_is_never_markup() -> None:
    def shape(root: Node) -> list[tuple[str, tuple[str, ...]]]:
        return [(node.name, tuple(node.attributes)) for node in every(root)]

    runs, others = hostile(), [record(f"pl{NASTY}", NASTY, 1, 0.5)]
    document = render_page(runs, figures(NASTY), title=NASTY, against=others, names=(NASTY, NASTY))
    document.encode()  # no half of a surrogate pair is left
    root = read(document)
    word = "x" * len(NASTY)
    tame = json.loads(json.dumps(runs).replace(json.dumps(NASTY)[1:-1], word))
    mild = [record(f"pl{word}", word, 1, 0.5)]
    plain = render_page(tame, figures(word), title=word, against=mild, names=(word, word))
    assert shape(root) == shape(read(plain))
    assert not list(root.all("img"))
    assert not any(name.startswith("on") for node in every(root) for name in node.attributes)
    stored = "".join(script.own for script in root.all("script") if "type" in script.attributes)
    assert not set("<>&\u2028") & set(stored)
    for view in data(root, "views-data")["0"].values():
        assert not {node.name for node in every(read(view["view"]))} & {"img", "script"}


def test_data_of_hostile_records_comes_back_as_it_was() -> None:
    stored = data(read(render_page(hostile(), [], title="x")), "runs-data")
    assert stored["values"][stored["paths"].index(["settings", "dataset"])] == [NASTY]
    assert stored["values"][stored["paths"].index(["environment", "x"])] == ["nan"]
