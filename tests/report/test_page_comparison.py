"""The comparison of two sweeps."""

from pages import cells, read, sweeps
from studies import record

from trueup.report.page import render_page


def test_a_comparison_by_hand() -> None:
    mine, other = sweeps()
    root = read(render_page(mine, [], title="x", against=other, names=("new", "old")))
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
    root = read(render_page(mine, [], title="x", against=other))
    (section,) = root.all("section", id="comparison")
    assert cells(next(section.all("table")))[1] == ["tsd", "+10.0", "+10.0"]
    assert len(list(section.all("details"))) == 2


def test_sweeps_without_a_common_run_say_so() -> None:
    root = read(render_page([record("tsd", "a", 0, 0.6)], [], title="x", against=[record("tsd", "b", 0, 0.6)]))
    (section,) = root.all("section", id="comparison")
    assert "nothing to compare" in next(section.all("p")).text
    assert not list(section.all("table"))
