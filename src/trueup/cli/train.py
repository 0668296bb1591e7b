"""`trueup train`: train source models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trueup.bench.jobs import run_job
from trueup.bench.settings import make_sweep
from trueup.bench.sweep import CHECKPOINTS, plan
from trueup.cli.options import PICTURES, flags_in_order, settings_of
from trueup.cli.progress import progress_bar
from trueup.source.checkpoints import Store, read_header


@flags_in_order(
    f"dataset root target network weights training {PICTURES} seed out checkpoints device", single="dataset network"
)
def train(*, out: str, checkpoints: str | None, device: str, **settings: Any) -> None:
    """Train the source model of each target and seed: ERM, or SWAD with --train algorithm=swad.

    A stopped training resumes from its last save; a finished one is not repeated.
    """
    sweep = make_sweep(settings_of(settings | {"method": ["source"]}))
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
