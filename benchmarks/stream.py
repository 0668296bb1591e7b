"""Time of the bank's step at the end of a stream of 128,000 features, compared with its start.

The bank is full from the start, and every newcomer displaces an entry: the worst case, and always the same work. Near
its last batch the bank takes turns with copies of its start, so that both see the same load of the machine: medians of
batches around the 10th and of as many up to the 1,000th are compared. "write" is insertion and prototypes, "step" is
these and the search.

Run: python benchmarks/stream.py [--quick]
"""

import copy
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bank import BATCH, Batch, K, M, Stream, filled
from measure import milliseconds, quartiles, seconds, write

from trueup.memory.bank import Bank

CLASSES, DIM, BATCHES = 345, 512, 1000
TENTH, AROUND, REPEATS = 10, 9, 7  # batches around the tenth, and repeats


def step(bank: Bank, batch: Batch) -> tuple[float, float]:
    """Return the seconds of writing, and of the whole step."""

    def insert() -> None:
        bank.insert(*batch)
        bank.prototypes()

    written = seconds(insert)
    return written, written + seconds(partial(bank.neighbors, batch[0], K))


def compare(late: Bank, start: Bank, fresh: Callable[[], Batch]) -> list[float]:
    """Return medians near the end and at the tenth batch: late write, late step, early write, early step."""
    early = copy.deepcopy(start)
    for _ in range(TENTH - AROUND // 2 - 1):
        step(early, fresh())
    times: tuple[list[tuple[float, float]], ...] = ([], [])
    for i in range(AROUND):
        for at in (0, 1)[:: 1 if i % 2 else -1]:
            times[at].append(step((late, early)[at], fresh()))
    return [statistics.median(each) for side in times for each in zip(*side, strict=True)]


def measure(classes: int, dim: int, batches: int, repeats: int) -> dict[str, Any]:
    stream = Stream(classes, dim)
    start = filled(stream, M, classes)
    bank, along = copy.deepcopy(start), []
    for i in range(batches - repeats * AROUND):
        along.append(step(bank, stream.batch())[1])
        if (i + 1) % 100 == 0:
            print(f"  batch {i + 1}: {milliseconds(along[-100:])} ms", flush=True)
    found = [compare(bank, start, stream.batch) for _ in range(repeats)]
    late_write, late, early_write, early = ([each[i] for each in found] for i in range(4))
    return {
        "classes": classes,
        "dim": dim,
        "entries": bank.size,
        "batch": BATCH,
        "batches": batches,
        "early_ms": milliseconds(early),
        "late_ms": milliseconds(late),
        "late_over_early": quartiles(late, early),
        "early_write_ms": milliseconds(early_write),
        "late_write_ms": milliseconds(late_write),
        "write_late_over_early": quartiles(late_write, early_write),
    }


def main() -> None:
    quick = "--quick" in sys.argv
    print(f"{'100' if quick else '1,000'} batches of {BATCH}, M = {M}, K = {K}, {torch.get_num_threads()} threads")
    row = measure(7, 64, 100, 2) if quick else measure(CLASSES, DIM, BATCHES, REPEATS)
    for name, what in (("", "step"), ("write_", "write")):
        low, ratio, high = row[f"{name}late_over_early"]
        early, late = row[f"early_{name}ms"], row[f"late_{name}ms"]
        print(f"{what:>5}: {early} ms early, {late} ms late; ratio {ratio:.3f} (quartiles {low:.3f} and {high:.3f})")
    if not quick:
        write("stream", [row])


if __name__ == "__main__":
    main()
