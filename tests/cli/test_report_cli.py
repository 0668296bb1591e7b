"""`trueup report`: tables on the terminal, a page beside the records, figures if wanted."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_cli import invoke
from traced import study, write

from trueup.cli.report import _short_names


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    records, trace = study(images=60)
    return write(records, trace, tmp_path / "sweep")


def test_a_page_is_written_beside_the_records(sweep: Path) -> None:
    text = invoke("report", str(sweep))
    assert "higher is better" in text
    assert f"page in {sweep / 'report.html'}" in text.replace("\n", "")
    page = (sweep / "report.html").read_text()
    assert "Trueup: sweep" in page
    assert "accuracy along the stream" in page
    assert not (sweep / "figures").exists()


def test_figures_if_wanted(tmp_path: Path) -> None:
    records, _ = study(methods=("source",), targets=("paint",), images=20)
    write(records, lambda _: None, tmp_path)
    invoke("report", str(tmp_path), "--figures")
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == [f"by-target-digits.{form}" for form in ("pdf", "png", "svg")]


def test_the_page_can_go_elsewhere_and_compare(sweep: Path, tmp_path: Path) -> None:
    other = tmp_path / "before" / "sweep"
    records, trace = study(images=60)
    for record in records:
        record["results"]["accuracy"] -= 0.125
    write(records, trace, other)
    invoke("report", str(sweep), "--against", str(other), "--output", str(tmp_path / "both.html"))
    page = (tmp_path / "both.html").read_text()
    assert "12.5" in page
    assert "before/sweep" in page  # both are called sweep
    assert not (sweep / "report.html").exists()


def test_tables_alone_write_no_page(sweep: Path) -> None:
    assert "|" in invoke("report", str(sweep), "--form", "markdown")
    assert not (sweep / "report.html").exists()


def test_where_nothing_came_to_its_end_the_page_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"dataset": "digits", "target": "type", "method": "tsd", "hyper": {}, "seed": 0, "network": "digits-net"}
    line = json.dumps({"id": "a", "settings": run, "error": "ValueError: the disk is full", "at": []})
    (tmp_path / "records.jsonl").write_text(line + "\n")
    monkeypatch.chdir(tmp_path)
    assert "none of 1 runs has finished" in invoke("report", ".")
    assert "the disk is full" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [("/x/a", "/x/b", ("a", "b")), ("/x/out", "/y/out", ("x/out", "y/out")), ("/x", "/x", ("//x", "//x"))],
)
def test_folders_of_one_name_are_told_apart(one: str, other: str, names: tuple[str, str]) -> None:
    assert _short_names(Path(one), Path(other)) == names


def test_traces_that_are_damaged_cost_their_figures_alone(sweep: Path) -> None:
    for path in (sweep / "traces").iterdir():
        path.write_bytes(np.random.default_rng(0).bytes(100))
    invoke("report", str(sweep))
    assert "accuracy along the stream" not in (sweep / "report.html").read_text()
