"""Figures as files: in every form, with their words, the same bytes each time."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from traced import study

from trueup.report.figure_spec import (
    Axis,
    BarPanel,
    Curve,
    FigureSpec,
    ImagePanel,
    LinePanel,
    MatrixPanel,
    Panel,
    ScatterPanel,
)
from trueup.report.figures import FORMS, draw_figure, save_figure, split_pages
from trueup.report.palette import COLOURS, INK, OUTLINES, curve_labels, style
from trueup.report.record_figures import make_figures

CURVES = (Curve("source", (0, 1, 2), (1, 2, 3)), Curve("tsd", (0, 1, 2), (2, 3, float("nan")), (0.5, float("nan"), 1)))
LONG = tuple(range(40))


def axes(kind: str, *ticks: str, log: bool = False) -> tuple[Axis, Axis]:
    return Axis(f"across {kind}", ticks, log), Axis(f"up {kind}", ticks if kind == "matrix" else (), log)


PANELS: dict[str, Panel] = {
    "lines": LinePanel("panel lines", *axes("lines", log=True), (Curve("tsd", (1, 8, 64), (1, 10, 100)),)),
    "words": LinePanel("panel words", *axes("words", "one", "two", "all"), CURVES),
    "long": LinePanel("panel long", *axes("long"), (Curve("tsd", LONG, LONG, (1,) * 40),)),
    "bars": BarPanel("panel bars", *axes("bars", "one", "two", "all"), CURVES),
    "matrix": MatrixPanel("panel matrix", *axes("matrix", "x", "y"), ((90, 10), (float("nan"),) * 2)),
    "dots": ScatterPanel("panel dots", (0, 1, 2), (2, 1, 0), (0, 1, 1), ("across dots", "up dots")),
    "picture": ImagePanel(
        "panel picture",
        np.zeros((8, 8, 3), np.uint8),
        {"across picture": np.eye(8), "empty": np.zeros((8, 8))},
        "up picture",
    ),
}


def figure_of(*panels: Panel, **change: Any) -> FigureSpec:
    made = {"name": "a-figure", "title": "Title of $5 & more", "caption": "What one must know. " * 9, "columns": 2}
    return FigureSpec(panels=panels, **{**made, **change})


def words(file: Path) -> str:
    return " ".join("".join(e.itertext()) for e in ElementTree.parse(file).iter() if e.tag.endswith("text"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A figure of every kind of panel."""
    return save_figure(figure_of(*PANELS.values(), columns=3), tmp_path_factory.mktemp("figures") / "new")


def test_every_kind_is_drawn_with_its_words(files: list[Path]) -> None:
    assert [file.name for file in files] == ["a-figure.png", "a-figure.svg", "a-figure.pdf"]
    with Image.open(files[0]) as picture:
        assert min(picture.size) > 300
        assert len(picture.getcolors(1 << 20) or ()) > 10
    assert files[2].read_bytes().startswith(b"%PDF")
    text = words(files[1])
    for word in ("Title of $5 & more", "What one must know."):
        assert word in text
    for kind in PANELS:
        assert [word for word in ("panel", "across", "up") if f"{word} {kind}" not in text] == []


def test_same_figure_same_bytes(files: list[Path], tmp_path: Path) -> None:
    for one, other in zip(files, save_figure(figure_of(*PANELS.values(), columns=3), tmp_path), strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert b"Date" not in one.read_bytes()


def test_legend_is_there_once(tmp_path: Path) -> None:
    (file,) = save_figure(figure_of(PANELS["words"], PANELS["bars"]), tmp_path, ["svg"])
    assert words(file).count("source") == 1


def test_nothing_is_cut_off_or_drawn_over(tmp_path: Path) -> None:
    """Title, legend, axes and caption lie above each other, inside the page."""
    records, trace = study(batches=(1, 20), values={"neighbors": (1, 5)}, images=60)
    for made in [*make_figures(records, trace), figure_of(*PANELS.values()), figure_of(PANELS["words"])]:
        figure = draw_figure(made)
        figure.canvas.draw()
        page, renderer = figure.bbox, figure.canvas.get_renderer()
        title, caption = (text.get_window_extent(renderer) for text in figure.texts)
        axes = [axis.get_tightbbox(renderer) for axis in figure.axes]
        legends = [legend.get_window_extent(renderer) for legend in figure.legends]
        for box in (title, caption, *axes, *legends):
            assert box.x0 >= -1
            assert box.x1 <= page.x1 + 1, made.name
        top = min([title.y0, *(legend.y0 for legend in legends)])
        assert all(legend.y1 <= title.y0 + 2 for legend in legends), made.name
        assert max(box.y1 for box in axes) <= top + 2, made.name
        assert min(box.y0 for box in axes) >= caption.y1 - 2, made.name
        assert caption.y0 >= 0
        assert title.y1 <= page.y1


@pytest.mark.parametrize("letters", [35, 130])
def test_long_names_leave_the_plot_its_room(letters: int) -> None:
    """Ticks are shortened and told apart; names wrap; what turned ticks take is added to the height."""
    ticks = tuple(f"{'a' * (letters - 1)}{i}" for i in range(6))
    curves = tuple(Curve(f"{('methods.tsd_with_' * 8)[:letters]}{i}", LONG[:6], LONG[:6]) for i in range(9))
    panel, plain = (
        BarPanel(ticks[0] * 2, Axis("across", names), Axis("up"), curves) for names in (ticks, tuple("abcdef"))
    )
    figures = [draw_figure(figure_of(each, columns=1)) for each in (panel, plain)]
    for figure in figures:
        figure.canvas.draw()
    renderer = figures[0].canvas.get_renderer()
    words = [text.get_text() for text in figures[0].axes[0].get_xticklabels()]
    assert len(set(words)) == 6
    assert max(map(len, words)) <= 20
    (legend,), (axis,) = figures[0].legends, figures[0].axes
    assert legend.get_window_extent(renderer).x1 <= figures[0].bbox.x1
    assert axis.get_tightbbox(renderer).y1 <= legend.get_window_extent(renderer).y0 + 2
    assert axis.get_tightbbox(renderer).x1 <= figures[0].bbox.x1
    high, usual = (figure.axes[0].get_window_extent(figure.canvas.get_renderer()).height for figure in figures)
    assert high > 0.9 * usual


def test_a_figure_higher_than_a_page_becomes_several_files(tmp_path: Path) -> None:
    """Ten panels in a column: each is there once, in order, and a file of one page keeps its name."""
    panels = [LinePanel(f"number {i}.", Axis("across"), Axis("up"), CURVES) for i in range(10)]
    files = save_figure(figure_of(*panels, columns=1), tmp_path, ["svg"])
    assert [file.name for file in files] == [f"a-figure-{i + 1}.svg" for i in range(len(files))]
    found = []
    for file in files:
        root = ElementTree.parse(file).getroot()
        assert float(root.attrib["height"].removesuffix("pt")) / 72 <= 10.5
        found += re.findall(r"number \d+\.", words(file))
    assert found == [panel.title for panel in panels]
    assert split_pages(figure_of(*panels[:4]), ("source", "tsd")) == [figure_of(*panels[:4])]


def test_few_numbers_are_their_own_ticks() -> None:
    curve = Curve("tsd", (16, 64), (1, 2))
    (axis,) = draw_figure(figure_of(LinePanel("", Axis("batch"), Axis("up"), (curve,)))).axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["16", "64"]


def test_structures_have_the_colours_of_the_page() -> None:
    figure = draw_figure(figure_of(PANELS["picture"]))
    assert [line.get_color() for line in figure.legends[0].get_lines()] == list(OUTLINES[:2])


def test_unknown_form_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gif'"):
        save_figure(figure_of(PANELS["bars"]), tmp_path / "new", ["png", "gif"])
    assert not (tmp_path / "new").exists()
    assert FORMS == ("png", "svg", "pdf")


def test_methods_look_alike_in_all_figures() -> None:
    labels = ["source", *(f"m{i}" for i in range(20))]
    looks = [style(label, labels) for label in labels]
    assert looks[0].colour == INK
    assert len(set(looks)) == len(labels)
    assert len({(look.colour, look.dash) for look in looks}) == len(labels)
    assert [look.colour for look in looks[1:9]] == list(COLOURS)
    assert style("source (guard)", ["source (guard)", "source", "m"]).colour == INK
    assert style("m", ["m"]) == style("m", ["source", "m"])
    assert curve_labels([figure_of(PANELS["words"]), figure_of(PANELS["bars"], PANELS["dots"])]) == ("source", "tsd")
    with pytest.raises(ValueError, match="no style for 'x'"):
        style("x", labels)


def test_lines_have_the_style_of_their_label() -> None:
    figure = draw_figure(figure_of(PANELS["long"]), ["tent", "tsd"])
    assert figure.axes[0].lines[0].get_color() == COLOURS[1]
    assert draw_figure(figure_of(PANELS["long"])).axes[0].lines[0].get_color() == COLOURS[0]
