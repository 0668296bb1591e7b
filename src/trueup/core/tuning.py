"""Which way of running a model is the fastest here: measured on a batch, in turns."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trueup.core.engine import Engine
from trueup.core.split import SplitModel

log = logging.getLogger("trueup")

GAIN = 0.9  # a faster way must take at most this part of the usual time to be chosen


def tuned(net: SplitModel, x: Tensor, *, learns: bool) -> Engine:
    """The engine with what it leaves open filled in, by forwards (and backwards) of a batch. Nothing is changed."""

    def step(way: Engine) -> None:
        trial.use(way)
        with torch.set_grad_enabled(learns), trial.reading(), trial.normalizing(len(x)):
            logits = trial(x).logits
            if learns:
                logits.square().mean().backward()
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    trial = net.clone()
    for name, p in trial.model.named_parameters():
        p.requires_grad_(name in net.selected)
    return measured(net.engine, step, x.device)


def measured(engine: Engine, step: Callable[[Engine], object], device: torch.device, rounds: int = 3) -> Engine:
    """The fastest of the ways that are open, if it is clearly faster than the usual one; they take turns."""
    precisions = _halves(device) if engine.precision == "auto" else (engine.precision,)
    layouts = (False, True) if engine.channels_last == "auto" else (engine.channels_last,)
    ways = [replace(engine, precision=p, channels_last=layout) for p in precisions for layout in layouts]
    times: dict[Engine, list[float]] = {way: [] for way in ways}
    for i in range(rounds + 1):
        for way in ways:
            start = time.perf_counter()
            step(way)
            if i:  # the first round warms up
                times[way].append(time.perf_counter() - start)
    medians = {way: statistics.median(seconds) for way, seconds in times.items()}
    best = min(ways, key=medians.__getitem__)
    chosen = best if medians[best] <= GAIN * medians[ways[0]] else ways[0]
    said = [
        f"{w.precision}{', channels last' if w.channels_last else ''}: {1e3 * t:.0f} ms" for w, t in medians.items()
    ]
    log.info("measured: %s", "; ".join(said))
    return replace(chosen, measured=True)


def _halves(device: torch.device) -> tuple[str, ...]:
    """float32, and the half precision that a device has."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return "float32", "fp16"
    return "float32", "bf16"
