"""The page of methods is what the methods say of themselves, and `trueup list` says the same."""

from pathlib import Path

import pytest
from test_cli import invoke

import trueup
from trueup.cli.methods_page import each, page, row

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "make it anew: trueup list methods --markdown > docs/methods.md"
    assert invoke("list", "methods", "--markdown") == page()


@pytest.mark.parametrize("name", trueup.list_methods())
def test_every_method_says_what_it_costs_and_when_it_breaks(name: str) -> None:
    info = trueup.get_method(name).info
    assert info.works.endswith(".")
    assert info.breaks.endswith(".")
    assert "forward" in info.passes
    assert ("image" in info.memory) == info.images


def test_the_list_says_the_same() -> None:
    text = " ".join(invoke("list", "methods").split())
    for name, tasks, method in each():
        assert name in text
        assert row(name, tasks, method)[2] in text
