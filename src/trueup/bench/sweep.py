"""Sweeps: many runs in a pool of processes. What is recorded is not run again; what fails does not stop the rest."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from trueup.bench.jobs import Job, Paths, failure, perform
from trueup.bench.records import FILE, Record, finished, writing
from trueup.bench.settings import Run, Sweep, make_sweep
from trueup.data.preflight import preflight_datasets
from trueup.source.checkpoints import Store

CHECKPOINTS, TRACES = "checkpoints", "traces"
Tell = Callable[[str, Job, Any], None]  # "start", "progress" (done, of), "run" method, "record" Record, "end"


@dataclass(frozen=True)
class Plan:
    """The jobs of a sweep: what must be trained first, and runs that share a model and a stream."""

    runs: list[Run]
    done: dict[str, Record]
    trainings: dict[str, Job]
    """By the recipe's hash; only those whose model is not there yet."""
    jobs: list[Job]

    @property
    def done_here(self) -> list[Run]:
        """The runs that are recorded."""
        return [run for run in self.runs if run.digest() in self.done]

    @property
    def waiting(self) -> list[Run]:
        """The runs that are still to do."""
        return [run for run in self.runs if run.digest() not in self.done]


def plan(
    sweep: Sweep, folder: str | Path, *, checkpoints: str | Path | None = None, threads: int = 1, device: str = "cpu"
) -> Plan:
    """What a sweep has done and has still to do in a folder."""
    check_device(device)
    folder = Path(folder)
    store = Store(Path(checkpoints) if checkpoints else folder / CHECKPOINTS)
    runs, done = sweep.runs(), finished(folder / FILE)
    # A checkpoint may know how pictures are read; the first look is at what the runs will see.
    seen = dict.fromkeys((run.dataset, run.source.reading) for run in runs)
    views = {(name, reading): sweep.open(name, reading) for name, reading in seen}
    preflight_datasets(views.values())
    groups: dict[str, Job] = {}
    trainings: dict[str, Job] = {}
    for run in runs:
        if run.digest() in done:
            continue
        site = Paths(
            store.folder, sweep.root_of(run.dataset), sweep.file_of(run), threads, device, tuple(sweep.plugin),
            folder / TRACES,
        )  # fmt: skip
        recipe = run.recipe(views[run.dataset, run.source.reading])
        if recipe is not None and not store.has(recipe):
            trainings[recipe.digest()] = Job(site, recipe, dataset=run.dataset)
        # All but the method: these runs see the same images in the same order.
        alike = {"method": "", "hyper": {}, "select": "default", "code": {}, "guard": False}
        key = run.model_copy(update=alike).digest()
        before = groups.get(key)
        groups[key] = Job(site, recipe, (*(before.runs if before else ()), run), dataset=run.dataset)
    return Plan(runs, done, trainings, list(groups.values()))


def check_device(device: str) -> None:
    """Refuse a device that torch does not have here."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


@dataclass
class Summary:
    """How a sweep went."""

    records: list[Record] = field(default_factory=list)
    failures: list[Record] = field(default_factory=list)


def run_sweep(
    sweep: Sweep,
    folder: str | Path,
    *,
    workers: int | None = None,
    checkpoints: str | Path | None = None,
    device: str = "cpu",
    tell: Tell = lambda event, job, value: None,
) -> Summary:
    """Run what is missing of a sweep and record it in the folder; the summary has all of its records, old and new.

    workers: processes at a time; by default one per core, each with one thread, or one alone on another device.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = workers or (cores if device == "cpu" else 1)
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cores // workers)))
    todo = plan(sweep, folder, checkpoints=checkpoints, threads=threads, device=device)
    summary = Summary(records=[todo.done[run.digest()] for run in todo.done_here])
    if todo.jobs:
        with writing(Path(folder) / FILE) as writer:

            def keep(record: Record) -> None:
                writer.add(record)
                (summary.failures if "error" in record else summary.records).append(record)

            _Pool(todo, workers, keep, tell).work()
    return summary


class _Pool:
    """One process per job, some at a time; a job waits for its training. A process that dies takes its job alone."""

    def __init__(self, todo: Plan, workers: int, keep: Callable[[Record], None], tell: Tell) -> None:
        self.trainings, self.jobs = dict(todo.trainings), list(todo.jobs)
        self.workers, self.keep, self.tell = workers, keep, tell
        self.active: dict[Connection, tuple[BaseProcess, Job]] = {}
        self.left: dict[Connection, list[Run]] = {}  # runs that a process has not sent a record of
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self.context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self.context.set_forkserver_preload(["trueup.bench.jobs"])

    def work(self) -> None:
        """Until nothing is left to do."""
        queue = list(self.trainings.values())
        try:
            while queue or self.jobs or self.active:
                while len(self.active) < self.workers and (job := self._next(queue)) is not None:
                    self._start(job)
                for connection in wait(list(self.active)):
                    assert isinstance(connection, Connection)
                    self._hear(connection)
        finally:
            for process, _ in self.active.values():
                process.terminate()

    def _next(self, queue: list[Job]) -> Job | None:
        """A job whose model is there, or else a training."""
        for i, job in enumerate(self.jobs):
            if job.recipe is None or job.recipe.digest() not in self.trainings:
                return self.jobs.pop(i)
        return queue.pop(0) if queue else None

    def _start(self, job: Job) -> None:
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_process, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        self.active[ours], self.left[ours] = (process, job), list(job.runs)
        self.tell("start", job, None)

    def _hear(self, connection: Connection) -> None:
        _, job = self.active[connection]
        try:
            event, value = connection.recv()
        except (EOFError, OSError):
            event, value = "dead", None
        if event == "record":
            self.left[connection].pop(0)
            self.keep(value)
        if event in ("end", "dead"):
            self._finish(connection, value)
        else:
            self.tell(event, job, value)

    def _finish(self, connection: Connection, error: str | None) -> None:
        process, job = self.active.pop(connection)
        process.join()
        left = self.left.pop(connection)
        if process.exitcode != 0 and error is None:
            error = f"its process ended with status {process.exitcode} (out of memory, or killed)"
        if not job.runs:
            assert job.recipe is not None
            del self.trainings[job.recipe.digest()]
            if error is not None:  # the runs that waited for this model cannot take place
                lost = [j for j in self.jobs if j.recipe is not None and j.recipe.digest() == job.recipe.digest()]
                self.jobs = [j for j in self.jobs if j not in lost]
                left, error = [run for j in lost for run in j.runs], f"training failed: {error}"
        for run in left:
            record = failure(run, error or "its process ended early")
            self.keep(record)
            self.tell("record", job, record)
        self.tell("end", job, None)


def _process(job: Job, connection: Connection) -> None:
    """What a process of the pool does. When nobody listens any more, sending fails and it ends."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started the sweep ends it
    with suppress(BrokenPipeError):
        try:
            perform(job, lambda event, value: connection.send((event, value)))
        except BrokenPipeError:
            raise
        except Exception as error:
            connection.send(("end", f"{type(error).__name__}: {error}"))
        else:
            connection.send(("end", None))


def run(
    folder: str | Path = "runs",
    *,
    hyper: Mapping[str, Any] | None = None,
    checkpoints: str | Path | None = None,
    device: str = "cpu",
    **settings: Any,
) -> Record:
    """One run in this process: its record, from the folder if it is there already.

    >>> trueup.run(dataset="digits", target="type", method="tsd", seed=0)["results"]["accuracy"]
    """
    settings = {"seed": 0, "method": "tsd", **settings}
    if hyper:
        settings["method"] = [{settings["method"]: hyper}]
    sweep = make_sweep(settings)
    todo = plan(sweep, folder, checkpoints=checkpoints, threads=torch.get_num_threads(), device=device)
    if len(todo.runs) != 1:
        raise ValueError(f"these settings are {len(todo.runs)} runs, not one; name a single target, method and seed")
    if todo.done_here:
        return todo.done[todo.runs[0].digest()]
    records: list[Record] = []
    with writing(Path(folder) / FILE) as writer:
        for job in (*todo.trainings.values(), *todo.jobs):
            perform(job, lambda event, value: records.append(value) if event == "record" else None)
        writer.add(records[0])
    if "error" in records[0]:
        raise RunFailedError(f"the run failed: {records[0]['error']}")
    return records[0]


class RunFailedError(ValueError):
    """A run that did not come to its end."""


def order_of(records: Iterable[Record], runs: Sequence[Run]) -> list[Record]:
    """Records in the order of the runs that they are of."""
    place = {run.digest(): i for i, run in enumerate(runs)}
    return sorted(records, key=lambda record: place[record["id"]])
