"""Cost of a whole TSD step over the network's own forward, backward and Adam step.

1,000 classes, a full bank (M = 100), 224 pixels; the same network, fused Adam and batch statistics on both sides; the
two take turns. Every newcomer displaces an entry of the bank: the worst case.

Run: python benchmarks/step.py [--quick]
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from measure import bare_step, milliseconds, quartiles, take_turns, write
from torch import Tensor

import trueup
from trueup.memory.bank import Bank

CLASSES, M = 1000, 100
CASES = [("resnet18", 64), ("resnet50", 32)]


def measure(name: str, batch: int, size: int, rounds: int, per_class: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None)
    adapter = trueup.adapt(model, "tsd", per_class=per_class, example=torch.randn(2, 3, size, size))
    fill(adapter.state, per_class)
    variants: dict[str, Callable[[Tensor], object]] = {"tsd": adapter, "bare": bare_step(model)}
    times = take_turns(variants, rounds, lambda: torch.randn(batch, 3, size, size))
    assert isinstance(adapter.state, Bank)
    return {
        "network": name,
        "batch": batch,
        "pixels": size,
        "entries": adapter.state.size,
        "pairs": rounds,
        "tsd_ms": milliseconds(times["tsd"]),
        "bare_ms": milliseconds(times["bare"]),
        "tsd_over_bare": quartiles(times["tsd"], times["bare"]),
    }


def fill(bank: torch.nn.Module, per_class: int) -> None:
    """Fill the bank with uncertain entries of every class."""
    assert isinstance(bank, Bank)
    labels, dim = torch.arange(CLASSES), bank.features.shape[1]
    for _ in range(per_class):
        entries = torch.rand(CLASSES, dim), torch.rand(CLASSES, CLASSES).softmax(dim=1)
        bank.insert(*entries, labels, torch.full((CLASSES,), 10.0))


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, size = (2, 32) if quick else (15, 224)
    print(f"Whole TSD step over forward + backward + Adam; {torch.get_num_threads()} threads, {rounds} pairs")
    rows = []
    for name, batch in CASES:
        row = measure(name, 8 if quick else batch, size, rounds, 5 if quick else M)
        rows.append(row)
        low, median, high = row["tsd_over_bare"]
        print(
            f"{name}: {row['tsd_ms']} ms over {row['bare_ms']} ms; ratio {median:.3f} (quartiles {low:.3f}, {high:.3f})"
        )
    if not quick:
        write("step", rows)


if __name__ == "__main__":
    main()
