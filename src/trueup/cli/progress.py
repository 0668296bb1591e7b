"""Progress on the terminal: one bar for a long step, one line per process for a sweep."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trueup.bench.jobs import Job
from trueup.bench.sweep import Plan


class Stop:
    """Ctrl-C, remembered: Python forgets one that comes while it tidies up an object."""

    pressed = False

    @classmethod
    def press(cls, *_: object) -> None:
        """What a signal does."""
        cls.pressed = True
        raise KeyboardInterrupt

    @classmethod
    def check(cls) -> None:
        """Stop, if somebody wanted to and was not heard."""
        if cls.pressed:
            raise KeyboardInterrupt


@contextmanager
def stoppable() -> Iterator[None]:
    """In here Ctrl-C is remembered."""
    Stop.pressed, before = False, signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, Stop.press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _columns() -> tuple[Any, ...]:
    return TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn()


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that appears with the first call of what it yields: (done, of how many)."""
    with Progress(*_columns(), console=Console(stderr=True), transient=True) as progress:
        task: list[TaskID] = []

        def advance(done: int, of: int) -> None:
            Stop.check()
            if not task:
                task.append(progress.add_task(title, total=of))
            progress.update(task[0], completed=done, total=of)

        yield advance


class SweepBars:
    """Listens to a sweep: a bar for all runs, with the time left, and one for each job at work."""

    def __init__(self, todo: Plan) -> None:
        self.progress = Progress(*_columns(), console=Console(stderr=True), transient=True)
        runs, trainings = len(todo.waiting), len(todo.trainings)
        self.training = self.progress.add_task("trainings", total=trainings, visible=trainings > 0)
        self.all = self.progress.add_task("runs", total=runs)
        self.jobs: dict[int, TaskID] = {}

    def __call__(self, event: str, job: Job, value: Any) -> None:
        """Take an event of the sweep."""
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
