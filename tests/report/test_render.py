"""Tables as text: for the terminal, Markdown, LaTeX and CSV."""

import csv
import re

import pytest
from studies import WIDE, labels, only, record, study

from trueup.report.render import render_table
from trueup.report.tables import Cell, Table


def awkward() -> Table:
    """Two variants with every sign that a form might trip over."""
    runs = [record("source", "a_b|c", s, 0.5, dataset="50% & #1") for s in (0, 1)]
    for norm in ("a|b*<", "c_d%&#${}~^\\"):
        runs += [record("tsd", "a_b|c", s, 0.6 + s / 10, hyper={"norm": norm}, dataset="50% & #1") for s in (0, 1)]
    return only(runs)


def test_csv_reads_back_to_the_same_numbers() -> None:
    for table in (only(study()), awkward()):
        lines = list(csv.DictReader(render_table(table, "csv").splitlines()))
        assert [line["label"] for line in lines] == labels(table)
        for line, at in zip(lines, table.rows, strict=True):
            for column, found in zip(table.columns, at.cells, strict=True):
                mean, std, n = (line[f"{column.name}_{part}"] for part in ("mean", "std", "n"))
                read = Cell(float(mean), float(std) if std else None, int(n), found.mark) if found and mean else None
                assert read == found
                assert found or (mean, std, n) == ("", "", "0")


def test_markdown_is_a_table() -> None:
    for table in (only(study()), awkward()):
        lines = [line for line in render_table(table, "markdown").splitlines() if line.startswith("|")]
        assert len(lines) == 2 + len(table.rows)
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(table.columns) + 2}
        assert len({len(line) for line in lines}) == 1
        assert re.fullmatch(r"\|-+(\|-+:)+\|", lines[1])
    text = render_table(only(study()), "markdown")
    assert "**80.0** ± 10.0" in text
    assert "<u>70.0</u> ± 0.0" in text
    assert r"a\|b\*\<" in render_table(awkward(), "markdown")


def test_latex_is_balanced_and_escaped() -> None:
    wide = only([record(m, t, 0, 0.5 + i / 10) for i, m in enumerate(("source", "tsd")) for t in WIDE])
    for table in (only(study()), awkward(), wide):
        text = render_table(table, "latex")
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
    text = render_table(awkward(), "latex")
    assert r"\caption{50\% \& \#1: accuracy in \%," in text
    assert r"a\_b$|$c" in text
    assert r"norm=``c\_d\%\&\#\$\{\}\textasciitilde{}\textasciicircum{}" in text
    text = render_table(only(study()), "latex")
    assert r"\textbf{80.0} $\pm$ 10.0" in text
    assert r"\underline{70.0} $\pm$ 0.0" in text
    assert r" & -- & " in text
    assert r"\textbf{$+$12.5} $\pm$ 3.5" in text


def test_terminal_lines_up() -> None:
    lines = render_table(only(study()), "terminal").splitlines()
    assert lines[2:7] == [
        "method            a            b      average          gain  seconds",
        "────────────────────────────────────────────────────────────────────",
        "source °60.0 ± 20.0  63.3 ± 23.1  61.7 ± 20.8      –            2.00",
        "tent   *66.7 ± 20.8 °70.0 ±  0.0 °62.5 ±  3.5 *+12.5 ±  3.5     2.00",
        "tsd    °60.0 ±  0.0 *80.0 ± 10.0 *70.0 ±  5.0   +8.3 ± 16.1     2.00",
    ]


def test_terminal_has_codes_only_when_asked() -> None:
    table = only(study())
    plain, styled = render_table(table, "terminal"), render_table(table, "terminal", color=True)
    assert "\x1b" not in plain
    assert "\x1b[1m80.0\x1b[0m ± 10.0" in styled
    assert "\x1b[4m70.0\x1b[0m ±  0.0" in styled
    bare = re.sub(r"\x1b\[\d+m", "", styled)
    numbers = [re.sub("[*°]", " ", line) for line in plain.splitlines()[:7]]
    assert bare.splitlines()[:7] == numbers


@pytest.mark.parametrize("width", [60, 100, 400])
def test_wide_tables_continue_below(width: int) -> None:
    runs = [record(m, t, s, 0.5 + s / 50) for m in ("source", "tent", "tsd") for t in WIDE for s in range(3)]
    text = render_table(only(runs), "terminal", width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("\ntsd ") == text.count("─\n") == {60: 5, 100: 3, 400: 1}[width]
    assert text.count("52.0 ± 2.0") == 3 * (15 + 1)
    assert "gaussian_ " in text  # its cells are narrower


def test_terminal_keeps_to_any_width() -> None:
    table = only(study())
    for width in range(40, 80):
        text = render_table(table, "terminal", width=width)
        assert max(map(len, text.splitlines())) <= width
        assert text.count("─\n") == 1 or width < 68
