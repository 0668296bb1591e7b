"""Code in the README and every example runs as it stands."""

import re
import runpy
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [(page.name, "\n\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))) for page in PAGES]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), [b for b in BLOCKS if b[1]], ids=[b[0] for b in BLOCKS if b[1]])
def test_code_on_the_page_runs(page: str, code: str, tmp_path: Path) -> None:
    """The blocks of a page run one after the other, in an empty folder."""
    warm.run("-c", code, cwd=tmp_path)


def test_no_page_has_a_gap() -> None:
    """Marks where a figure is still to come."""
    assert [page.name for page in PAGES if "@@" in page.read_text()] == []


# Examples that take minutes, and what makes them short: all methods on 60 batches of 64 images, or on 2 of 8.
LENGTHS = {"compare_methods.py": ("SHIFT = (0, 1, 2), 60, 64,", "SHIFT = (0, 1, 2), 2, 8,")}


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    if path.name in LENGTHS:
        code, (long, short) = path.read_text(), LENGTHS[path.name]
        assert code.count(long) == 1
        path = tmp_path / path.name
        path.write_text(code.replace(long, short))
    assert warm.run(path, cwd=tmp_path).strip()


RATIOS = ("bank.py", "imports.py", "loading.py", "pixels.py", "step.py", "throughput.py", "growth.py", "parts.py")
RATIOS += ("sketch.py", "ways.py", "stream.py", "unwrap.py", "undo.py")
MEASURED = dict.fromkeys(RATIOS, "ratio") | {"peak.py": "of that of all"}
MEASURED |= {
    "guard.py": "free signals",
    "collapse.py": "alarms in",
    "alarm.py": "feature_shift",
    "memory.py": "MB by the end",
}
MEASURED |= {
    "passes.py": "forwards",
    "field.py": "| `memo` |",
    "roid.py": "prior=logits",
    "waiting.py": "waits",
    "draw.py": "panels",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_benchmark_runs(name: str) -> None:
    assert MEASURED[name] in warm.run(ROOT / "benchmarks" / name, "--quick")


@pytest.mark.parametrize("name", ["field", "roid"])
def test_the_field_is_shown_as_it_was_measured(name: str) -> None:
    assert (ROOT / "benchmarks" / "results" / name / "table.md").read_text() in (ROOT / "docs" / "field.md").read_text()


def test_speed_is_shown_as_it_was_measured() -> None:
    """The tables are those of the records, and on the page."""
    tables = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))["page"]()
    assert (ROOT / "benchmarks" / "results" / "speed.md").read_text() == tables
    shown = (ROOT / "docs" / "fast.md").read_text()
    for table in tables.strip().split("\n\n"):
        assert table in shown


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
