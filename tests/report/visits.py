"""A page open in a browser, and what one reads there."""

from pathlib import Path
from typing import Any


class Visit:
    """A page that is open; on leaving, nothing may have been complained of or asked for."""

    def __init__(self, browser: Any, folder: Path, document: str, **options: Any) -> None:
        file = folder / "report.html"
        file.write_text(document, encoding="utf-8")
        self.said: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.goto(file.as_uri())
        self.home = file.as_uri()

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self.context.close()
        if kind is None:
            assert self.said == []
            # A picture inside the file is no request that leaves.
            assert {url for url in self.asked if not url.startswith("data:")} == {self.home}


def column(view: Any, at: int, where: str = "#results .numbers") -> list[str]:
    script = "([where, at]) => [...document.querySelector(where).tBodies[0].rows].filter(r => !r.hidden)"
    found = view.evaluate(script + ".map(r => r.cells[at].innerText.split(/\\s/)[0])", [where, at])
    return [str(text) for text in found]


def seen(view: Any, where: str) -> list[str]:
    return [str(text) for text in view.locator(where).all_inner_texts() if text]
