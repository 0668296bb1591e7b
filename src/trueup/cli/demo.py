"""`trueup demo`: the embedded benchmarks from nothing to a table, and a page to look at."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from trueup.bench.records import FILE, read_records
from trueup.bench.settings import check_known, make_sweep
from trueup.cli import options
from trueup.cli.bench import run_and_print
from trueup.cli.report import write_page
from trueup.report.render import render
from trueup.report.tables import tables

TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "classification": (
        {"dataset": "digits"},
        "Digits in four styles: handwriting, type, posters, neon. For each, a small network is trained on the other "
        "three and then meets this one without labels. Nine methods, three seeds; about two minutes.\n",
    ),
    "segmentation": (
        {"dataset": "fundus-sim", "method": ["source", "bn", "tent", "tsd"]},
        "Optic disc and cup in drawn photographs of the eye. A small U-Net is trained on a clinic's camera and then "
        "meets those of a screening van and of a handheld device, without masks. Four methods, three seeds; about "
        "two minutes.\n",
    ),
}


def demo(
    task: str = typer.Option("classification", "--task", help="classification (digits) or segmentation (eyes)."),
    out: str = typer.Option("demo", "--out", "-o", help="The folder for records, tables, pictures and models."),
    workers: int = options.WORKERS,
) -> None:
    """Train on some domains, adapt to others, print the table: digits in four styles, or masks of the optic disc."""
    check_known(task, TASKS, "task")
    settings, story = TASKS[task]
    console = Console()
    console.print(story)
    start = time.monotonic()
    fine = run_and_print(make_sweep(settings), out, workers=workers)
    folder = Path(out)
    records = read_records(folder / FILE)
    for form, name in (("markdown", "table.md"), ("latex", "table.tex"), ("csv", "table.csv")):
        text = "\n\n".join(render(table, form) for table in tables(records))
        (folder / name).write_text(text + "\n")
    said = [f"tables in {folder / 'table'}.md, .tex and .csv", *write_page(records, folder, figures=True)]
    console.print("; ".join(said), highlight=False, soft_wrap=True)
    console.print(f"{time.monotonic() - start:.0f} s; open the page to look at it all", highlight=False)
    if not fine:
        raise typer.Exit(1)
