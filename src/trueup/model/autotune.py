"""The fastest way to run a model here, measured on a batch."""

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

GAIN = 0.9  # a faster way must take at most this part of the usual time to be chosen


def autotune(net: SplitModel, x: Tensor, *, learns: bool) -> RunSettings:
    """Return the settings with the open ones chosen, by forwards (and backwards) of copies on a batch."""
    trials: dict[bool | str | None, SplitModel] = {}

    def step(way: RunSettings) -> None:
        trial = trials.get(way.channels_last) or trials.setdefault(way.channels_last, net.clone())
        trial.use(way)
        for name, p in trial.model.named_parameters():
            p.requires_grad_(name in net.selected)
        with torch.set_grad_enabled(learns), trial.frozen_statistics(), trial.active(len(x)):
            logits = trial(x).logits
            if logits.requires_grad:
                logits.square().mean().backward()
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    usual = settings = net.runner.settings
    if settings.channels_last is None:  # not a matter of time
        settings = replace(
            settings, channels_last=_works(step, replace(usual, precision="float32", channels_last=True))
        )
    settings = fastest(settings, step, x.device) if settings.open else settings
    return replace(settings, measured=usual.open)


def fastest(
    settings: RunSettings, step: Callable[[RunSettings], object], device: torch.device, rounds: int = 3
) -> RunSettings:
    """Return the fastest way, if it is clearly faster than the usual one; the ways take turns."""
    precisions = _precisions(device) if settings.precision == "auto" else (settings.precision,)
    layouts = (False, True) if settings.channels_last == "auto" else (settings.channels_last,)
    ways = [replace(settings, precision=p, channels_last=layout) for p in precisions for layout in layouts]
    ways = [way for way in ways if way == ways[0] or _works(step, way)]  # this warms them up, too
    times: dict[RunSettings, list[float]] = {way: [] for way in ways}
    for i in range(rounds + 1):
        for way in ways:
            start = time.perf_counter()
            step(way)
            if i:
                times[way].append(time.perf_counter() - start)
    medians = {way: statistics.median(seconds) for way, seconds in times.items()}
    best = min(ways, key=medians.__getitem__)
    chosen = best if medians[best] <= GAIN * medians[ways[0]] else ways[0]
    log.info("measured: %s", "; ".join(f"{_describe(way)}: {1e3 * t:.0f} ms" for way, t in medians.items()))
    return chosen


def _works(step: Callable[[RunSettings], object], way: RunSettings) -> bool:
    """Return whether a model runs so: some flatten with a view, some have operations without a half precision."""
    try:
        step(way)
    except (RuntimeError, ValueError) as error:
        log.info("%s does not work: %s", _describe(way), error)
        return False
    return True


def _describe(way: RunSettings) -> str:
    return f"{way.precision}{', channels last' if way.channels_last else ''}"


def _precisions(device: torch.device) -> tuple[str, ...]:
    """Return float32 and the half precision that a device has."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return "float32", "fp16"
    return "float32", "bf16"
