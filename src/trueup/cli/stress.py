"""`trueup stress`: methods in difficult scenarios, compared with the frozen source."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from trueup.bench.records import FILE
from trueup.bench.settings import read_settings, validate_settings
from trueup.bench.stress import SCENARIOS, Stress, label_of, scenario_of
from trueup.bench.sweep import Plan, SweepSummary, plan, sort_records
from trueup.cli import options
from trueup.cli.progress import FORMS, make_grid, print_counts, print_failures, print_table, run_with_bars, write_tables
from trueup.report.stress_tables import StressTest, heatmap, stress_tests

SCENARIO = options.flag("--scenario", help=f"One of {', '.join(SCENARIOS)}; repeatable; default all.")
Files = dict[Path, list[Path]]
"""The pictures of each test, by the path of its tables without the suffixes in FORMS."""
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


@options.flags_in_order(
    f"file {options.MODELS} {options.PICTURES} method seed scenario limit quick plugin "
    "out checkpoints workers device dry_run as_json"
)
def stress(
    file: str = typer.Argument("", help="A YAML file of settings; flags override it."),
    scenario: list[str] = SCENARIO,
    quick: bool = options.flag("--quick", help="A quick test: first seed and target, 256 images, a shorter `long`."),
    out: str = typer.Option("stress", "--out", "-o", help="Folder for records, tables, figure and checkpoints."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the scenarios and their state without running them."),
    *, checkpoints: str | None, workers: int | None, device: str, as_json: bool, **settings: Any,
) -> None:  # fmt: skip
    """Test methods in difficult scenarios and compare each with the frozen source."""
    flags = options.settings_of(settings | {"scenario": scenario, "quick": quick})
    test = validate_settings(Stress, read_settings(file, flags) if file else flags)
    todo = plan(test, out, checkpoints=checkpoints, device="cpu" if dry_run else device)
    notes = test.left_out(todo.open)
    for note in () if as_json else notes:
        Console().print(note, highlight=False, style="dim")
    if dry_run:
        options.print_json(plan_values(todo) | {"left_out": notes}) if as_json else print_scenarios(todo)
        return
    summary, tests, files = run_stress(todo, workers=workers, device=device)
    if as_json:
        options.print_json(outcome_values(summary, tests, files) | {"left_out": notes})
    else:
        print_outcome(summary, tests, files, Path(out))
    if summary.failures:
        raise typer.Exit(1)


def run_stress(todo: Plan, **options: Any) -> tuple[SweepSummary, list[StressTest], Files]:
    """Run a stress test with progress bars, and write the tables and the figure of each dataset and network."""
    summary = run_with_bars(todo, **options)
    records = sort_records(summary.records, todo.runs) if summary.records else []
    tests = stress_tests(records, scenario_of, order=list(SCENARIOS), label=label_of)
    files: Files = {}
    for test in tests:
        words = "".join(c if c.isalnum() else " " for c in test.title).split()
        name = todo.folder / ("stress" if len(tests) == 1 else f"stress-{'-'.join(words)}")
        write_tables(test.tables(), name)
        files[name] = heatmap(test, Path(f"{name}.png"))
    return summary, tests, files


def print_outcome(summary: SweepSummary, tests: list[StressTest], files: Files, out: Path) -> None:
    """Print the tables, the failures and the files."""
    for test in tests:
        for table in test.tables()[:2]:
            print_table(table)
    print_failures(summary.failures, scenario_of)
    lines = [f"{len(summary.records)} records in {out / FILE}"]
    for name, pictures in files.items():
        lines += [f"tables in {name}.md, .tex and .csv", f"picture in {' and '.join(map(str, pictures))}"]
    Console().print("\n".join(lines), highlight=False, soft_wrap=True)


def outcome_values(summary: SweepSummary, tests: list[StressTest], files: Files) -> dict[str, Any]:
    """Convert an outcome to plain values."""
    keys = ("dataset", "target", "network", "method", "seed")
    failures = [
        {**{key: r["settings"][key] for key in keys}, "scenario": scenario_of(r["settings"]), "error": r["error"]}
        for r in summary.failures
    ]
    written = [f"{name}{suffix}" for name in files for suffix in FORMS.values()]
    written += [str(picture) for pictures in files.values() for picture in pictures]
    found = {"records": len(summary.records), "tests": [_test_values(test) for test in tests]}
    return {"ok": not failures, **found, "failures": failures, "files": written}


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
