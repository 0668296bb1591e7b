"""Timing in one run: variants take turns, and results are ratios of neighbouring rounds."""

import copy
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import trueup
from trueup.losses import entropy

T = TypeVar("T")


def bare_step(model: nn.Module) -> Callable[[Tensor], None]:
    """Return the bare step of a network: forward, backward and Adam on a copy, with batch statistics."""
    plain = copy.deepcopy(model).train()
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-4, fused=True)

    def step(x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        entropy(plain(x)).mean().backward()
        optimizer.step()

    return step


def seconds(action: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def asked_rounds(usual: int, quick: int = 2) -> tuple[int, bool]:
    """Return the number of rounds, from `--rounds 3` or the default, and True if they are enough to save."""
    if "--quick" in sys.argv:
        return quick, False
    if "--rounds" not in sys.argv:
        return usual, True
    rounds = int(sys.argv[sys.argv.index("--rounds") + 1])
    return max(2, rounds), rounds >= usual


def take_turns(
    variants: dict[str, Callable[[T], object]], rounds: int, fresh: Callable[[], T], warm: int = 2
) -> dict[str, list[float]]:
    """Return the seconds of each variant, round by round, with fresh inputs and in alternating order.

    The first `warm` rounds warm up and do not count.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + warm):
        for name, action in list(variants.items())[:: 1 if i % 2 else -1]:
            elapsed = seconds(partial(action, fresh()))
            if i >= warm:
                times[name].append(elapsed)
    return times


def quartiles(over: list[float], under: list[float]) -> list[float]:
    """Return lower quartile, median and upper quartile of the pairwise ratios."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return [round(q, 4) for q in statistics.quantiles(ratios, n=4, method="inclusive")]


def milliseconds(times: list[float]) -> float:
    """Return the median in milliseconds as text."""
    return round(1000 * statistics.median(times), 2)


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Write the results with the command that measured them."""
    record = {
        "command": f"python benchmarks/{name}.py",
        "trueup": trueup.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
        "rows": rows,
    }
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {os.path.relpath(path)}")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
