"""Cost of a whole TSD step on pixels over the network's own forward, backward and Adam step.

A batch of 8 images of 256 pixels, three classes, a full bank (1,024 entries of each class); the same network, fused
Adam and batch statistics on both sides; the two take turns. Also the memory of the bank over a long stream.

Run: python benchmarks/pixels.py [--quick]
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from measure import bare_step, milliseconds, quartiles, take_turns, write
from torch import Tensor, nn

import trueup
from trueup.memory.pixel_bank import PixelBank
from trueup.source.networks import build_network

CASES = [
    ("smp:deeplabv3plus/mobilenet_v2", False),
    ("smp:deeplabv3plus/mobilenet_v2", True),
    ("smp:unet/mobilenet_v2", False),
    ("small-unet", False),
]


def measure(name: str, multilabel: bool, batch: int, size: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build_network(name, 2 if multilabel else 3)
    adapter = trueup.adapt(model, "tsd", multilabel=multilabel)
    adapter(torch.randn(2, 3, size, size))
    fill(adapter)
    before = held(adapter.state)
    variants: dict[str, Callable[[Tensor], object]] = {"tsd": adapter, "bare": bare_step(model)}
    times = take_turns(variants, rounds, lambda: torch.randn(batch, 3, size, size))
    assert held(adapter.state) == before, "the bank has grown"
    return {
        "network": name,
        "multilabel": multilabel,
        "batch": batch,
        "pixels": size,
        "bank_bytes": before,
        "pairs": rounds,
        "tsd_ms": milliseconds(times["tsd"]),
        "bare_ms": milliseconds(times["bare"]),
        "tsd_over_bare": quartiles(times["tsd"], times["bare"]),
    }


def fill(adapter: trueup.Adapter) -> None:
    """Fill the bank with entries of every class."""
    for ring in [m for m in adapter.state.modules() if isinstance(m, PixelBank)]:
        classes, capacity, dim = ring.features.shape
        for k in range(classes):
            probs = torch.rand(capacity, classes).softmax(dim=1)
            labels, ones = torch.full((capacity,), k), torch.ones(capacity)
            ring.insert(torch.rand(capacity, dim), probs, labels, torch.rand(capacity), ones)


def held(state: nn.Module) -> int:
    return sum(b.numel() * b.element_size() for b in state.buffers())


def stream(batches: int) -> dict[str, Any]:
    """Return the bank's memory after the first batch and after a long stream of small images."""
    adapter = trueup.adapt(build_network("small-unet", 3), "tsd")
    sizes = []
    for _ in range(batches):
        adapter(torch.randn(2, 3, 32, 32))
        sizes.append(held(adapter.state))
    return {"batches": batches, "bank_bytes_first": sizes[0], "bank_bytes_last": sizes[-1], "most": max(sizes)}


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, size, batch = (2, 64, 2) if quick else (9, 256, 8)
    print(f"Whole step of TSD on pixels over forward + backward + Adam; {torch.get_num_threads()} threads")
    rows = []
    for name, multilabel in CASES[:1] if quick else CASES:
        row = measure(name, multilabel, batch, size, rounds)
        rows.append(row)
        low, median, high = row["tsd_over_bare"]
        kind = ", two labels" if multilabel else ""
        times = f"{row['tsd_ms']} ms over {row['bare_ms']} ms"
        print(f"{name}{kind}: {times}; ratio {median:.3f} (quartiles {low:.3f}, {high:.3f})")
    memory = stream(5 if quick else 500)
    first, most = memory["bank_bytes_first"], memory["most"]
    print(f"bank: {first} bytes after the first batch, {most} at most in {memory['batches']} batches")
    if not quick:
        write("pixels", [*rows, memory])


if __name__ == "__main__":
    main()
