"""Sweeps: many runs in a pool of processes. Recorded runs are not repeated; a failure does not stop the others."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from trueup.bench.jobs import Job, Paths, failure_record, run_job
from trueup.bench.records import FILE, Record, finished_records, open_writer
from trueup.bench.settings import Run, Sweep, make_sweep
from trueup.data.check import preflight_datasets
from trueup.data.datasets import Dataset
from trueup.data.pictures import Reading
from trueup.source.checkpoints import Store

CHECKPOINTS, TRACES = "checkpoints", "traces"
OnEvent = Callable[[str, Job, Any], None]  # "start", "progress" (done, of), "run" method, "record" Record, "end"


@dataclass(frozen=True)
class Plan:
    """The jobs of a sweep: trainings that come first, and groups of runs that share a model and a stream."""

    runs: list[Run]
    waiting: list[Run]  # the runs that are still to do
    done: dict[str, Record]
    trainings: dict[str, Job]  # by the recipe's hash; only models that do not exist yet
    jobs: list[Job]
    folder: Path
    open: Callable[[str, Reading], Dataset]  # returns a dataset of the sweep, scanned once for each way of reading

    @property
    def done_here(self) -> list[Run]:
        """Return the runs that are recorded."""
        return [run for run in self.runs if run.digest() in self.done]


def plan(sweep: Sweep, folder: str | Path, *, checkpoints: str | Path | None = None, device: str = "cpu") -> Plan:
    """Find out what a sweep has done and has still to do in a folder."""
    check_device(device)
    folder = Path(folder)
    store = Store(Path(checkpoints) if checkpoints else folder / CHECKPOINTS)
    opened = cache(sweep.open)
    runs, done = sweep.runs(opened), finished_records(folder / FILE)
    # A checkpoint may say how pictures are read, so check them as the runs will read them.
    preflight_datasets(opened(*key) for key in dict.fromkeys((run.dataset, run.source.reading) for run in runs))
    groups: dict[str, Job] = {}
    trainings: dict[str, Job] = {}
    waiting = [run for run in runs if run.digest() not in done]
    for run in waiting:
        root, file = sweep.root_of(run.dataset), sweep.file_of(run)
        paths = Paths(store.folder, root, file, device, tuple(sweep.plugin), folder / TRACES)
        recipe = run.recipe(opened(run.dataset, run.source.reading))
        job = Job(paths, recipe, run.dataset, run.source.reading)
        if recipe is not None and not store.has(recipe):
            trainings[recipe.digest()] = job
        # Runs that differ in the method alone see the same images in the same order.
        alike = {"method": "", "hyper": {}, "select": "default", "code": {}, "guard": False}
        key = run.model_copy(update=alike).digest()
        groups[key] = replace(job, runs=(*groups.get(key, job).runs, run))
    return Plan(runs, waiting, done, trainings, list(groups.values()), folder, opened)


def check_device(device: str) -> None:
    """Refuse a device that torch cannot use."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


@dataclass
class SweepSummary:
    """The records of a sweep, and the records of runs that failed."""

    records: list[Record] = field(default_factory=list)
    failures: list[Record] = field(default_factory=list)


def run_plan(
    todo: Plan,
    *,
    workers: int | None = None,
    device: str = "cpu",
    on_event: OnEvent = lambda event, job, value: None,
) -> SweepSummary:
    """Run the jobs of a plan and record them; return all records, old and new.

    workers: processes at a time; by default one per core with one thread each, or a single one on another device.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = workers or (cores if device == "cpu" else 1)
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cores // workers)))
    summary = SweepSummary(records=[todo.done[run.digest()] for run in todo.done_here])
    if todo.jobs:
        with open_writer(todo.folder / FILE) as add:

            def keep(record: Record) -> None:
                add(record)
                (summary.failures if "error" in record else summary.records).append(record)

            _Pool(todo, workers, threads, keep, on_event).work()
    return summary


class _Pool:
    """A pool with one process per job; a job waits for its training. A process that dies fails its own job only."""

    def __init__(
        self, todo: Plan, workers: int, threads: int, keep: Callable[[Record], None], on_event: OnEvent
    ) -> None:
        self.trainings, self.jobs = dict(todo.trainings), list(todo.jobs)
        self.workers, self.threads, self.keep, self.on_event = workers, threads, keep, on_event
        self.active: dict[Connection, tuple[BaseProcess, Job, list[Run]]] = {}  # with the runs without a record so far
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self.context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self.context.set_forkserver_preload(["trueup.bench.jobs"])

    def work(self) -> None:
        """Run all jobs."""
        queue = list(self.trainings.values())
        try:
            while queue or self.jobs or self.active:
                while len(self.active) < self.workers and (job := self._next(queue)) is not None:
                    self._start(job)
                for connection in wait(list(self.active)):
                    assert isinstance(connection, Connection)
                    self._receive(connection)
        finally:
            for process, *_ in self.active.values():
                process.terminate()

    def _next(self, queue: list[Job]) -> Job | None:
        """Return a job whose model exists, or else a training."""
        for i, job in enumerate(self.jobs):
            if job.recipe is None or job.recipe.digest() not in self.trainings:
                return self.jobs.pop(i)
        return queue.pop(0) if queue else None

    def _start(self, job: Job) -> None:
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_process, args=(job, theirs, self.threads), daemon=True)
        process.start()
        theirs.close()
        self.active[ours] = process, job, list(job.runs)
        self.on_event("start", job, None)

    def _receive(self, connection: Connection) -> None:
        _, job, left = self.active[connection]
        try:
            event, value = connection.recv()
        except (EOFError, OSError):
            event, value = "dead", None
        if event == "record":
            left.pop(0)
            self.keep(value)
        if event in ("end", "dead"):
            self._finish(connection, value)
        else:
            self.on_event(event, job, value)

    def _finish(self, connection: Connection, error: str | None) -> None:
        process, job, left = self.active.pop(connection)
        process.join()
        if process.exitcode != 0 and error is None:
            error = f"its process ended with status {process.exitcode} (out of memory, or killed)"
        if not job.runs:
            assert job.recipe is not None
            del self.trainings[job.recipe.digest()]
            if error is not None:  # the runs that waited for this model fail too
                lost = [j for j in self.jobs if j.recipe is not None and j.recipe.digest() == job.recipe.digest()]
                self.jobs = [j for j in self.jobs if j not in lost]
                left, error = [run for j in lost for run in j.runs], f"training failed: {error}"
        for run in left:
            record = failure_record(run, error or "its process ended early")
            self.keep(record)
            self.on_event("record", job, record)
        self.on_event("end", job, None)


def _process(job: Job, connection: Connection, threads: int) -> None:
    """Run a job in a process of the pool. If the parent has gone, sending fails and the process ends."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with suppress(BrokenPipeError):
        failure = None
        try:
            run_job(job, lambda event, value: connection.send((event, value)), threads)
        except BrokenPipeError:
            return
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        connection.send(("end", failure))


def run(
    folder: str | Path = "runs",
    *,
    hyper: Mapping[str, Any] | None = None,
    checkpoints: str | Path | None = None,
    device: str = "cpu",
    **settings: Any,
) -> Record:
    """Run one method on one stream in this process and return its record; a recorded run is not repeated.

    >>> trueup.run(dataset="digits", target="type", method="tsd", seed=0)["results"]["accuracy"]
    """
    settings = {"seed": 0, "method": "tsd", **settings}
    if hyper:
        settings["method"] = [{settings["method"]: hyper}]
    sweep = make_sweep(settings)
    todo = plan(sweep, folder, checkpoints=checkpoints, device=device)
    if len(todo.runs) != 1:
        raise ValueError(f"these settings are {len(todo.runs)} runs, not one; name a single target, method and seed")
    if todo.done_here:
        return todo.done[todo.runs[0].digest()]
    records, threads = list[Record](), torch.get_num_threads()
    with open_writer(Path(folder) / FILE) as add:
        for job in (*todo.trainings.values(), *todo.jobs):
            run_job(job, lambda event, value: records.append(value) if event == "record" else None, threads)
        add(records[0])
    if "error" in records[0]:
        raise RunFailedError(f"the run failed: {records[0]['error']}")
    return records[0]


class RunFailedError(ValueError):
    """A run that failed."""


def sort_records(records: Iterable[Record], runs: Sequence[Run]) -> list[Record]:
    """Sort records in the order of their runs."""
    position = {run.digest(): i for i, run in enumerate(runs)}
    return sorted(records, key=lambda record: position[record["id"]])
