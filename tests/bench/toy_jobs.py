"""A small dataset, runs on it, a store with their model, and sweeps."""

from pathlib import Path
from typing import Any

import torch
from toy_streams import domain

from trueup.bench.records import Record
from trueup.bench.settings import Run, Sweep
from trueup.bench.sweep import SweepSummary, plan, run_plan
from trueup.core.registry import make_method
from trueup.data.datasets import Dataset
from trueup.source.checkpoints import Store
from trueup.source.networks import build_network
from trueup.source.recipe import Training


def toy() -> Dataset:
    domains = {f"d{seed}": domain(60, seed=seed, shift=shift) for seed, shift in ((1, 0.0), (2, 0.3), (3, 0.9))}
    return Dataset("toy", tuple("abcdef"), tuple(domains), domains.__getitem__)


def run_of(method: str = "tsd", **more: Any) -> Run:
    values: dict[str, Any] = {
        "dataset": "toy", "target": "d3", "network": "digits-net", "weights": "none", "batch": 16, "method": method,
        "source": Training(iterations=1, size=16, normalize="half", augment="none"),
        "hyper": make_method(method, {}).hyperparameters(),
    }  # fmt: skip
    return Run(**values | more)


def stored(folder: Path, run: Run, dataset: Dataset) -> Store:
    """A store with an untrained network under the run's recipe."""
    store, recipe = Store(folder), run.recipe(dataset)
    assert recipe is not None
    with torch.random.fork_rng():
        torch.manual_seed(run.seed)
        store.save(recipe, build_network("digits-net", 6, size=16), {})
    return store


def run_sweep(
    sweep: Sweep, folder: Path, *, workers: int, checkpoints: Path | None = None, **more: Any
) -> SweepSummary:
    """Run what is missing of a sweep, record it in the folder, and return all records, old and new."""
    return run_plan(plan(sweep, folder, checkpoints=checkpoints), workers=workers, **more)


def reproducible_part(record: Record) -> Record:
    """Return a record without what differs from run to run: time and memory."""
    return {key: value for key, value in record.items() if key not in ("cost", "finished")}
