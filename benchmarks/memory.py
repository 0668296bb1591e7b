"""Growth of resident memory over 100,000 images, for each method, plain and with the safe preset.

Methods with many views per image get 5,000 images. The network is small, so that growth is visible. The result is the
growth from the first fifth of the stream to its end.

Run: python benchmarks/memory.py [--quick]
"""

import gc
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
from measure import write

import trueup
from trueup.testing import convnet, images

MANY_VIEWS = ("memo", "cotta")
BATCH = 50


def resident() -> float:
    """Return the resident megabytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(method: str, safe: bool, total: int) -> dict[str, Any]:
    logging.getLogger("trueup.guard").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    adapter = trueup.adapt(convnet(), method, preset="safe" if safe else None)
    stock = images(2000, seed=1, shift=1.0)[0]
    marks = {total // 5: 0.0, total: 0.0}
    for seen in range(BATCH, total + 1, BATCH):
        adapter(stock[torch.randint(len(stock), (BATCH,))] + 0.1 * torch.randn(BATCH, *stock.shape[1:]))
        if seen in marks:
            marks[seen] = resident()
    early, late = marks.values()
    return {
        "method": method, "preset": "safe" if safe else "", "images": total,
        "early_mb": round(early, 1), "late_mb": round(late, 1), "growth_mb": round(late - early, 2),
    }  # fmt: skip


def main() -> None:
    quick = "--quick" in sys.argv
    lengths = {m: 2_000 if quick else 5_000 if m in MANY_VIEWS else 100_000 for m in trueup.list_methods()}
    cases = [(method, safe, length) for method, length in lengths.items() for safe in (False, True)]
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # one process each
        for row in pool.starmap(measure, cases[:2] if quick else cases, chunksize=1):
            print(f"{row['method']} {row['preset']}: {row['early_mb']} MB, {row['growth_mb']:+} MB by the end")
            rows.append(row)
    if not quick:
        write("memory", rows)


if __name__ == "__main__":
    main()
