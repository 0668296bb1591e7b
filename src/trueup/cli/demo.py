"""`trueup demo`: the embedded benchmark from nothing to a table."""

from __future__ import annotations

import time
from pathlib import Path

import typer
from rich.console import Console

from trueup.bench.records import FILE, read_records
from trueup.bench.settings import make_sweep
from trueup.cli import options
from trueup.cli.bench import perform
from trueup.report.render import render
from trueup.report.tables import tables


def demo(
    out: str = typer.Option("demo", "--out", "-o", help="The folder for records, tables and models."),
    workers: int = options.WORKERS,
) -> None:
    """Ten digits in four styles: train on three, adapt to the fourth, with the paper's nine methods and three seeds."""
    console = Console()
    console.print(
        "Digits in four styles: handwriting, type, posters, neon. For each, a small network is trained on the other "
        "three and then meets this one without labels. Nine methods, three seeds; about two minutes.\n"
    )
    start = time.monotonic()
    fine = perform(make_sweep({"dataset": "digits"}), out, workers=workers)
    folder = Path(out)
    for form, name in (("markdown", "table.md"), ("latex", "table.tex"), ("csv", "table.csv")):
        text = "\n\n".join(render(table, form) for table in tables(read_records(folder / FILE)))
        (folder / name).write_text(text + "\n")
    console.print(f"tables in {folder / 'table'}.md, .tex and .csv; {time.monotonic() - start:.0f} s", highlight=False)
    if not fine:
        raise typer.Exit(1)
