"""`trueup list`: what there is."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from trueup.core.registry import get_method, list_methods
from trueup.data.cards import CARDS
from trueup.data.streams import STREAMS

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


def _methods() -> Table:
    table = _table("Methods", "name", "paper", "updates", "statistics")
    for name in list_methods():
        method = get_method(name)()
        hyper = method.hyperparameters()
        table.add_row(name, method.info.paper, str(hyper.get("params", "–")), method.norm)
    return table


def _hyper() -> Table:
    table = _table("Hyper-parameters and their defaults", "method", "values")
    for name in list_methods():
        table.add_row(name, ", ".join(f"{k}={v!r}" for k, v in get_method(name)().hyperparameters().items()))
    return table


def _datasets() -> Table:
    table = _table("Datasets", "name", "title", "classes", "domains", "images")
    for card in CARDS.values():
        table.add_row(card.name, card.title, str(card.classes), str(len(card.domains)), f"{card.images:,}")
    table.add_row("folder", "your own: domain/class/image", "any", "any", "any")
    return table


def _streams() -> Table:
    table = _table("Streams", "name", "what comes when")
    for name, function in STREAMS.items():
        table.add_row(name, (function.__doc__ or "").strip().splitlines()[0])
    return table
