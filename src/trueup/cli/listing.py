"""`trueup list`: methods, datasets and streams."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from trueup.cli.methods_page import HEADS, all_methods, methods_page, table_row
from trueup.data.cards import CARDS, OWN
from trueup.data.datasets.mask_datasets import NAMES
from trueup.data.streams import STREAMS

KINDS = ("methods", "datasets", "streams", "hyper")


def list_all(
    kind: str = typer.Argument(
        "", help="methods, datasets, streams or hyper (hyper-parameters); default: all but hyper."
    ),
    markdown: bool = typer.Option(False, "--markdown", help="Print the methods as a Markdown page."),
) -> None:
    """List the methods, datasets and streams."""
    from trueup.bench.settings import check_known

    if kind:
        check_known(kind, KINDS, "list")
    if markdown:
        typer.echo(methods_page(), nl=False)
        return
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
    table = _table("Methods", *HEADS[:-1])
    for column, width in zip(table.columns, (10, 10, 10, 11, 11, 7, 6), strict=True):
        column.min_width, column.overflow = width, "fold"
    for name, tasks, method in all_methods():
        table.add_row(*table_row(name, tasks, method)[:-1])
    return table


def _hyper() -> Table:
    table = _table("Hyper-parameters and their defaults", "method", "tasks", "values")
    for name, tasks, method in all_methods():
        table.add_row(name, ", ".join(tasks), ", ".join(f"{k}={v!r}" for k, v in method.hyperparameters().items()))
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
    table = _table("Streams", "name", "order of the images")
    for name, function in STREAMS.items():
        table.add_row(name, (function.__doc__ or "").strip().splitlines()[0])
    return table
