"""`trueup stress`: methods in difficult scenarios, compared with the frozen source."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from trueup.bench.records import FILE, Record
from trueup.bench.settings import read_settings, validate_settings
from trueup.bench.stress import SCENARIOS, Stress, label_of, scenario_of
from trueup.bench.sweep import Plan, plan, sort_records
from trueup.cli import options
from trueup.cli.progress import FORMS, make_grid, print_counts, print_failures, print_table, run_with_bars, write_tables
from trueup.report.heatmap import heatmap
from trueup.report.stress_tables import StressTest, stress_tests

SCENARIO = typer.Option(None, "--scenario", help=f"One of {', '.join(SCENARIOS)}; repeatable; default all.")
QUICK = typer.Option(False, "--quick", help="A quick test: first seed and target, 256 images, a shorter `long`.")
HELP = """Test methods in difficult scenarios and compare each with the frozen source: a table and a figure.

Scenarios change the order of the images (dirichlet, class-sorted, few-classes, mixed), the batch size (batch-1 to \
batch-16) or the length of the stream (long), or add rows that are not scored: NaN (nan) or huge values (huge), images \
of no class (ood), images that the source gets wrong (replay), adversarial images (crafted). `--dry-run` describes each.

The most important number is `worst`: how far a method falls below a model that does not adapt. Default methods: the \
paper's and `tsd:preset=safe`; `source` is always included.

Your own model and images, from folders domain/class/image: `trueup stress -d folder -r DIR -n resnet50 --checkpoint \
model.pt -m tent -m tsd:preset=safe --quick`

Finished runs are in OUT/records.jsonl and are not run again, so a stopped test continues.

With --json: ok, left_out, files, failures and tests, one for each dataset and network. Each method has for each \
scenario mean, runs, difference (from the source, mean over runs), lowest (of a single run) and where that was, as \
fractions of 1. With --dry-run: scenarios, methods, and the numbers of runs, finished runs, and models to train."""


def stress(
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
    scenario: list[str] = SCENARIO,
    limit: int = options.LIMIT,
    quick: bool = QUICK,
    plugin: list[str] = options.PLUGIN,
    out: str = typer.Option("stress", "--out", "-o", help="Folder for records, tables, figure and checkpoints."),
    checkpoints: str = options.CHECKPOINTS,
    workers: int = options.WORKERS,
    device: str = options.DEVICE,
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the scenarios and their state without running them."),
    as_json: bool = options.JSON,
) -> None:
    """Test methods in difficult scenarios and compare each with the frozen source."""
    training = options.training_settings(training, resize, limits, mean, std, grey)
    flags = options.passed(
        dataset=dataset, root=root, target=target, network=network, weights=weights, checkpoint=checkpoint,
        training=training, method=method, seed=seed, scenario=scenario, limit=limit, quick=quick or None, plugin=plugin,
    )  # fmt: skip
    test = validate_settings(Stress, read_settings(file, flags) if file else flags)
    todo = plan(test, out, checkpoints=checkpoints, device="cpu" if dry_run else device)
    notes = test.left_out(todo.open)
    for note in () if as_json else notes:
        Console().print(note, highlight=False, style="dim")
    if dry_run:
        options.print_json(plan_values(todo) | {"left_out": notes}) if as_json else print_scenarios(todo)
        return
    outcome = run_stress(todo, workers=workers, device=device)
    options.print_json(outcome_values(outcome) | {"left_out": notes}) if as_json else print_outcome(outcome, Path(out))
    if outcome.failures:
        raise typer.Exit(1)


@dataclass(frozen=True)
class StressOutcome:
    """The outcome of a stress test."""

    records: int
    tests: list[StressTest]
    failures: list[Record]
    tables: list[Path]
    """The table files of each test, without the suffixes in FORMS."""
    pictures: list[list[Path]]


def run_stress(todo: Plan, **options: Any) -> StressOutcome:
    """Run a stress test with progress bars, and write the tables and the figure of each dataset and network."""
    summary = run_with_bars(todo, **options)
    records = sort_records(summary.records, todo.runs) if summary.records else []
    tests = stress_tests(records, scenario_of, order=list(SCENARIOS), label=label_of)
    names, pictures = list[Path](), list[list[Path]]()
    for test in tests:
        words = "".join(c if c.isalnum() else " " for c in test.title).split()
        names.append(todo.folder / ("stress" if len(tests) == 1 else f"stress-{'-'.join(words)}"))
        write_tables(test.tables(), names[-1])
        pictures.append(heatmap(test, Path(f"{names[-1]}.png")))
    return StressOutcome(len(summary.records), tests, list(summary.failures), names, pictures)


def print_outcome(outcome: StressOutcome, out: Path) -> None:
    """Print the tables, the failures and the files."""
    for test in outcome.tests:
        for table in test.tables()[:2]:
            print_table(table)
    print_failures(outcome.failures, scenario_of)
    lines = [f"{outcome.records} records in {out / FILE}"]
    for table_file, pictures in zip(outcome.tables, outcome.pictures, strict=True):
        lines.append(f"tables in {table_file}.md, .tex and .csv")
        lines.append(f"picture in {' and '.join(map(str, pictures))}")
    Console().print("\n".join(lines), highlight=False, soft_wrap=True)


def outcome_values(outcome: StressOutcome) -> dict[str, Any]:
    """Convert an outcome to plain values."""
    keys = ("dataset", "target", "network", "method", "seed")
    failures = [
        {**{key: r["settings"][key] for key in keys}, "scenario": scenario_of(r["settings"]), "error": r["error"]}
        for r in outcome.failures
    ]
    files = [f"{name}{suffix}" for name in outcome.tables for suffix in FORMS.values()]
    files += [str(file) for each in outcome.pictures for file in each]
    tests = [_test_values(test) for test in outcome.tests]
    return {"ok": not failures, "records": outcome.records, "tests": tests, "failures": failures, "files": files}


def _test_values(test: StressTest) -> dict[str, Any]:
    methods = []
    for row in test.rows:
        spots = zip(test.scenarios, row.cells, strict=True)
        scenarios = {name: None if spot is None else asdict(spot) for name, spot in spots}
        worst = None if row.worst is None else test.scenarios[row.worst]
        methods.append({"name": row.label, "method": row.method, "worst": worst, "scenarios": scenarios})
    return {"title": test.title, "metric": test.metric.name, "methods": methods, "notes": list(test.notes)}


def plan_values(todo: Plan) -> dict[str, Any]:
    """Return each scenario with its description and finished runs, and the counts of the whole plan."""
    settings = [run.model_dump(mode="json") for run in todo.runs]
    of = [(scenario_of(each), run.digest() in todo.done) for each, run in zip(settings, todo.runs, strict=True)]
    scenarios = []
    for name in dict.fromkeys(scenario for scenario, _ in of):
        states = [done for scenario, done in of if scenario == name]
        scenarios.append({"name": name, "meaning": SCENARIOS[name][0], "runs": len(states), "done": sum(states)})
    methods = dict.fromkeys(label_of(each) or each["method"] for each in settings)
    counts = {"runs": len(todo.runs), "done": len(todo.done_here), "waiting": len(todo.waiting)}
    return {"scenarios": scenarios, "methods": list(methods), **counts, "trainings": len(todo.trainings)}


def print_scenarios(todo: Plan) -> None:
    """Print the scenarios of a plan."""
    planned = plan_values(todo)
    table = make_grid(("scenario", "what happens"), ("runs", "done"))
    for scenario in planned["scenarios"]:
        table.add_row(*(str(scenario[key]) for key in ("name", "meaning", "runs", "done")))
    console = Console()
    console.print(table)
    console.print(f"methods: {'; '.join(planned['methods'])}", highlight=False)
    print_counts(todo)
