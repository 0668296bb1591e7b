"""`trueup bench`: a sweep, from a file or from flags."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console

from trueup.bench.records import FILE
from trueup.bench.settings import make_sweep, read_settings
from trueup.bench.sweep import Plan, SweepSummary, plan, sort_records
from trueup.cli.options import MODELS, PICTURES, flags_in_order, settings_of
from trueup.cli.progress import make_grid, print_counts, print_failures, run_with_bars
from trueup.cli.report import print_tables

HELP = """Compare methods: datasets × networks × targets × streams × batches × seeds × methods.

Finished runs are in OUT/records.jsonl and are not run again, so a stopped sweep continues. By default: the embedded \
digits, the paper's nine methods, three seeds."""


@flags_in_order(
    f"file {MODELS} {PICTURES} method seed stream stream_options batch limit reset search oracle plugin "
    "out checkpoints workers device dry_run"
)
def bench(
    file: str = typer.Argument("", help="A YAML file of settings; flags override it."),
    search: bool = typer.Option(False, "--search", help="Search hyper-parameters on held-out source data."),
    oracle: bool = typer.Option(False, "--oracle", help="Search them on target labels: an upper bound only."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the runs and their state without running them."),
    *, out: str, checkpoints: str | None, workers: int | None, device: str, **settings: Any,
) -> None:  # fmt: skip
    """Compare methods: datasets × networks × targets × streams × batches × seeds × methods."""
    select = [name for name, wanted in (("source", search), ("oracle", oracle)) if wanted]
    flags = settings_of(settings | {"select": select})
    sweep = make_sweep(read_settings(file, flags) if file else flags)
    todo = plan(sweep, out, checkpoints=checkpoints, device="cpu" if dry_run else device)
    if dry_run:
        print_plan(todo)
    elif run_and_print(todo, workers=workers, device=device).failures:
        raise typer.Exit(1)


def run_and_print(todo: Plan, *, workers: int | None = None, device: str = "cpu") -> SweepSummary:
    """Run a plan with progress bars, and print its tables and failures."""
    summary = run_with_bars(todo, workers=workers, device=device)
    if summary.records:
        print_tables(sort_records(summary.records, todo.runs))
    print_failures(summary.failures)
    Console().print(f"{len(summary.records)} records in {todo.folder / FILE}", highlight=False)
    return summary


def print_plan(todo: Plan) -> None:
    """Print the runs and their state; settings that all runs share are printed once."""
    columns = ("dataset", "target", "network", "method", "seed", "stream", "batch", "select")
    rows = [{name: str(getattr(run, name)) for name in columns} for run in todo.runs]
    shared = {name: rows[0][name] for name in columns if len({row[name] for row in rows}) == 1}
    shown = [name for name in columns if name not in shared]
    table = make_grid(("id", *shown, "state"))
    for column in table.columns:
        column.no_wrap = True
    waiting = [job for job in todo.jobs if job.recipe is not None and job.recipe.digest() in todo.trainings]
    untrained = {run.digest() for job in waiting for run in job.runs}
    for run, row in zip(todo.runs, rows, strict=True):
        key = run.digest()
        state = "[green]done[/]" if key in todo.done else "to run, model to train" if key in untrained else "to run"
        table.add_row(key[:8], *(row[name] for name in shown), state)
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in shared.items()), highlight=False)
    console.print(table)
    print_counts(todo)
