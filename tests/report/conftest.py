"""A real browser for the tests of the page: Debian's Chromium, driven by Playwright."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
    if PROGRAM is None:
        pytest.skip("needs a browser: install the Debian package chromium")
    # Root has no sandbox to be put into.
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=PROGRAM, args=flags)
        yield chromium
        chromium.close()
