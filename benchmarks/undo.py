"""Cost of rolling back failed batches, and of the lock for threads.

Steps with and without rollback take turns; the lock is timed alone, against a small step.

Run: python benchmarks/undo.py [--quick] [--rounds N]
"""

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torchvision
from measure import asked_rounds, take_turns, write
from torch import Tensor, nn

import trueup
from trueup.testing import convnet, images


def without_undo(adapter: trueup.Adapter, x: Tensor) -> None:
    """Take a step without rollback."""
    with mock.patch("trueup.core.adapter.all_or_nothing", return_value=nullcontext()):
        adapter(x)


def compared(name: str, model: nn.Module, method: str, x: Tensor, rounds: int) -> dict[str, Any]:
    """Return the ratio of a step with rollback to one without."""
    adapters = [trueup.adapt(model, method, example=x) for _ in range(2)]
    variants: dict[str, Callable[[Tensor], object]] = {
        "with": adapters[0],
        "without": partial(without_undo, adapters[1]),
    }
    seconds = take_turns(variants, rounds, lambda: x)
    ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    row = {
        "network": name,
        "method": method,
        "batch": len(x),
        "pixels": x.shape[-1],
        "ratio": middle,
        "lower": low,
        "upper": high,
    }
    print(
        "  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    )
    return row


def lock() -> dict[str, Any]:
    """Return the lock's time as a share of a Tent step on a toy network with one image."""
    adapter, x, n = trueup.adapt(convnet(), "tent", norm="ema"), images(1, seed=0)[0], 50
    adapter(x)
    start = time.perf_counter()
    for _ in range(n):
        adapter(x)
    step = (time.perf_counter() - start) / n
    start = time.perf_counter()
    for _ in range(100 * n):
        with adapter.lock.held:
            pass
    part = (time.perf_counter() - start) / (100 * n) / step
    print(f"lock: {100 * part:.3f} % of a step of {1e3 * step:.2f} ms")
    return {"lock": part, "step": step}


def main() -> None:
    rounds, kept = asked_rounds(9)
    rows = [lock()]
    torch.manual_seed(0)
    batch = 8 if "--quick" in sys.argv else 64
    cases = [("resnet18", batch, 64, "tent"), ("resnet18", batch, 64, "tsd")]
    cases += [("resnet18", 64, 224, "tsd"), ("resnet50", 32, 224, "tsd")] if kept else []
    for network, batch, size, method in cases:
        model, x = torchvision.models.get_model(network, num_classes=100).eval(), torch.randn(batch, 3, size, size)
        rows.append(compared(network, model, method, x, rounds))
    if kept:
        write("undo", rows)


if __name__ == "__main__":
    main()
