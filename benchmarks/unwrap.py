"""Cost of recording statistics for `unwrap()`, as a ratio of a step with and without it.

The same network, method and batch on both sides, batch statistics; the two take turns.

Run: python benchmarks/unwrap.py [--quick] [--rounds 3]
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from measure import asked_rounds, milliseconds, quartiles, take_turns, write
from torch import Tensor, nn

import trueup

BATCH, PIXELS, ROUNDS = 64, 64, 15


def measure(method: str, batch: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = torchvision.models.resnet18(num_classes=10), torch.randn(batch, 3, PIXELS, PIXELS)
    recording, silent = (trueup.adapt(model, method, example=x) for _ in range(2))
    silent.net.policy = nn.Module()
    variants: dict[str, Callable[[Tensor], object]] = {"recording": recording, "silent": silent}
    times = take_turns(variants, rounds, lambda: torch.randn(batch, 3, PIXELS, PIXELS))
    return {
        "network": "resnet18",
        "method": method,
        "batch": batch,
        "pixels": PIXELS,
        "pairs": rounds,
        "recording_ms": milliseconds(times["recording"]),
        "silent_ms": milliseconds(times["silent"]),
        "recording_over_silent": quartiles(times["recording"], times["silent"]),
    }


def main() -> None:
    rounds, keep = asked_rounds(ROUNDS)
    batch, rows = 8 if "--quick" in sys.argv else BATCH, []
    print(f"ResNet-18, batch {batch}, {PIXELS} pixels, {torch.get_num_threads()} threads; {rounds} pairs")
    for method in ("bn", "tent"):
        row = measure(method, batch, rounds)
        low, median, high = row["recording_over_silent"]
        print(
            f"{method}: with the record {row['recording_ms']} ms, without {row['silent_ms']} ms;"
            f" ratio {median:.3f}, quartiles {low:.3f} and {high:.3f}",
            flush=True,
        )
        rows.append(row)
    if keep:
        write("unwrap", rows)


if __name__ == "__main__":
    main()
