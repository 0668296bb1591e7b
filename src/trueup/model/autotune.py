"""The fastest settings for running a model on this machine, measured on a batch."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trueup.model.runner import RunSettings
from trueup.model.split_model import SplitModel

log = logging.getLogger("trueup")

MAX_TIME_RATIO = 0.9  # other settings are chosen only if they take at most this fraction of the default's time


def autotune(net: SplitModel, x: Tensor, *, learns: bool) -> RunSettings:
    """Choose the settings that are left to measurement, by timing copies of the model on a batch."""
    trials: dict[bool | str | None, SplitModel] = {}

    def run(candidate: RunSettings) -> None:
        layout = candidate.channels_last
        trial = trials.get(layout) or trials.setdefault(layout, net.clone())
        trial.use(candidate)
        for name, p in trial.model.named_parameters():
            p.requires_grad_(name in net.selected)
        with torch.set_grad_enabled(learns), trial.frozen_statistics(), trial.active(len(x)):
            logits = trial(x).logits
            if logits.requires_grad:
                logits.square().mean().backward()
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    given = settings = net.runner.settings
    if given.channels_last is None:  # channels last if the model supports it, whatever the time
        works = _works(run, replace(given, precision="float32", channels_last=True))
        settings = replace(given, channels_last=works)
    settings = fastest(settings, run, x.device) if settings.unresolved else settings
    return replace(settings, measured=given.unresolved)


def fastest(
    settings: RunSettings, run: Callable[[RunSettings], object], device: torch.device, rounds: int = 3
) -> RunSettings:
    """Return the fastest settings if they are clearly faster than the default; candidates are run in turn."""
    precisions = _precisions(device) if settings.precision == "auto" else (settings.precision,)
    layouts = (False, True) if settings.channels_last == "auto" else (settings.channels_last,)
    candidates = [replace(settings, precision=p, channels_last=layout) for p in precisions for layout in layouts]
    candidates = [c for c in candidates if c == candidates[0] or _works(run, c)]  # this warms them up, too
    times: dict[RunSettings, list[float]] = {c: [] for c in candidates}
    for i in range(rounds + 1):
        for candidate in candidates:
            start = time.perf_counter()
            run(candidate)
            if i:
                times[candidate].append(time.perf_counter() - start)
    medians = {c: statistics.median(seconds) for c, seconds in times.items()}
    best = min(candidates, key=medians.__getitem__)
    log.info("measured: %s", "; ".join(f"{_describe(c)}: {1e3 * t:.0f} ms" for c, t in medians.items()))
    return best if medians[best] <= MAX_TIME_RATIO * medians[candidates[0]] else candidates[0]


def _works(run: Callable[[RunSettings], object], candidate: RunSettings) -> bool:
    """Return whether a model runs with these settings: one that flattens with `view` needs its own layout."""
    try:
        run(candidate)
    except (RuntimeError, ValueError) as error:
        log.info("%s does not work: %s", _describe(candidate), error)
        return False
    return True


def _describe(settings: RunSettings) -> str:
    return f"{settings.precision}{', channels last' if settings.channels_last else ''}"


def _precisions(device: torch.device) -> tuple[str, ...]:
    """Return float32 and the half precision that a device has."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return "float32", "fp16"
    return "float32", "bf16"
