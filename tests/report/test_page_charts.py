"""The page's charts against positions worked out by hand."""

import base64
import math
import re

import numpy as np
import pytest
from pages import data, every, figures, read
from studies import study

from trueup.report.chart_curves import draw_lines, round_ticks
from trueup.report.charts import outline
from trueup.report.figure_spec import (
    Axis,
    BarPanel,
    Curve,
    FigureSpec,
    LinePanel,
    MatrixPanel,
    ScatterPanel,
)
from trueup.report.page import render_page
from trueup.report.palette import Style


def test_ticks_are_round_and_inside() -> None:
    assert round_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert round_ticks(0.31, 0.39) == [0.32, 0.34, 0.36, 0.38]
    assert round_ticks(-2.5, 2.5) == [-2, -1, 0, 1, 2]


def test_curves_lie_where_their_numbers_are_and_break_where_there_are_none() -> None:
    """Between the ticks of 0 and 100 the place of 25 is a quarter of the way."""
    curve = Curve("tsd", (0, 50, 100, 150, 200), (0, 25, math.nan, 75, 100))
    drawing = draw_lines(LinePanel("", Axis("x"), Axis("y"), (curve,)), {"tsd": Style("#123456")}, 500)
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
    root = read(render_page(study(), figures(), title="x"))
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
    made = [kind("", x, y, curves) for curves in sets for kind in (LinePanel, BarPanel)]
    logs = [LinePanel("", Axis("x", log=True), Axis("y", log=True), curves) for curves in sets]
    fields = [MatrixPanel("", x, y, ()), MatrixPanel("", x, y, ((math.nan,),)), ScatterPanel("", (), (), (), ("a",))]
    root = read(render_page(study(), [FigureSpec("all", "", "", (*made, *logs, *fields))], title="x"))
    assert len(list(root.all("div", role="img"))) == 12
    assert "nan" not in "".join(str(node.attributes) for node in every(root))


def test_an_outline_runs_along_the_edges_of_pixels() -> None:
    mask = np.array([[0, 0, 0], [0, 1, 1], [0, 0, 1]])
    assert sorted(re.findall(r"M[^M]+", outline(mask))) == sorted(
        ["M1 1h2", "M1 2h1", "M2 3h1", "M1 1v1", "M2 2v1", "M3 1v2"]
    )


def test_a_picture_that_is_shown_twice_is_sent_once() -> None:
    document = render_page(study(), figures(), title="x")
    assert document.count("data:image/png;base64,") == 1
    assert document.count('<use href="#image-0"/>') == 1
    blob = re.search(r"base64,([^\"]+)", document)
    assert blob is not None
    assert base64.b64decode(blob[1]).startswith(b"\x89PNG")


def test_a_figure_keeps_its_values_for_the_script() -> None:
    stored = data(read(render_page(study(), figures(), title="x")), "figure-along-values")
    assert stored["labels"] == ["source", "tsd"]
    first = stored["charts"][0]["stops"]
    assert [stop[2] for stop in first] == ["images seen: 100", "images seen: 200", "images seen: 300"]
    assert [[row[:2] for row in stop[3]] for stop in first] == [
        [[0, "50 ± 1"], [1, "55"]],
        [[1, "60"]],
        [[0, "52 ± 1"], [1, "65"]],
    ]
