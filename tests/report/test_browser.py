"""The page in a real browser: Debian's Chromium, driven by Playwright."""

import json
from pathlib import Path
from typing import Any

import pytest
from pages import NASTY, figures, hostile, sweeps, thousand
from studies import WIDE, record, study
from visits import Visit, column, seen

from trueup.report.page import render_page
from trueup.report.render import render_table
from trueup.report.tables import make_tables

BOTH = (("source", 0.5), ("tsd", 0.6))


# Tables


def test_a_click_sorts_by_the_better_end_first(browser: Any, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, render_page(study(), [], title="x")) as view:
        assert column(view, 0) == ["source", "tent", "tsd"]
        head = view.locator("#results th", has_text="average")
        head.get_by_role("button").click()
        assert column(view, 0) == ["tsd", "tent", "source"]  # 70.0, 62.5, 61.7
        assert head.get_attribute("aria-sort") == "descending"
        head.get_by_role("button").click()
        assert column(view, 0) == ["source", "tent", "tsd"]
        assert head.get_attribute("aria-sort") == "ascending"
        gain = view.locator("#results th", has_text="gain")
        gain.get_by_role("button").click()
        assert column(view, 0) == ["tent", "tsd", "source"]  # 12.5, 8.3, none: last both ways
        gain.get_by_role("button").click()
        assert column(view, 0) == ["tsd", "tent", "source"]
        assert head.get_attribute("aria-sort") == "none"
        gain.get_by_role("button").click()
        assert column(view, 0) == ["source", "tent", "tsd"]


def test_the_keyboard_alone_sorts_and_skips(browser: Any, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, render_page(study(), [], title="x")) as view:
        view.keyboard.press("Tab")
        assert view.evaluate("document.activeElement.className") == "skip"
        assert view.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        view.keyboard.press("Enter")
        assert view.evaluate("document.activeElement.id") == "main"
        for _ in range(40):
            view.keyboard.press("Tab")
            if view.evaluate("document.activeElement.closest('th')?.innerText") == "b":
                break
        view.keyboard.press("Enter")
        assert column(view, 2) == ["80.0", "70.0", "63.3"]
        view.keyboard.press("Space")
        assert column(view, 2) == ["63.3", "70.0", "80.0"]


def test_tables_are_filtered_by_method_target_and_group(browser: Any, tmp_path: Path) -> None:
    runs = [*study(), *(record(m, "c", 0, v, batch=1) for m, v in (("source", 0.5), ("bn", 0.6)))]
    with Visit(browser, tmp_path, render_page(runs, [], title="x")) as view:
        shown = view.locator("#results .block:visible")
        assert shown.count() == 2
        view.fill("#filter-methods", "TS")
        assert column(view, 0) == ["tsd"]
        assert shown.count() == 1
        view.fill("#filter-methods", "nobody")
        assert shown.count() == 0
        assert view.locator("#results .empty").is_visible()
        view.fill("#filter-methods", "")
        view.select_option("#choose-target", "b")
        assert seen(view, "#results .numbers thead th:visible") == ["method", "b"]
        view.select_option("#choose-target", "")
        view.select_option("#choose-settings", "1")
        assert shown.count() == 1
        assert "c" in seen(view, "#results .block:visible thead th")


def test_another_metric_can_be_chosen_sorted_and_copied(browser: Any, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, render_page(study(), [], title="x")) as view:
        view.context.grant_permissions(["clipboard-read", "clipboard-write"])
        view.select_option("#choose-metric", "nll")
        view.locator("#results h3", has_text="negative log-likelihood").wait_for()
        assert column(view, 1) == ["0.600", "0.667", "0.600"]
        view.locator("#results th", has_text="average").get_by_role("button").click()
        assert column(view, 0) == ["source", "tent", "tsd"]  # lower is better, so the lowest is first
        for form, name in (("markdown", "Markdown"), ("latex", "LaTeX"), ("csv", "CSV")):
            view.locator("#results").get_by_role("button", name=name).click()
            view.locator("#said", has_text=f"copied as {name}").wait_for(state="attached")
            copied = view.evaluate("navigator.clipboard.readText()")
            assert copied == render_table(make_tables(study(), metric="nll")[0], form)


# Runs


def test_a_run_opens_with_all_its_knobs(browser: Any, tmp_path: Path) -> None:
    runs = study()
    runs[3]["settings"]["hyper"] = {"lr": 0.00125}
    with Visit(browser, tmp_path, render_page(runs, [], title="x")) as view:
        assert view.locator(".detail").count() == 0
        row = view.locator(".runs tr[data-run='3']")
        button = row.get_by_role("button")
        button.focus()
        view.keyboard.press("Enter")
        assert button.get_attribute("aria-expanded") == "true"
        detail = view.locator(f"#{button.get_attribute('aria-controls')}")
        text = " ".join(detail.inner_text().split())
        for said in ("lr 0.00125", "batch 64", "iterations 300", "accuracy 0.7", "peak_memory_mb 400", "reset false"):
            assert said in text
        view.locator(".runs th", has_text="seconds").get_by_role("button").click()
        after = "document.querySelector('.runs tr[data-run=\"3\"]').nextSibling.className"
        assert view.evaluate(after) == "detail"
        button.click()
        assert not detail.is_visible()
        assert button.get_attribute("aria-expanded") == "false"


def test_runs_are_filtered_and_counted(browser: Any, tmp_path: Path) -> None:
    runs = [*study(), record("tent", "b", 2, None)]
    with Visit(browser, tmp_path, render_page(runs, [], title="x")) as view:
        view.fill("#filter-runs", "tsd b")
        assert view.locator(".runs tbody tr:visible").count() == 3
        assert view.inner_text("#count") == "3 of 18 runs"
        view.fill("#filter-runs", "failed")
        assert column(view, 0, ".runs") == ["tent"]
        view.fill("#filter-runs", "")
        view.locator(".runs th", has_text="accuracy").get_by_role("button").click()
        assert column(view, 6, ".runs")[:3] == ["90.0", "90.0", "90.0"]
        assert column(view, 6, ".runs")[-1] == "–"


# Figures


def test_pointer_finger_and_keys_show_values(browser: Any, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, render_page(study(), figures(), title="x"), has_touch=True) as view:
        chart = view.locator("#figure-along .chart").first
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        view.mouse.move(box["x"] + box["width"] - 15, box["y"] + 60)
        assert view.inner_text("#tip").split("\n") == ["images seen: 300", "source", "52 ± 1", "tsd", "65"]
        view.mouse.move(2, 2)
        assert not view.is_visible("#tip")
        view.keyboard.press("Tab")
        chart.focus()
        assert "images seen: 300" in view.inner_text("#tip")
        view.keyboard.press("ArrowLeft")
        assert view.inner_text("#tip").split("\n") == ["images seen: 200", "tsd", "60"]
        assert "images seen: 200; tsd 60" in view.inner_text("#said")
        view.keyboard.press("Escape")
        assert not view.is_visible("#tip")
        cells = view.locator("#figure-confusion .chart")
        cells.scroll_into_view_if_needed()
        cells.tap(position={"x": 60, "y": 20})
        assert view.inner_text("#tip").split("\n") == ["true class 0, answer tsd", "90"]


@pytest.mark.parametrize("name", ["along", "targets", "confusion", "features"])
def test_every_kind_of_chart_tells_its_values_to_the_keyboard(browser: Any, tmp_path: Path, name: str) -> None:
    with Visit(browser, tmp_path, render_page(study(), figures(), title="x")) as view:
        view.keyboard.press("Tab")
        view.locator(f"#figure-{name} .chart").first.focus()
        first = view.inner_text("#tip")
        view.keyboard.press("ArrowRight")
        assert view.is_visible("#tip")
        assert view.locator(".cursor").count() == 1
        assert first
        assert view.inner_text("#said")


def test_the_legend_hides_curves_and_their_values(browser: Any, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, render_page(study(), figures(), title="x")) as view:
        marks = view.locator("#figure-along .chart .series[data-series='0']:visible")
        there = marks.count()
        assert there == 2  # in two panels
        button = view.locator("#figure-along .keys").get_by_role("button", name="source")
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        assert marks.count() == 0
        assert view.locator("#figure-along .chart .series[data-series='1']:visible").count() == 2
        view.locator("#figure-along .chart").first.hover(position={"x": 60, "y": 60})
        assert "tsd" in view.inner_text("#tip")
        assert "source" not in view.inner_text("#tip")
        button.press("Enter")
        assert marks.count() == there


# Themes, sizes, paper


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_the_button(browser: Any, tmp_path: Path, scheme: str) -> None:
    document = render_page(study(), figures(), title="x")
    with Visit(browser, tmp_path, document, color_scheme=scheme, reduced_motion="reduce") as view:
        paper = "getComputedStyle(document.body).backgroundColor"
        day, night = "rgb(255, 255, 255)", "rgb(21, 23, 27)"
        assert view.evaluate(paper) == (day if scheme == "light" else night)
        button = view.locator("#theme")
        assert button.inner_text() == ("Dark" if scheme == "light" else "Light")
        button.click()
        assert view.evaluate(paper) == (night if scheme == "light" else day)
        button.click()
        assert view.evaluate(paper) == (day if scheme == "light" else night)
        assert view.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


@pytest.mark.parametrize("width", [390, 320])
def test_a_phone_scrolls_tables_not_the_page(browser: Any, tmp_path: Path, width: int) -> None:
    mine, other = sweeps()
    runs = [*mine, *(record(m, f"a_long_target_{i}", 0, v) for i in range(8) for m, v in BOTH)]
    document = render_page(runs, figures(), title="x" * 60, against=other)
    with Visit(browser, tmp_path, document, viewport={"width": width, "height": 844}, has_touch=True) as view:
        view.locator(".runs tbody button").first.click()
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        boxes = view.evaluate("[...document.querySelectorAll('.box')].map(b => b.scrollWidth > b.clientWidth)")
        assert any(boxes)


def test_on_paper_everything_is_there_and_no_button(browser: Any, tmp_path: Path) -> None:
    runs = [*study(), record("tent", "b", 2, None)]
    with Visit(browser, tmp_path, render_page(runs, figures(), title="x"), color_scheme="dark") as view:
        view.click("#theme")
        view.click("#theme")  # chosen, not only the system's: paper is white all the same
        view.emulate_media(media="print")
        view.evaluate("dispatchEvent(new Event('beforeprint'))")
        for hidden in ("#theme", ".copy", ".tool", ".bar"):
            assert not view.locator(hidden).first.is_visible()
        assert view.get_by_text("RuntimeError: boom").is_visible()
        assert view.evaluate("getComputedStyle(document.querySelector('.box')).overflowX") == "visible"
        assert view.evaluate("getComputedStyle(document.body).color") == "rgb(22, 24, 29)"
        assert view.pdf()[:5] == b"%PDF-"


def test_paper_does_not_cut_tables(browser: Any, tmp_path: Path) -> None:
    """A4 with Chromium's margins is 718 pixels wide."""
    runs = [record(m, t, s, 0.5) for m in ("source", "tsd") for t in WIDE for s in (0, 1)]
    with Visit(browser, tmp_path, render_page(runs, [], title="x"), viewport={"width": 718, "height": 1000}) as view:
        view.emulate_media(media="print")
        assert view.evaluate("document.documentElement.scrollWidth") <= 718


def test_hostile_records_run_nothing(browser: Any, tmp_path: Path) -> None:
    others = [record(f"pl{NASTY}", NASTY, 1, 0.5)]
    document = render_page(hostile(), figures(NASTY), title=NASTY, against=others, names=(NASTY, NASTY))
    with Visit(browser, tmp_path, document) as view:
        for details in view.locator("summary").all():
            details.click()
        for button in view.locator(".runs tbody button").all():
            button.click()
        view.select_option("#choose-metric", "nll")
        view.locator("#results h3", has_text="negative log-likelihood").wait_for()
        view.keyboard.press("Tab")
        view.locator("#figure-along .chart").first.focus()
        assert "</script>" in view.inner_text("#tip")
        assert view.locator("img").count() == 0
        assert view.locator("body script:not([type])").count() == 1


def test_a_thousand_runs_open_within_two_seconds(browser: Any, tmp_path: Path) -> None:
    """The best of three: other programs may want the processor, too."""
    document = render_page(thousand(), figures(), title="x")
    best = float("inf")
    for _ in range(3):
        with Visit(browser, tmp_path, document) as view:
            view.wait_for_function("performance.getEntriesByType('navigation')[0].loadEventEnd > 0")
            entry = json.loads(view.evaluate("JSON.stringify(performance.getEntriesByType('navigation')[0])"))
            best = min(best, max(entry["loadEventEnd"], entry["domContentLoadedEventEnd"]))
            if best < 2000:
                break
    assert best < 2000, f"{best:.0f} ms"
