"""The page of methods is what the methods say of themselves, and `trueup list` says the same."""

import re
from pathlib import Path

import pytest
from test_cli import invoke

import trueup
from trueup.cli.listing import all_methods, departures, methods_page, table_row

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == methods_page(), "make it anew: trueup list methods --markdown > docs/methods.md"
    assert invoke("list", "methods", "--markdown") == methods_page()


@pytest.mark.parametrize("name", trueup.list_methods())
def test_every_method_says_what_it_costs_and_when_it_breaks(name: str) -> None:
    info = trueup.get_method(name).info
    assert info.works.endswith(".")
    assert info.breaks.endswith(".")
    assert "forward" in info.passes
    assert ("image" in info.memory) == info.images


def test_the_list_says_the_same() -> None:
    text = " ".join(invoke("list", "methods").split())
    for name, tasks, method in all_methods():
        assert name in text
        assert table_row(name, tasks, method)[2] in text


SOURCE = Path(__file__).parents[2] / "src" / "trueup"
FILES = [path for path in (*(SOURCE / "methods").glob("*.py"), SOURCE / "views.py") if "Differs" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_departure_is_on_the_page(path: Path) -> None:
    shown = PAGE.read_text()
    texts = re.findall(r"Differs: (.*)", path.read_text())
    assert len(texts) == path.read_text().count("Differs")
    for text in texts:
        assert f"- *Differs:* {text.strip()}" in shown


def test_a_departure_goes_on_to_the_end_of_its_comment(tmp_path: Path) -> None:
    import importlib.util

    path = tmp_path / "departing.py"
    path.write_text("x = 1  # Differs: by one\n# Differs: it goes\n# on.\n# No more.\n")
    spec = importlib.util.spec_from_file_location("departing", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    assert departures(module) == ["by one.", "it goes on."]


def test_published_settings_are_on_the_page_with_their_source() -> None:
    for name in trueup.list_methods():
        said = trueup.get_method(name).info.settings
        assert said in PAGE.read_text()
        assert not said or re.search(r"\([\w-]+/[\w-]+\)", said)
