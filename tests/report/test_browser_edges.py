"""The page in a real browser where things are long, many, hidden or missing."""

import io
from pathlib import Path
from typing import Any

import pytest
from pages import figures
from PIL import Image
from studies import record, study
from test_page_gaps import runs_of
from visits import Visit, column

from trueup.report.figure_spec import Axis, BarPanel, Curve, FigureSpec, LinePanel
from trueup.report.page import render_page
from trueup.report.palette import COLOURS

NAN = float("nan")
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
LONG = "organisation.adaptation.methods.tsd_variant_with_a_long_name"
CONTRAST = """([wanted]) => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    const linear = [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => (v / 255 <= 0.04045
      ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll(wanted)].map((mark) => {
    const own = light(getComputedStyle(mark).fill);
    return (Math.max(own, paper) + 0.05) / (Math.min(own, paper) + 0.05);
  });
}"""


def groups(labels: int, places: int) -> FigureSpec:
    axis = Axis("target", tuple(f"t{i}" for i in range(places)))
    curves = tuple(Curve(f"m{i}", tuple(range(places)), (50.0,) * places) for i in range(labels))
    return FigureSpec("bars", "Bars", "", (BarPanel("", axis, Axis("accuracy in %"), curves),), 1)


# Sorting, filtering, copying


def test_nan_is_last_both_ways(browser: Any, tmp_path: Path) -> None:
    runs = runs_of({"source": {"a": (0.5,)}, "bn": {"a": (NAN,)}, "tsd": {"a": (0.7,)}})
    with Visit(browser, tmp_path, render_page(runs, [], title="x")) as view:
        for where, at in (("#results .numbers", 1), (".runs", 6)):
            button = view.locator(f"{where} thead th").nth(at).get_by_role("button")
            button.click()
            assert column(view, 0, where) == ["tsd", "source", "bn"]
            button.click()
            assert column(view, 0, where) == ["source", "tsd", "bn"]


def test_another_metric_keeps_the_order(browser: Any, tmp_path: Path) -> None:
    """By the same column, the better end first: of a loss that is the low one."""
    runs = study()
    for run in runs:
        run["results"]["nll"] = 1 - run["results"]["accuracy"]
    with Visit(browser, tmp_path, render_page(runs, [], title="x")) as view:
        head = view.locator("#results th", has_text="average")
        head.get_by_role("button").click()
        view.select_option("#choose-metric", "nll")
        view.locator("#results h3", has_text="negative log-likelihood").wait_for()
        assert column(view, 0) == ["tsd", "tent", "source"]
        assert head.get_attribute("aria-sort") == "ascending"
        head.get_by_role("button").click()
        assert column(view, 0) == ["source", "tent", "tsd"]
        head.get_by_role("button").click()
        assert column(view, 0) == ["source", "tent", "tsd"]  # as it was at first


def test_runs_are_found_by_seed_not_by_digits_of_their_numbers(browser: Any, tmp_path: Path) -> None:
    runs = [record("tsd", "a", seed, 0.11) for seed in (0, 1, 2, 10)]
    with Visit(browser, tmp_path, render_page(runs, [], title="x")) as view:
        shown = view.locator(".runs tbody tr:visible")
        for query, count in (("11", 0), ("seed 1", 1), ("SEED=10 tsd", 1), ("seed 3", 0), ("seed", 4), ("2.00", 0)):
            view.fill("#filter-runs", query)
            assert shown.count() == count, query


def test_a_copy_that_fails_says_so_and_keeps_the_focus(browser: Any, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, render_page(study(), [], title="x")) as view:
        view.evaluate("() => { navigator.clipboard.writeText = async () => { throw new Error('no'); }; }")
        button = view.locator("#results [data-form=latex]")
        for works, words in (("false", "Could not copy"), ("true", "Copied")):
            view.evaluate(f"() => {{ document.execCommand = () => {works}; }}")
            button.press("Enter")
            view.locator("#results [data-form=latex]", has_text=words).wait_for()
            assert view.evaluate("document.activeElement.dataset.form") == "latex"
        view.locator("#results [data-form=latex]", has_text="LaTeX").wait_for()


@pytest.mark.parametrize("name", ["all", "average"])
def test_a_target_with_the_name_of_a_column_can_be_chosen(browser: Any, tmp_path: Path, name: str) -> None:
    runs = runs_of({"source": {name: (0.9,), "b": (0.1,)}, "tsd": {name: (0.5,), "b": (0.9,)}})
    with Visit(browser, tmp_path, render_page(runs, [], title="x")) as view:
        view.select_option("#choose-target", name)
        assert view.locator("#results .numbers tbody td:visible").all_inner_texts() == ["90.0\nbest", "50.0"]


def test_much_of_a_run_is_folded(browser: Any, tmp_path: Path) -> None:
    run = record("tsd", "a", 0, 0.5, hyper={f"knob{i}": i for i in range(21)}, words="w" * 500, id="1")
    run["results"]["per_case"] = {f"c{i}": {"dice": 0.5} for i in range(160)}
    with Visit(browser, tmp_path, render_page([run], [], title="x")) as view:
        view.locator(".runs tbody button").click()
        knobs = view.locator(".fields")
        assert not knobs.get_by_text("knob20").is_visible()
        assert not knobs.get_by_text("w" * 500).is_visible()
        assert knobs.get_by_text("160 numbers: see records.jsonl").is_visible()
        assert view.evaluate("document.querySelector('.fields').offsetHeight") < 1000
        knobs.get_by_text("settings: hyper").click()
        assert knobs.get_by_text("knob20").is_visible()


# Charts


def test_arrow_keys_pass_by_what_is_hidden(browser: Any, tmp_path: Path) -> None:
    """The points of the first curve are the first, third and fifth."""
    curves = (Curve("a", (0, 2, 4), (1, 1, 1)), Curve("b", (1, 3), (1, 1)))
    drawn = FigureSpec("x", "", "", (LinePanel("", Axis("x"), Axis("y"), curves),), 1)
    with Visit(browser, tmp_path, render_page(study(), [drawn], title="x")) as view:
        view.locator(".keys").get_by_role("button", name="a").press("Enter")
        view.keyboard.press("Tab")
        view.keyboard.press("Tab")
        said = []
        for key in ("", "ArrowRight", "ArrowRight", "Home", "End"):
            if key:
                view.keyboard.press(key)
            said.append(view.inner_text("#tip").split("\n")[0])
        assert said == ["x: 1", "x: 3", "x: 3", "x: 1", "x: 3"]


def test_values_move_with_a_chart_that_scrolls_in_its_box(browser: Any, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, render_page(study(), [groups(2, 8)], title="x"), **PHONE) as view:
        chart = view.locator(".chart")
        chart.tap(position={"x": 120, "y": 60})
        places = "['#tip', '.cursor line'].map((name) => document.querySelector(name).getBoundingClientRect().left)"
        gap = f"() => {places}.reduce((a, b) => a - b)"
        before, name = view.evaluate(gap), view.inner_text("#tip")
        chart.evaluate("chart => { chart.scrollLeft = 40; }")
        view.wait_for_timeout(100)
        assert view.evaluate(gap) == pytest.approx(before, abs=1)
        assert view.inner_text("#tip") == name
        chart.evaluate("chart => { chart.scrollLeft = 300; }")
        view.locator("#tip").wait_for(state="hidden")


def test_a_chart_that_goes_on_has_a_shadow_at_its_edge(browser: Any, tmp_path: Path) -> None:
    def edge(view: Any) -> int:
        """The darkest dot of the last two columns, away from bars and lines."""
        box = view.locator(".chart").bounding_box()
        clip = {"x": box["x"] + box["width"] - 2, "y": box["y"] + 2, "width": 2, "height": 6}
        with Image.open(io.BytesIO(view.screenshot(clip=clip, full_page=True))) as picture:
            return int(picture.convert("L").getextrema()[0])

    with Visit(browser, tmp_path, render_page(study(), [groups(2, 8)], title="x"), **PHONE) as view:
        assert edge(view) < 225
        view.locator(".chart").evaluate("chart => { chart.scrollLeft = 1000; }")
        assert edge(view) > 250


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_marks_stand_out_from_the_paper(browser: Any, tmp_path: Path, scheme: str) -> None:
    drawn = groups(len(COLOURS), 1)
    with Visit(browser, tmp_path, render_page(study(), [drawn], title="x"), color_scheme=scheme) as view:
        found = view.evaluate(CONTRAST, [".chart .mark"])
        assert len(found) == len(COLOURS)
        assert min(found) >= 3


# Phone and paper


def test_long_names_leave_room_for_numbers_on_a_phone(browser: Any, tmp_path: Path) -> None:
    runs = [record(method, "a" * 80, 0, 0.5) for method in ("source", LONG)]
    with Visit(browser, tmp_path, render_page(runs, [], title="x"), **PHONE) as view:
        boxes = "[...document.querySelectorAll(where)].map((each) => each.getBoundingClientRect())"
        first = f"(where) => {boxes}.map((box) => [box.width, box.right])"
        for where in (".numbers tbody th", ".runs tbody th"):
            assert all(60 < width <= 0.42 * 390 + 1 for width, _ in view.evaluate(first, where))
        assert all(right <= 390 for _, right in view.evaluate(first, ".numbers td:nth-child(2)"))
        assert all(right <= 0.42 * 390 + 17 for _, right in view.evaluate(first, ".runs tbody button"))


def test_errors_wrap_on_a_phone(browser: Any, tmp_path: Path) -> None:
    runs = [*study(), record("tent", "b", 2, None) | {"error": "RuntimeError: out of memory " * 9, "at": ["x" * 90]}]
    with Visit(browser, tmp_path, render_page(runs, [], title="x"), **PHONE) as view:
        view.locator(".failures summary").tap()
        box = view.locator(".failures .box")
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_paper_has_the_columns_of_a_desk_and_letters_to_read(browser: Any, tmp_path: Path) -> None:
    """A4 with Chromium's margins is 718 pixels wide; a pixel is three quarters of a point."""
    with Visit(
        browser, tmp_path, render_page(study(), figures(), title="x"), viewport={"width": 718, "height": 1000}
    ) as view:
        view.emulate_media(media="print")
        grid = "getComputedStyle(document.querySelector('#figure-along .panels')).gridTemplateColumns"
        assert len(view.evaluate(grid).split()) == 2
        size = """(svg) => parseFloat(getComputedStyle(svg.querySelector("text")).fontSize)
          * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width"""
        for name in ("along", "targets"):
            assert view.locator(f"#figure-{name} .chart svg").first.evaluate(size) * 0.75 >= 6.5
        assert view.evaluate("document.documentElement.scrollWidth") <= 718
