"""Time that the network waits for images: TSD on ResNet-18 over JPEG files, decoded in advance by threads.

The share of a run's time between asking for a batch and having it, without the first batch. Also the ratio of the
whole run to the same steps on batches that are in memory.

Run: python benchmarks/waiting.py [--quick]
"""

import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from loading import make_files
from measure import write
from torch import Tensor

import trueup
from trueup.data.domains import FileDomain
from trueup.data.loading import ConcatDomains, Loader
from trueup.data.streams import batches


def run(adapter: trueup.Adapter, stream: Iterable[tuple[Tensor, Any]]) -> tuple[float, float]:
    """Return the seconds of steps and of waiting, from the second batch on."""
    steps = waits = 0.0
    before = time.perf_counter()
    for i, (x, _) in enumerate(stream):
        here = time.perf_counter()
        adapter(x)
        after = time.perf_counter()
        if i:
            waits, steps = waits + here - before, steps + after - here
        before = after
    return steps, waits


def main() -> None:
    """Measure files of two sizes."""
    quick = "--quick" in sys.argv
    sizes, count, batch, to = ((64,), 24, 8, 32) if quick else ((256, 800), 512, 32, 224)
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            names = make_files(Path(folder), count, size)
            domain = FileDomain("files", Path(folder), names, np.zeros(count, dtype=np.int64))
            adapter = trueup.adapt(torchvision.models.resnet18(weights=None), "tsd")
            stream = list(batches(np.arange(count), batch))
            loader = Loader(ConcatDomains([domain]), to)
            ready = list(loader.batches(stream))
            alone, _ = run(adapter, ready)
            adapter.reset()
            steps, waits = run(adapter, loader.batches(stream))
        share = waits / (steps + waits)
        rows.append({
            "files": f"{size} px JPEG to {to} px", "batch": batch, "images": count, "network": "resnet18",
            "threads": torch.get_num_threads(), "waiting_share": round(share, 4),
            "over_ready": round((steps + waits) / alone, 3),
        })  # fmt: skip
        print(f"{size} px: waits {share:.2%} of the time; {rows[-1]['over_ready']} times the steps on ready batches")
    if not quick:
        write("waiting", rows)


if __name__ == "__main__":
    main()
