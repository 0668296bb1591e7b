"""Which way of running a model is the fastest here: measured on a batch, in turns."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trueup.model.runner import Engine
from trueup.model.split_model import SplitModel

log = logging.getLogger("trueup")

GAIN = 0.9  # a faster way must take at most this part of the usual time to be chosen


def autotune(net: SplitModel, x: Tensor, *, learns: bool) -> Engine:
    """The engine with what it leaves open filled in, by forwards (and backwards) of a batch. Nothing is changed."""
    trials: dict[bool | str | None, SplitModel] = {}

    def step(way: Engine) -> None:
        trial = trials.get(way.channels_last) or trials.setdefault(way.channels_last, net.clone())
        trial.use(way)
        for name, p in trial.model.named_parameters():
            p.requires_grad_(name in net.selected)
        with torch.set_grad_enabled(learns), trial.frozen_statistics(), trial.normalizing(len(x)):
            logits = trial(x).logits
            if logits.requires_grad:
                logits.square().mean().backward()
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    engine = net.engine
    if engine.channels_last is None:  # not a matter of time
        engine = replace(engine, channels_last=_goes(step, replace(engine, precision="float32", channels_last=True)))
    engine = fastest(engine, step, x.device) if engine.open else engine
    return replace(engine, measured=net.engine.open)


def fastest(engine: Engine, step: Callable[[Engine], object], device: torch.device, rounds: int = 3) -> Engine:
    """The fastest of the ways that are open, if it is clearly faster than the usual one; they take turns."""
    precisions = _halves(device) if engine.precision == "auto" else (engine.precision,)
    layouts = (False, True) if engine.channels_last == "auto" else (engine.channels_last,)
    ways = [replace(engine, precision=p, channels_last=layout) for p in precisions for layout in layouts]
    ways = [way for way in ways if way == ways[0] or _goes(step, way)]  # this warms them up, too
    times: dict[Engine, list[float]] = {way: [] for way in ways}
    for i in range(rounds + 1):
        for way in ways:
            start = time.perf_counter()
            step(way)
            if i:
                times[way].append(time.perf_counter() - start)
    medians = {way: statistics.median(seconds) for way, seconds in times.items()}
    best = min(ways, key=medians.__getitem__)
    chosen = best if medians[best] <= GAIN * medians[ways[0]] else ways[0]
    log.info("measured: %s", "; ".join(f"{_said(way)}: {1e3 * t:.0f} ms" for way, t in medians.items()))
    return chosen


def _goes(step: Callable[[Engine], object], way: Engine) -> bool:
    """Whether a model can be run so: some flatten with a view, some have operations without a half precision."""
    try:
        step(way)
    except (RuntimeError, ValueError) as error:
        log.info("%s cannot be run: %s", _said(way), error)
        return False
    return True


def _said(way: Engine) -> str:
    return f"{way.precision}{', channels last' if way.channels_last else ''}"


def _halves(device: torch.device) -> tuple[str, ...]:
    """float32, and the half precision that a device has."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return "float32", "fp16"
    return "float32", "bf16"
