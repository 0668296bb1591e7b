"""Progress bars and results of sweeps on the terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from trueup.bench.jobs import Job
from trueup.bench.records import Record
from trueup.bench.sweep import Plan, SweepSummary, run_plan
from trueup.report.render import render_table
from trueup.report.tables import Table

FORMS = {"markdown": ".md", "latex": ".tex", "csv": ".csv"}


class Stop:
    """A Ctrl-C flag: Python loses a KeyboardInterrupt that is raised in a finaliser."""

    pressed = False

    @classmethod
    def press(cls, *_: object) -> None:
        """Handle SIGINT."""
        cls.pressed = True
        raise KeyboardInterrupt

    @classmethod
    def check(cls) -> None:
        """Raise KeyboardInterrupt if one was lost."""
        if cls.pressed:
            raise KeyboardInterrupt


@contextmanager
def stoppable() -> Iterator[None]:
    """Remember Ctrl-C inside the block."""
    Stop.pressed, before = False, signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, Stop.press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that moves a progress bar, which appears with the first call."""
    with _progress() as progress:
        task: list[TaskID] = []

        def advance(done: int, of: int) -> None:
            Stop.check()
            if not task:
                task.append(progress.add_task(title, total=of))
            progress.update(task[0], completed=done, total=of)

        yield advance


class SweepBars:
    """Progress bars of a sweep: one for all runs, with the time left, and one for each active job."""

    def __init__(self, todo: Plan) -> None:
        self.progress = _progress()
        runs, trainings = len(todo.waiting), len(todo.trainings)
        self.training = self.progress.add_task("trainings", total=trainings, visible=trainings > 0)
        self.all = self.progress.add_task("runs", total=runs)
        self.jobs: dict[int, TaskID] = {}

    def __call__(self, event: str, job: Job, value: Any) -> None:
        """Handle an event of the sweep."""
        Stop.check()
        if event == "start":
            self.jobs[id(job)] = self.progress.add_task(f"[dim]{job.title}[/]", total=None)
        elif event == "progress":
            self.progress.update(self.jobs[id(job)], completed=value[0], total=value[1])
        elif event == "run":
            self.progress.update(self.jobs[id(job)], description=f"[dim]{job.title}: {value}[/]")
        elif event == "record":
            self.progress.advance(self.all)
            if "error" in value:
                run = value["settings"]
                name = f"{run['method']} on {run['target']}, seed {run['seed']}"
                self.progress.console.print(f"[red]failed[/] {name}: {value['error']}", highlight=False)
        elif event == "end":
            self.progress.remove_task(self.jobs.pop(id(job)))
            if not job.runs:
                self.progress.advance(self.training)


def run_with_bars(todo: Plan, *, workers: int | None = None, device: str = "cpu") -> SweepSummary:
    """Run a plan with progress bars."""
    bars = SweepBars(todo)
    with bars.progress:
        return run_plan(todo, workers=workers, device=device, on_event=bars)


def print_counts(todo: Plan) -> None:
    """Print how many runs and trainings of a plan are done and to do."""
    counts = f"{len(todo.runs)} runs: {len(todo.done_here)} done, {len(todo.waiting)} to run; "
    Console().print(f"{counts}{len(todo.trainings)} source models to train", highlight=False)


def print_failures(failures: Iterable[Record], scenario_of: Callable[[Record], str] | None = None) -> None:
    """Print a line for each failed run."""
    for record in failures:
        run = record["settings"]
        scenario, network = (f" in {scenario_of(run)}", "") if scenario_of else ("", f", {run['network']}")
        name = f"{run['method']}{scenario} on {run['dataset']}/{run['target']}{network}, seed {run['seed']}"
        Console().print(f"[red]failed:[/] {name}: {record['error']}", highlight=False, soft_wrap=True)


def make_grid(left: Iterable[str], right: Iterable[str] = (), **look: Any) -> Grid:
    """Return an empty grid without lines, with columns aligned left and then columns aligned right."""
    grid = Grid(box=None, pad_edge=False, header_style="dim", title_justify="left", title_style="bold", **look)
    for name in left:
        grid.add_column(name)
    for name in right:
        grid.add_column(name, justify="right")
    return grid


def print_table(table: Table) -> None:
    """Print a table of results, in colour if the terminal has it."""
    console = Console()
    typer.echo(render_table(table, "terminal", color=console.is_terminal, width=max(60, console.width)))


def write_tables(tables: Sequence[Table], path: Path) -> None:
    """Write tables to files in all formats; `path` has no suffix."""
    for form, suffix in FORMS.items():
        text = "\n\n".join(render_table(table, form) for table in tables)
        Path(f"{path}{suffix}").write_text(text + "\n")
