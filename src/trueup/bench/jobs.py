"""The work of a sweep, done by one process at a time: train a source model, or run methods on one stage."""

from __future__ import annotations

import io
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from trueup.source.holdout import split_holdout
from trueup.source.recipe import GivenModel, Recipe, Training
from trueup.source.train import train

Send = Callable[[str, Any], None]  # "progress" (done, of), "run" id, "record" Record


@dataclass(frozen=True)
class Paths:
    """Where things are on this machine; no record mentions it."""

    checkpoints: Path
    root: str | None = None
    file: str | None = None
    """The file of the weights, or of the trained model."""
    threads: int = 1
    device: str = "cpu"
    plugins: tuple[str, ...] = ()
    traces: Path | None = None
    """The folder for what was said of each image; None keeps nothing."""


@dataclass(frozen=True)
class Job:
    """Runs that share a stage, or (without runs) the training of a recipe."""

    site: Paths
    recipe: Recipe | None
    runs: tuple[Run, ...] = ()
    dataset: str = field(kw_only=True)

    @property
    def reading(self) -> Reading:
        """How picture files are read."""
        if self.runs:
            return self.runs[0].source.reading
        assert self.recipe is not None
        return self.recipe.training.reading

    @property
    def title(self) -> str:
        """What to show while it goes on."""
        if not self.runs:
            assert self.recipe is not None
            return f"train {self.recipe.network} on {'+'.join(self.recipe.sources)}, seed {self.recipe.seed}"
        run = self.runs[0]
        knobs = (run.disturb, f"{run.repeat} times" * (run.repeat > 1), run.stream * (run.stream != "iid"))
        return ", ".join([f"{run.dataset}/{run.target}", *filter(None, knobs), f"seed {run.seed}"])


def run_job(job: Job, send: Send) -> None:
    """Do a job and send what comes of it. A run that fails becomes a record with its error; the others go on."""
    torch.set_num_threads(job.site.threads)
    import_plugins(job.site.plugins)
    dataset = open_dataset(job.dataset, job.site.root, job.reading)
    store = Store(job.site.checkpoints)

    def progress(done: int, of: int) -> None:
        send("progress", (done, of))

    if not job.runs:
        assert job.recipe is not None
        site = job.site
        train(
            job.recipe, dataset, store, weights=site.file, threads=site.threads, device=site.device, progress=progress
        )
        return
    stage: StreamRunner | None = None
    for run in job.runs:
        send("run", run.method)
        try:
            with quiet_guard_log():
                stage = stage or make_runner(run, dataset, store, job.site)
                record = evaluate(run, stage, dataset, progress, job.site)
        except Exception as error:
            record = failure_record(run, error)
        send("record", record)


@contextmanager
def quiet_guard_log() -> Iterator[None]:
    """What guards did is in the records, so they need not log it; afterwards they log as before."""
    log = logging.getLogger("trueup.guard")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def evaluate(
    run: Run, stage: StreamRunner, dataset: Dataset, progress: Callable[[int, int], None], site: Paths
) -> Record:
    """One run on its stage: its record."""
    # A frozen network has nothing to lose: a bad row among others does not keep it from answering those.
    stage = replace(stage, guard=run.guard or (run.method == "source" and bool(run.disturb)))
    hyper, extra = dict(run.hyper), {}
    if run.select != "default":
        stages = [stage] if run.select == "oracle" else list(holdout_runners(run, stage, dataset))
        choice = search_hyper(run.method, hyper, stages, lambda: progress(0, len(stage.stream)), dataset.task)
        hyper |= choice.chosen
        extra = {"chosen": choice.chosen, "search": choice.search}
    outcome = stage.run(make_method(run.method, hyper, dataset.task), progress)
    if site.traces is not None:
        extra["trace"] = write_trace(site.traces, run.digest(), outcome.trace)
    return {
        "id": run.digest(),
        "settings": run.model_dump(mode="json"),
        **extra,
        "results": outcome.results,
        "cost": outcome.cost,
        "environment": environment(site.device),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_trace(folder: Path, name: str, trace: Mapping[str, NDArray[Any]]) -> str:
    """Put a trace into a folder: the name that a record calls it."""
    blob = io.BytesIO()
    np.savez_compressed(blob, allow_pickle=False, **trace)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.npz", blob.getvalue())
    return f"{folder.name}/{name}.npz"


def failure_record(run: Run, error: BaseException | str) -> Record:
    """The record of a run that did not come to its end. It names files, but no folders."""
    name, at = str(error), []
    if isinstance(error, BaseException):
        name = f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)[-2:]
        at = [f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in frames]
    name = re.sub(r"(?<![\w.:/])(/[^\s'\",:]+)", lambda found: Path(found[1]).name, name)
    return {"id": run.digest(), "settings": run.model_dump(mode="json"), "error": name, "at": at}


def make_runner(run: Run, dataset: Dataset, store: Store, site: Paths) -> StreamRunner:
    """The source model and the stream of a run."""
    recipe = run.recipe(dataset)
    if recipe is not None:
        model, _ = store.load(recipe)
    else:
        assert site.file is not None
        outputs = dataset.outputs(multilabel=run.source.multilabel)
        model = load_model(site.file, run.network, outputs, run.source.size, run.source.channels.count)
    model.to(memory_format=torch.channels_last)  # as the images come; convolutions are faster this way
    place = ConcatDomains([dataset.domain(name) for name in run.targets])
    what = parse_disturbance(run.disturb) if run.disturb else None
    stream = make_stream(
        place,
        run.stream,
        run.stream_options,
        seed=run.seed,
        batch=what.genuine(run.batch) if what else run.batch,
        limit=run.limit,
        reset=run.reset,
        repeat=run.repeat,
    )
    threads, device = max(2, site.threads), site.device
    loader = Loader(place, run.source.size, run.source.channels, threads=threads, keep=True, device=device)
    elsewhere = isinstance(run.source, Training) and not run.source.iterations  # its source data is not here
    prepare = None if elsewhere else lambda: source_images(run, dataset)
    return StreamRunner(
        model,
        loader,
        stream,
        run.seed,
        run.reset,
        site.device,
        prepare,
        dataset.structures,
        run.source.multilabel,
        intruders=Intruders(what, model, loader, stream, run.batch, run.seed, site.device) if what else None,
    )


def holdout_runners(run: Run, stage: StreamRunner, dataset: Dataset) -> Iterator[StreamRunner]:
    """A stage for each source domain: the images that training has held out, in random order."""
    if isinstance(run.source, GivenModel) or not run.source.iterations:
        raise ValueError("select=source needs images that training has held out, and this model was trained elsewhere")
    for name in dataset.sources(run.targets):
        domain = dataset.domain(name)
        _, held = split_holdout(domain, run.source.holdout, run.seed)
        loader = Loader(ConcatDomains([domain]), run.source.size, run.source.channels, keep=True, device=stage.device)
        stream = list(batches(np.random.default_rng(run.seed).permutation(held), run.batch))
        yield replace(stage, loader=loader, stream=stream, reset=False, passes={}, warm=set(), intruders=None)


def source_images(run: Run, dataset: Dataset) -> Iterator[Tensor]:
    """Batches of images that the model was trained on, 2,000 or 500 with masks at most, from all domains alike."""
    names = dataset.sources(run.targets)
    holdout = run.source.holdout if isinstance(run.source, Training) else 0.0
    for name in names:
        domain = dataset.domain(name)
        trains, _ = split_holdout(domain, holdout, run.seed)
        few = np.random.default_rng(run.seed).permutation(trains)[: (500 if dataset.structures else 2000) // len(names)]
        loader = Loader(ConcatDomains([domain]), run.source.size, run.source.channels)
        for x, _ in loader.batches(list(batches(few, run.batch if dataset.structures else 64))):
            yield x
