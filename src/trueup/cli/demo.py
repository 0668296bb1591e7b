"""`trueup demo`: an embedded benchmark, from training to tables and an HTML page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from trueup.bench.records import FILE, read_records
from trueup.bench.settings import check_known, make_sweep
from trueup.bench.sweep import plan
from trueup.cli.bench import run_and_print
from trueup.cli.options import Flags
from trueup.cli.progress import write_tables
from trueup.cli.report import write_page
from trueup.report.tables import make_tables

TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "classification": (
        {"dataset": "digits"},
        "Digits in four styles: handwriting, type, posters, neon. For each style, a small network is trained on the "
        "other three and then adapts to this one without labels. Nine methods, three seeds; about two minutes.\n",
    ),
    "segmentation": (
        {"dataset": "fundus-sim", "method": ["source", "bn", "tent", "tsd"]},
        "Optic disc and cup in simulated photographs of the eye. A small U-Net is trained on a clinic's camera and "
        "then adapts to those of a screening van and of a handheld device, without masks. Four methods, three seeds; "
        "about two minutes.\n",
    ),
}


def demo(
    task: str = typer.Option("classification", "--task", help="classification (digits) or segmentation (eyes)."),
    out: str = typer.Option("demo", "--out", "-o", help="Folder for records, tables, figures and models."),
    workers: int = Flags.workers,
) -> None:
    """Train on some domains, adapt to others, print the table: digits in four styles, or masks of the optic disc."""
    check_known(task, TASKS, "task")
    settings, story = TASKS[task]
    console = Console()
    console.print(story)
    start = time.monotonic()
    folder = Path(out)
    summary = run_and_print(plan(make_sweep(settings), folder), workers=workers)
    records = read_records(folder / FILE)
    write_tables(make_tables(records), folder / "table")
    lines = [f"tables in {folder / 'table'}.md, .tex and .csv", *write_page(records, folder, figures=True)]
    console.print("; ".join(lines), highlight=False, soft_wrap=True)
    console.print(f"{time.monotonic() - start:.0f} s; open the page to see all results", highlight=False)
    if summary.failures:
        raise typer.Exit(1)
