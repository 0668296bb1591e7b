"""`trueup demo`: the embedded benchmarks from nothing to a table, and for masks to a picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from trueup.bench.records import FILE, read_records
from trueup.bench.settings import Sweep, known, make_sweep
from trueup.bench.sweep import CHECKPOINTS
from trueup.cli import options
from trueup.cli.bench import perform
from trueup.cli.progress import bar
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
    known(task, TASKS, "task")
    settings, story = TASKS[task]
    console = Console()
    console.print(story)
    start = time.monotonic()
    sweep = make_sweep(settings)
    fine = perform(sweep, out, workers=workers)
    folder = Path(out)
    for form, name in (("markdown", "table.md"), ("latex", "table.tex"), ("csv", "table.csv")):
        text = "\n\n".join(render(table, form) for table in tables(read_records(folder / FILE)))
        (folder / name).write_text(text + "\n")
    said = f"tables in {folder / 'table'}.md, .tex and .csv"
    if task == "segmentation" and fine:
        picture(sweep, folder)
        said += f", a picture in {folder / 'masks.png'}"
    console.print(f"{said}; {time.monotonic() - start:.0f} s", highlight=False)
    if not fine:
        raise typer.Exit(1)


def picture(sweep: Sweep, folder: Path) -> None:
    """The last images of each target's stream, with what each method draws on them, for the first seed."""
    from trueup.bench.pictures import draw, examples
    from trueup.bench.work import Site, make_stage
    from trueup.cli.train import torch_threads
    from trueup.core.registry import make_method
    from trueup.source.checkpoints import Store

    dataset = sweep.open(sweep.dataset[0])
    runs = [run for run in sweep.runs() if run.seed == sweep.seed[0]]
    methods = {run.method: make_method(run.method, run.hyper, dataset.task) for run in runs}
    store = Store(folder / CHECKPOINTS)
    groups = {}
    for run in {run.target: run for run in runs}.values():
        stage = make_stage(run, dataset, store, Site(store.folder, threads=torch_threads()))
        with bar(f"drawing {run.target}") as advance:
            groups[run.target] = examples(stage, list(methods.values()), 3, advance)
    draw(groups, folder / "masks.png")
