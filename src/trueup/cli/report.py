"""`trueup report`: tables of records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from trueup.bench.records import Record, read_records
from trueup.report.render import render
from trueup.report.tables import tables

SUFFIX = {"markdown": ".md", "latex": ".tex", "csv": ".csv", "terminal": ".txt"}


def report(
    folder: str = typer.Argument("runs", help="A folder of sweeps, or a records file."),
    form: str = typer.Option("terminal", "--form", "-f", help="terminal, markdown, latex or csv."),
    metric: str = typer.Option(
        None, "--metric", help="accuracy, macro, ece, nll; dice, hd95, assd; seconds, images_per_second, …"
    ),
    output: str = typer.Option("", "--output", "-O", help="Write to this file instead of the terminal."),
) -> None:
    """Print the tables of all records: mean ± deviation over seeds, best and second best, gain over source."""
    records = read_records(folder)
    if form == "terminal" and not output:
        print_tables(records, metric)
        return
    text = "\n\n".join(render(table, form) for table in tables(records, metric=metric)) + "\n"
    if output:
        Path(output).write_text(text)
        typer.echo(f"wrote {output}")
    else:
        typer.echo(text, nl=False)


def print_tables(records: Sequence[Record], metric: str | None = None) -> None:
    """Tables for the eye; in colour where the terminal has some."""
    console = Console()
    for table in tables(records, metric=metric):
        typer.echo(render(table, "terminal", color=console.is_terminal, width=max(60, console.width)))
        typer.echo()
