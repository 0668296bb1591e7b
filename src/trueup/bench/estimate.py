"""Estimates of the time that runs take: each network is timed on this machine, and images are counted."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

import torch
import torch.nn.functional as F

from trueup.bench.hparam_search import search_grid
from trueup.bench.settings import Run
from trueup.core.method import GradientMethod
from trueup.core.registry import get_method
from trueup.data.cards import get_card
from trueup.data.datasets import Dataset
from trueup.source.networks import build_network
from trueup.source.recipe import GivenModel, Recipe

PIXELS = 256 * 256  # of a timed batch, which has 4 to 64 images
OUTPUTS = 10
SEVERITIES = 5  # a run uses one of them
CLEAN = 50_000  # training images of CIFAR
SLICES = 10  # per volume, roughly


@cache
def measure_pace(network: str, size: int, device: str) -> tuple[float, float]:
    """Return the seconds per image of a network with random weights: forward, and forward and backward.

    After two warm-up passes, the faster of two is taken.
    """
    count = max(4, min(64, PIXELS // size**2))
    model = build_network(network, OUTPUTS, size=size).to(device).train()
    x = torch.randn(count, 3, size, size, device=device)
    seconds = []
    for backward in (False, True):
        times = []
        for _ in range(4):
            start = time.perf_counter()
            with torch.set_grad_enabled(backward):
                output = model(x)
                logits = output["out"] if isinstance(output, dict) else output
                if backward:
                    F.softmax(logits.float(), dim=1).square().mean().backward()
                float(logits.detach().float().mean())  # waits for the device
            times.append(time.perf_counter() - start)
        seconds.append(min(times[2:]) / count)
    return seconds[0], seconds[1]


def count_images(dataset: Dataset, domain: str) -> int:
    """Return how many images a domain has; from its dataset card if there are no files."""
    with suppress(ValueError):
        if count := len(dataset.domain(domain).labels):
            return count
    card, name = get_card(dataset.name), domain.partition(":")[0]
    if card.kind == "corruptions":
        return CLEAN if name == dataset.clean else card.domains[name.partition("-")[0]] // SEVERITIES
    return card.domains[name] * (SLICES if card.kind == "masks" and card.name != "fundus" else 1)


def seconds_of_run(run: Run, dataset: Dataset, device: str = "cpu") -> float:
    """Estimate the network's time for a run, including its hyper-parameter search."""
    forward, both = measure_pace(run.network, run.source.size, device)
    each = both if issubclass(get_method(run.method, dataset.task), GradientMethod) else forward
    count = sum(count_images(dataset, target) for target in run.targets)
    seconds = min(count, run.limit or count) * run.repeat * each
    if run.select == "default" or isinstance(run.source, GivenModel):
        return seconds
    candidates = len(search_grid(run.method, run.hyper, dataset.task))
    if get_method(run.method, dataset.task).features_only:
        candidates = min(candidates, 1)  # candidates share one pass of the backbone
    held = sum(count_images(dataset, name) for name in dataset.sources(run.targets)) * run.source.holdout
    return seconds + candidates * (held * each if run.select == "source" else seconds)


def seconds_of_training(recipe: Recipe, dataset: Dataset, device: str = "cpu") -> float:
    """Estimate the network's time for training a source model, including validation."""
    training = recipe.training
    forward, both = measure_pace(recipe.network, training.size, device)
    held = sum(count_images(dataset, name) for name in recipe.sources) * training.holdout
    validations = max(0, training.iterations - training.first) // training.every + 1 if training.iterations else 0
    seen = training.iterations * training.batch * len(recipe.sources)
    return seen * both + validations * held * forward


def format_duration(seconds: float) -> str:
    """Return a duration in words, such as "5 minutes"."""
    for name, size in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(seconds, 1):.0f} seconds"


def total_seconds(
    runs: Iterable[Run], recipes: Iterable[Recipe], datasets: dict[str, Dataset], device: str = "cpu"
) -> float:
    """Estimate the seconds of all runs and trainings, one after the other."""
    trained = sum(seconds_of_training(recipe, datasets[recipe.dataset], device) for recipe in recipes)
    return trained + sum(seconds_of_run(run, datasets[run.dataset], device) for run in runs)
