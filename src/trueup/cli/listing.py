"""`trueup list`: methods, datasets and streams."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from trueup.bench.settings import check_known
from trueup.cli.methods_page import HEADS, all_methods, methods_page, table_row
from trueup.cli.progress import make_grid
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
    if kind:
        check_known(kind, KINDS, "list")
    if markdown:
        typer.echo(methods_page(), nl=False)
        return
    tables = {"methods": _methods, "datasets": _datasets, "streams": _streams, "hyper": _hyper}
    for name, table in tables.items():
        if kind == name or (not kind and name != "hyper"):
            Console().print(table())


def _methods() -> Table:
    table = make_grid(HEADS[:-1], title="Methods")
    for column, width in zip(table.columns, (10, 10, 10, 11, 11, 7, 6), strict=True):
        column.min_width, column.overflow = width, "fold"
    for name, tasks, method in all_methods():
        table.add_row(*table_row(name, tasks, method)[:-1])
    return table


def _hyper() -> Table:
    table = make_grid(("method", "tasks", "values"), title="Hyper-parameters and their defaults")
    for name, tasks, method in all_methods():
        table.add_row(name, ", ".join(tasks), ", ".join(f"{k}={v!r}" for k, v in method.hyperparameters().items()))
    return table


def _datasets() -> Table:
    table = make_grid(("name", "title", "classes", "domains", "size"), title="Datasets")
    for card in CARDS.values():
        size = f"{card.images:,} {'cases' if card.name in NAMES else 'images'}"
        table.add_row(card.name, card.title, str(card.classes), str(len(card.domains)), size)
    for name, layout in OWN.items():
        table.add_row(name, f"your own: {layout}", "any", "any", "any")
    return table


def _streams() -> Table:
    table = make_grid(("name", "order of the images"), title="Streams")
    for name, function in STREAMS.items():
        table.add_row(name, (function.__doc__ or "").strip().splitlines()[0])
    return table
