"""`trueup reproduce`: a table or figure of the paper by name, with our numbers beside the paper's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from trueup.bench.estimate import format_duration, total_seconds
from trueup.bench.records import Record
from trueup.bench.reproduce import Reproduction, get_recipe, make_reproduction, recipes
from trueup.bench.sweep import plan
from trueup.cli.options import flag, flags_in_order, settings_of
from trueup.cli.progress import FORMS, make_grid, print_failures, print_table, run_with_bars
from trueup.report.figures import save_figure
from trueup.report.groups import Traces
from trueup.report.palette import curve_labels
from trueup.report.paper_table import compare_with_paper
from trueup.report.record_figures import make_figures
from trueup.report.render import render_table
from trueup.report.tables import Table

HELP = """Reproduce a table or figure of the TSD paper by name: run what is missing, then print ours and the paper's.

Without a name: list all. Each dataset is a folder of its name below --data (pacs, officehome, vlcs, \
domainnet, cifar10-c, cifar100-c, imagenet-c, fundus, cardiac, prostate); source models are trained as in the paper.

`--small` runs the same recipe on the embedded benchmarks with small networks: it shows the form of the result in a \
minute or two, but its numbers are not the paper's. `--dry-run` prints what would be run and how long it takes on this \
machine; it needs no data.

Finished runs are in OUT/records.jsonl and are not run again; recipes share runs, so use the same --out."""


@flags_in_order("name data small select seed limit training weights out checkpoints workers device dry_run")
def reproduce(
    name: str = typer.Argument("", help="Such as main-resnet18 or ablation; without a name all are listed."),
    data: str = typer.Option(None, "--data", help="Folder that holds a folder for each dataset."),
    small: bool = typer.Option(False, "--small", help="Use the embedded benchmarks and small networks."),
    select: str = flag("--select", help="default: no search; source: search on held-out source data, as in the paper."),
    out: str = typer.Option("paper", "--out", "-o", help="Folder for records, tables, figures and checkpoints."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the runs and estimate their time; run nothing."),
    *, checkpoints: str | None, workers: int | None, device: str, **settings: Any,
) -> None:  # fmt: skip
    """Reproduce a table or figure of the paper by name."""
    if not name:
        list_recipes()
        return
    flags = settings_of(settings | {"select": select})
    wanted = make_reproduction(name, data=data, small=small, given=flags, unread=dry_run)
    if dry_run:
        print_estimate(wanted, out, checkpoints, device)
    elif not run_reproduction(wanted, Path(out), workers=workers, checkpoints=checkpoints, device=device):
        raise typer.Exit(1)


def list_recipes() -> None:
    """Print the names and titles of all recipes."""
    grid = make_grid(("name", "title", "figures"))
    grid.columns[0].no_wrap = True
    for name, recipe in recipes().items():
        grid.add_row(name, recipe.title, ", ".join(recipe.figures))
    console = Console()
    console.print(grid)
    console.print("\n`trueup reproduce NAME --data DIR`, or --small, or --dry-run; see --help.", highlight=False)


def run_reproduction(
    wanted: Reproduction, out: Path, *, checkpoints: str | None, workers: int | None, device: str
) -> bool:
    """Run what is missing, print and write the table and figures; return False if a run failed."""
    recipe, failures, records = get_recipe(wanted.recipe), [], list[Record]()
    if not recipe.count:
        todo = plan(wanted, out, checkpoints=checkpoints, device=device)
        summary = run_with_bars(todo, workers=workers, device=device)
        records, failures = summary.records, summary.failures
    console = Console()
    table = table_of(wanted, records)
    print_table(table)
    print_failures(failures)
    out.mkdir(parents=True, exist_ok=True)
    path = out / (f"{wanted.recipe}-small" if wanted.small else wanted.recipe)
    for form, suffix in FORMS.items():
        Path(f"{path}{suffix}").write_text(render_table(table, form))
    console.print(f"table in {path}.md, .tex and .csv", highlight=False, soft_wrap=True)
    if recipe.figures and records:
        specs = make_figures(records, Traces(out))
        labels, folder = curve_labels(specs), out / "figures" / path.name
        chosen = [spec for spec in specs if spec.name.startswith(tuple(recipe.figures))]
        files = [save_figure(spec, folder, labels=labels)[0] for spec in chosen]
        console.print(f"figures in {', '.join(map(str, files))}; also .svg and .pdf", highlight=False, soft_wrap=True)
    return not failures


def table_of(wanted: Reproduction, records: list[Record]) -> Table:
    """Make the recipe's table, with our numbers beside the paper's."""
    recipe = get_recipe(wanted.recipe)
    entries = wanted.entries(wanted.count() if recipe.count else None)
    notes = [" ".join(recipe.note.split())] if recipe.note else []
    if wanted.small:
        stand_ins = ", ".join(wanted.dataset)
        notes.insert(0, f"small: on {stand_ins}, with small networks; differences from the paper have no meaning")
    title = f"{recipe.title}: ours, the paper's, the difference" if recipe.table else recipe.title
    return compare_with_paper(title, entries, records, notes=notes, literature=recipe.numbers.get("literature", ()))


def print_estimate(wanted: Reproduction, out: str, checkpoints: str | None, device: str) -> None:
    """Print what would be run and an estimate of its time."""
    console = Console(soft_wrap=True)
    recipe = get_recipe(wanted.recipe)
    console.print(f"[bold]{recipe.title}[/]", highlight=False)
    if recipe.count:
        console.print("nothing to run: this recipe counts images")
        return
    todo = plan(wanted, out, checkpoints=checkpoints, device=device)
    datasets = {name: todo.open(name, wanted.reading_of(name)) for name in wanted.dataset}
    grid = make_grid(("dataset", "network", "methods"), ("targets", "seeds", "runs", "done"))
    groups: dict[tuple[str, str], list[Any]] = {}
    for run in todo.runs:
        groups.setdefault((run.dataset, run.network), []).append(run)
    for key, runs in groups.items():
        variants = Counter(r.method for r in runs if (r.target, r.seed) == (runs[0].target, runs[0].seed))
        methods = ", ".join(name if n == 1 else f"{name} ×{n}" for name, n in variants.items())
        counts = (len({r.target for r in runs}), len({r.seed for r in runs}), len(runs))
        grid.add_row(*key, methods, *map(str, counts), str(sum(r.digest() in todo.done for r in runs)))
    console.print(grid)
    absent = [name for name in wanted.datasets() if wanted.root_of(name) is None and not wanted.small]
    if absent:
        console.print(f"not found, taken from dataset cards: {', '.join(absent)} (give --data DIR)", highlight=False)
    jobs = [job.recipe for job in todo.trainings.values() if job.recipe is not None]
    with console.status("timing the networks"):
        time = total_seconds(todo.waiting, jobs, datasets, device)
    work = f"{len(jobs)} source models to train, {len(todo.waiting)} of {len(todo.runs)} runs to do"
    console.print(f"{work}: about {format_duration(time)} of network time on this machine's {device}", highlight=False)
