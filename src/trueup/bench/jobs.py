"""Jobs of a sweep, each for one process: train a source model, or run methods on one stream."""

from __future__ import annotations

import io
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.atomic import write_atomic
from trueup.bench.environment import environment
from trueup.bench.hparam_search import search_hyper
from trueup.bench.intruders import Intruders, parse_disturbance
from trueup.bench.records import Record
from trueup.bench.settings import Run, import_plugins
from trueup.bench.stream_runner import StreamRunner, make_stream
from trueup.core.registry import make_method
from trueup.data.datasets import Dataset, open_dataset
from trueup.data.loading import ConcatDomains, Loader
from trueup.data.pictures import Reading
from trueup.data.streams import batches
from trueup.source.checkpoints import Store, load_model
from trueup.source.recipe import GivenModel, Recipe, Training
from trueup.source.tasks import split_holdout
from trueup.source.train import train

Send = Callable[[str, Any], None]  # "progress" (done, of), "run" id, "record" Record


@dataclass(frozen=True)
class Paths:
    """Folders, files and device on this machine, which no record mentions."""

    checkpoints: Path
    root: str | None = None
    file: str | None = None  # the file of the weights, or of the trained model
    device: str = "cpu"
    plugins: tuple[str, ...] = ()
    traces: Path | None = None  # the folder for the answers to each image; None keeps none


@dataclass(frozen=True)
class Job:
    """Runs that share a model and a stream, or (without runs) the training of a recipe."""

    paths: Paths
    recipe: Recipe | None
    dataset: str
    reading: Reading  # how picture files are read
    runs: tuple[Run, ...] = ()

    @property
    def title(self) -> str:
        """Return a title for the progress bar."""
        if not self.runs:
            assert self.recipe is not None
            return f"train {self.recipe.network} on {'+'.join(self.recipe.sources)}, seed {self.recipe.seed}"
        run = self.runs[0]
        knobs = (run.disturb, f"{run.repeat} times" * (run.repeat > 1), run.stream * (run.stream != "iid"))
        return ", ".join([f"{run.dataset}/{run.target}", *filter(None, knobs), f"seed {run.seed}"])


def run_job(job: Job, send: Send, threads: int = 1) -> None:
    """Run a job and send its progress and records. A run that fails becomes a record with its error; others go on."""
    paths = job.paths
    torch.set_num_threads(threads)
    import_plugins(paths.plugins)
    dataset = open_dataset(job.dataset, paths.root, job.reading)
    store = Store(paths.checkpoints)

    def progress(done: int, of: int) -> None:
        send("progress", (done, of))

    if not job.runs:
        assert job.recipe is not None
        train(job.recipe, dataset, store, weights=paths.file, threads=threads, device=paths.device, progress=progress)
        return
    runner: StreamRunner | None = None
    for run in job.runs:
        send("run", run.method)
        try:
            with quiet_guard_log():
                runner = runner or make_runner(run, dataset, store, paths, threads)
                record = evaluate(run, runner, dataset, progress, paths)
        except Exception as error:
            record = failure_record(run, error)
        send("record", record)


@contextmanager
def quiet_guard_log() -> Iterator[None]:
    """Silence the guard's log inside the block: records hold its events."""
    log = logging.getLogger("trueup.guard")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def evaluate(
    run: Run, runner: StreamRunner, dataset: Dataset, progress: Callable[[int, int], None], paths: Paths
) -> Record:
    """Run one method on its stream and return the record."""
    # With a guard the frozen source answers the good rows of a batch that also has bad ones.
    runner = replace(runner, guard=run.guard or (run.method == "source" and bool(run.disturb)))
    hyper, extra = dict(run.hyper), dict[str, Any]()
    if run.select != "default":
        runners = [runner] if run.select == "oracle" else list(holdout_runners(run, runner, dataset))
        extra = search_hyper(run.method, hyper, runners, lambda: progress(0, len(runner.stream)), dataset.task)
        hyper |= extra["chosen"]
    result = runner.run(make_method(run.method, hyper, dataset.task), progress)
    if paths.traces is not None:
        extra["trace"] = write_trace(paths.traces, run.digest(), result.trace)
    return {
        "id": run.digest(),
        "settings": run.model_dump(mode="json"),
        **extra,
        "results": result.results,
        "cost": result.cost,
        "environment": environment(paths.device),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_trace(folder: Path, name: str, trace: Mapping[str, NDArray[Any]]) -> str:
    """Write a trace to a folder and return its name in the record."""
    blob = io.BytesIO()
    np.savez_compressed(blob, allow_pickle=False, **trace)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.npz", blob.getvalue())
    return f"{folder.name}/{name}.npz"


def failure_record(run: Run, error: BaseException | str) -> Record:
    """Return the record of a run that failed. It names files, but no folders."""
    name, at = str(error), []
    if isinstance(error, BaseException):
        name = f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)[-2:]
        at = [f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in frames]
    name = re.sub(r"(?<![\w.:/])(/[^\s'\",:]+)", lambda found: Path(found[1]).name, name)
    return {"id": run.digest(), "settings": run.model_dump(mode="json"), "error": name, "at": at}


def make_runner(run: Run, dataset: Dataset, store: Store, paths: Paths, threads: int = 1) -> StreamRunner:
    """Load the source model of a run and make its stream."""
    recipe = run.recipe(dataset)
    if recipe is not None:
        model, _ = store.load(recipe)
    else:
        assert paths.file is not None
        outputs = dataset.outputs(multilabel=run.source.multilabel)
        model = load_model(paths.file, run.network, outputs, run.source.size, run.source.channels.count)
    model.to(memory_format=torch.channels_last)  # as loaders lay out images; convolutions are faster this way
    data = ConcatDomains([dataset.domain(name) for name in run.targets])
    disturbance = parse_disturbance(run.disturb) if run.disturb else None
    stream = make_stream(
        data,
        run.stream,
        run.stream_options,
        seed=run.seed,
        batch=disturbance.genuine(run.batch) if disturbance else run.batch,
        limit=run.limit,
        reset=run.reset,
        repeat=run.repeat,
    )
    device, threads = paths.device, max(2, threads)
    loader = Loader(data, run.source.size, run.source.channels, threads=threads, keep=True, device=device)
    pretrained = isinstance(run.source, Training) and not run.source.iterations  # so there are no source images
    intruders = Intruders(disturbance, model, loader, stream, run.batch, run.seed, device) if disturbance else None
    return StreamRunner(
        model,
        loader,
        stream,
        run.seed,
        run.reset,
        device,
        None if pretrained else lambda: source_images(run, dataset),
        dataset.structures,
        run.source.multilabel,
        intruders=intruders,
    )


def holdout_runners(run: Run, runner: StreamRunner, dataset: Dataset) -> Iterator[StreamRunner]:
    """Yield a runner for each source domain: the images that training held out, in random order."""
    if isinstance(run.source, GivenModel) or not run.source.iterations:
        raise ValueError("select=source needs images that training held out, but this model was trained elsewhere")
    for name in dataset.sources(run.targets):
        domain = dataset.domain(name)
        _, held = split_holdout(domain, run.source.holdout, run.seed)
        loader = Loader(ConcatDomains([domain]), run.source.size, run.source.channels, keep=True, device=runner.device)
        stream = list(batches(np.random.default_rng(run.seed).permutation(held), run.batch))
        yield replace(runner, loader=loader, stream=stream, reset=False, passes={}, warm=set(), intruders=None)


def source_images(run: Run, dataset: Dataset) -> Iterator[Tensor]:
    """Yield batches of training images, equally from all domains: 2,000 images at most, 500 with masks."""
    names = dataset.sources(run.targets)
    holdout = run.source.holdout if isinstance(run.source, Training) else 0.0
    most = (500 if dataset.structures else 2000) // len(names)
    for name in names:
        domain = dataset.domain(name)
        training, _ = split_holdout(domain, holdout, run.seed)
        few = np.random.default_rng(run.seed).permutation(training)[:most]
        loader = Loader(ConcatDomains([domain]), run.source.size, run.source.channels)
        yield from (x for x, _ in loader.batches(list(batches(few, run.batch if dataset.structures else 64))))
