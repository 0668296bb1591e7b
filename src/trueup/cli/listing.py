"""`trueup list`: what there is."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.console import Console
from rich.table import Table

from trueup.core.method import Method
from trueup.core.registry import get_method, list_methods
from trueup.data.cards import CARDS, OWN
from trueup.data.datasets.masked import NAMES
from trueup.data.streams import STREAMS

TASKS = {"classification": "images", "segmentation": "pixels"}
KINDS = ("methods", "datasets", "streams", "hyper")


def list_all(
    kind: str = typer.Argument(
        "", help="methods, datasets, streams or hyper (hyper-parameters); all but the last if left out."
    ),
) -> None:
    """List the methods, datasets and streams."""
    from trueup.bench.settings import known

    if kind:
        known(kind, KINDS, "list")
    console = Console()
    if kind in ("", "methods"):
        console.print(_methods())
    if kind in ("", "datasets"):
        console.print(_datasets())
    if kind in ("", "streams"):
        console.print(_streams())
    if kind == "hyper":
        console.print(_hyper())


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column)
    return table


def _each() -> Iterator[tuple[str, str, Method]]:
    """Every method with what it is for; one that has a class for images and another for pixels comes twice."""
    for name in list_methods():
        classes: dict[type[Method], list[str]] = {}
        for task, word in TASKS.items():
            if name in list_methods(task):
                classes.setdefault(get_method(name, task), []).append(word)
        for cls, words in classes.items():
            yield name, ", ".join(words), cls()


def _methods() -> Table:
    table = _table("Methods", "name", "tasks", "paper", "updates", "statistics")
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, tasks, method in _each():
        updates = str(method.hyperparameters().get("params", "–"))
        rows.setdefault((name, method.info.paper, updates, method.norm), []).append(tasks)
    for (name, *rest), words in rows.items():
        table.add_row(name, ", ".join(words), *rest)
    return table


def _hyper() -> Table:
    table = _table("Hyper-parameters and their defaults", "method", "tasks", "values")
    for name, tasks, method in _each():
        table.add_row(name, tasks, ", ".join(f"{k}={v!r}" for k, v in method.hyperparameters().items()))
    return table


def _datasets() -> Table:
    table = _table("Datasets", "name", "title", "classes", "domains", "size")
    for card in CARDS.values():
        size = f"{card.images:,} {'cases' if card.name in NAMES else 'images'}"
        table.add_row(card.name, card.title, str(card.classes), str(len(card.domains)), size)
    for name, layout in OWN.items():
        table.add_row(name, f"your own: {layout}", "any", "any", "any")
    return table


def _streams() -> Table:
    table = _table("Streams", "name", "what comes when")
    for name, function in STREAMS.items():
        table.add_row(name, (function.__doc__ or "").strip().splitlines()[0])
    return table
