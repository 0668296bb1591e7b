"""`trueup train`: train source models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from trueup.bench.jobs import run_job
from trueup.bench.settings import make_sweep
from trueup.bench.sweep import CHECKPOINTS, plan
from trueup.cli import options
from trueup.cli.progress import progress_bar
from trueup.source.checkpoints import Store, read_header


def train(
    dataset: str = typer.Option("digits", "--dataset", "-d", help="digits, digits-c, pacs, …, or folder."),
    root: str = options.ROOT,
    target: list[str] = options.TARGET,
    network: str = typer.Option(None, "--network", "-n", help="A torchvision or timm name, or module:function."),
    weights: str = options.WEIGHTS,
    training: list[str] = options.TRAIN,
    resize: str = options.RESIZE,
    limits: options.Limits = options.RANGE,
    mean: str = options.MEAN,
    std: str = options.STD,
    grey: bool = options.GREY,
    seed: list[int] = options.SEED,
    out: str = options.OUT,
    checkpoints: str = options.CHECKPOINTS,
    device: str = options.DEVICE,
) -> None:
    """Train the source model of each target and seed: ERM, or SWAD with --train algorithm=swad.

    A stopped training resumes from its last save; a finished one is not repeated.
    """
    training = options.training_settings(training, resize, limits, mean, std, grey)
    flags = options.passed(
        dataset=dataset, root=root, target=target, network=network, weights=weights, training=training, seed=seed
    )
    sweep = make_sweep({**flags, "method": ["source"]})
    store = Store(Path(checkpoints) if checkpoints else Path(out) / CHECKPOINTS)
    todo = plan(sweep, out, checkpoints=checkpoints, device=device)
    for job in todo.trainings.values():
        with progress_bar(job.title) as advance:
            run_job(job, partial(_show, advance), threads=torch.get_num_threads())
    recipes = [run.recipe(todo.open(run.dataset, run.source.reading)) for run in todo.runs]
    for recipe in {recipe.digest(): recipe for recipe in recipes if recipe is not None}.values():
        kept = read_header(store.path(recipe))["report"]["kept"]
        name, label = ("accuracy", "") if "accuracy" in kept else ("dice", "Dice ")
        score = f"{label}{100 * kept[name]:.1f} % on held-out source images" if kept else "weights not trained"
        made = f"trained on {', '.join(recipe.sources)}, seed {recipe.seed}, {score}"
        Console().print(f"{store.path(recipe)}  {made}", highlight=False, soft_wrap=True, emoji=False)


def _show(advance: Callable[[int, int], None], event: str, value: Any) -> None:
    if event == "progress":
        advance(*value)
