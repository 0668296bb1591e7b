"""`trueup stress`: what methods do when things go wrong, scenario by scenario."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from trueup.bench.records import FILE, Record
from trueup.bench.settings import read_settings
from trueup.bench.stress import MEANING, SCENARIOS, Stress, label_of, make_stress, scenario_of
from trueup.bench.sweep import Plan, order_of, plan, run_sweep
from trueup.cli import options
from trueup.cli.options import given
from trueup.cli.progress import SweepBars
from trueup.report.heatmap import heatmap
from trueup.report.render import render
from trueup.report.stress import StressTest, stress_tests

SCENARIO = typer.Option(None, "--scenario", help=f"One of {', '.join(SCENARIOS)}; again for more; all if left out.")
QUICK = typer.Option(False, "--quick", help="A first look: the first seed and target, 256 images, a shorter long.")
HELP = """Put methods under stress and compare each with the frozen source: a table and a picture.

Scenarios change the order of the images (dirichlet, class-sorted, few-classes, mixed), the size of batches (batch-1 \
to batch-16) or the length of the stream (long), or put rows into it that nobody is scored on: one that is not a \
number (nan) or far too large (huge), images of no class (ood), images that the source gets wrong (replay), images \
made to do harm (crafted). `--dry-run` says what each does.

The number to look at is `worst`: how far a method falls below a model that does not adapt. The methods are the \
paper's and `tsd:preset=safe`, if none are given; `source` is always there.

Your own model and images, from folders domain/class/image: `trueup stress -d folder -r DIR -n resnet50 --checkpoint \
model.pt -m tent -m tsd:preset=safe --quick`

Finished runs are in OUT/records.jsonl and are not run again; a test that was stopped goes on."""
FORMS = {"markdown": ".md", "latex": ".tex", "csv": ".csv"}


def stress(
    file: str = typer.Argument("", help="A YAML file of settings; flags take the place of what it says."),
    dataset: list[str] = options.DATASET,
    root: str = options.ROOT,
    target: list[str] = options.TARGET,
    network: list[str] = options.NETWORK,
    weights: str = options.WEIGHTS,
    checkpoint: str = options.CHECKPOINT,
    training: list[str] = options.TRAIN,
    method: list[str] = options.METHOD,
    seed: list[int] = options.SEED,
    scenario: list[str] = SCENARIO,
    limit: int = options.LIMIT,
    quick: bool = QUICK,
    plugin: list[str] = options.PLUGIN,
    out: str = typer.Option("stress", "--out", "-o", help="The folder for records, tables, picture and checkpoints."),
    checkpoints: str = options.CHECKPOINTS,
    workers: int = options.WORKERS,
    device: str = options.DEVICE,
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the scenarios and what is done; run nothing."),
) -> None:
    """Put methods under stress and compare each with the frozen source."""
    flags = given(
        dataset=dataset, root=root, target=target, network=network, weights=weights, checkpoint=checkpoint,
        training=training, method=method, seed=seed, scenario=scenario, limit=limit, quick=quick or None, plugin=plugin,
    )  # fmt: skip
    test = make_stress(read_settings(file, flags) if file else flags)
    todo = plan(test, out, checkpoints=checkpoints)
    for note in test.left_out():
        Console().print(note, highlight=False, style="dim")
    if dry_run:
        print_scenarios(todo)
    elif not perform(test, todo, out, workers=workers, checkpoints=checkpoints, device=device):
        raise typer.Exit(1)


def perform(
    test: Stress, todo: Plan, out: str, *, workers: int | None, checkpoints: str | None, device: str = "cpu"
) -> bool:
    """Run a stress test with bars, show what came of it and name what failed; False if anything did."""
    bars, console = SweepBars(todo), Console()
    with bars.progress:
        summary = run_sweep(test, out, workers=workers, checkpoints=checkpoints, device=device, tell=bars)
    said = show(order_of(summary.records, todo.runs), Path(out)) if summary.records else []
    for record in summary.failures:
        run = record["settings"]
        name = f"{run['method']} in {scenario_of(run)} on {run['dataset']}/{run['target']}, seed {run['seed']}"
        console.print(f"[red]failed:[/] {name}: {record['error']}", highlight=False, soft_wrap=True)
    said = [f"{len(summary.records)} records in {Path(out) / FILE}", *said]
    console.print("\n".join(said), highlight=False, soft_wrap=True)
    return not summary.failures


def show(records: Sequence[Record], folder: Path) -> list[str]:
    """Print the tables of each dataset and network, write them and the picture into the folder: where they are."""
    console, said = Console(), []
    tests = stress_tests(records, scenario_of, order=list(SCENARIOS), label=label_of)
    for test in tests:
        for table in test.tables()[:2]:
            typer.echo(render(table, "terminal", color=console.is_terminal, width=max(60, console.width)))
        name = "stress" if len(tests) == 1 else f"stress-{_plain(test)}"
        for form, suffix in FORMS.items():
            text = "\n\n".join(render(table, form) for table in test.tables())
            (folder / f"{name}{suffix}").write_text(text + "\n")
        said.append(f"tables in {folder / name}.md, .tex and .csv")
        said.append(f"picture in {' and '.join(map(str, heatmap(test, folder / f'{name}.png')))}")
    return said


def _plain(test: StressTest) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in test.title).split())


def print_scenarios(todo: Plan) -> None:
    """What each scenario means, and how many of its runs are done."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("scenario", "what happens"):
        table.add_column(name)
    for name in ("runs", "done"):
        table.add_column(name, justify="right")
    of = [(scenario_of(run.model_dump(mode="json")), run.digest() in todo.done) for run in todo.runs]
    for name in dict.fromkeys(scenario for scenario, _ in of):
        states = [done for scenario, done in of if scenario == name]
        table.add_row(name, MEANING[name], str(len(states)), str(sum(states)))
    console = Console()
    console.print(table)
    methods = dict.fromkeys(label_of(run.model_dump(mode="json")) or run.method for run in todo.runs)
    console.print(f"methods: {'; '.join(methods)}", highlight=False)
    counts = f"{len(todo.runs)} runs: {len(todo.done_here)} done, {len(todo.waiting)} to run; "
    console.print(f"{counts}{len(todo.trainings)} source models to train", highlight=False)
