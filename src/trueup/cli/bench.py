"""`trueup bench`: a sweep, from a file or from flags."""

from __future__ import annotations

import typer
from rich.console import Console

from trueup.bench.records import FILE
from trueup.bench.settings import make_sweep, read_settings
from trueup.bench.sweep import Plan, SweepSummary, plan, sort_records
from trueup.cli import options
from trueup.cli.progress import make_grid, print_counts, print_failures, run_with_bars
from trueup.cli.report import print_tables

HELP = """Compare methods: datasets × networks × targets × streams × batches × seeds × methods.

Finished runs are in OUT/records.jsonl and are not run again, so a stopped sweep continues. By default: the embedded \
digits, the paper's nine methods, three seeds."""


def bench(
    file: str = typer.Argument("", help="A YAML file of settings; flags override it."),
    dataset: list[str] = options.DATASET,
    root: str = options.ROOT,
    target: list[str] = options.TARGET,
    network: list[str] = options.NETWORK,
    weights: str = options.WEIGHTS,
    checkpoint: str = options.CHECKPOINT,
    training: list[str] = options.TRAIN,
    resize: str = options.RESIZE,
    limits: options.Limits = options.RANGE,
    mean: str = options.MEAN,
    std: str = options.STD,
    grey: bool = options.GREY,
    method: list[str] = options.METHOD,
    seed: list[int] = options.SEED,
    stream: list[str] = options.STREAM,
    stream_options: list[str] = options.OPTION,
    batch: list[int] = options.BATCH,
    limit: int = options.LIMIT,
    reset: bool = options.RESET,
    search: bool = typer.Option(False, "--search", help="Search hyper-parameters on held-out source data."),
    oracle: bool = typer.Option(False, "--oracle", help="Search them on target labels: an upper bound only."),
    plugin: list[str] = options.PLUGIN,
    out: str = options.OUT,
    checkpoints: str = options.CHECKPOINTS,
    workers: int = options.WORKERS,
    device: str = options.DEVICE,
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the runs and their state without running them."),
) -> None:
    """Compare methods: datasets × networks × targets × streams × batches × seeds × methods."""
    training = options.training_settings(training, resize, limits, mean, std, grey)
    select = [name for name, wanted in (("source", search), ("oracle", oracle)) if wanted] or None
    flags = options.passed(
        dataset=dataset, root=root, target=target, network=network, weights=weights, checkpoint=checkpoint,
        training=training, method=method, seed=seed, stream=stream, stream_options=stream_options, batch=batch,
        limit=limit, reset=reset, select=select, plugin=plugin,
    )  # fmt: skip
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
