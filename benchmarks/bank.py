"""Cost of the memory bank: a step with a batch of 128, M = 100 and K = 3, on a full bank.

Against (a) the bare similarity product 128 × N × D and top-k, which an exact search cannot avoid; and (b) the way the
released TSD keeps its bank: concatenate, loop over classes, sort, gather, dense one-hot product. Every newcomer of a
batch is more certain than what is stored, so each displaces an entry: the worst case. "write" is insertion and
prototypes; "full/tenth" compares the same work on the full bank and on one with a tenth of the entries, "full/roomy"
with one that has room, where nothing is displaced.

Run: python benchmarks/bank.py [--quick]
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measure import milliseconds, quartiles, take_turns, write
from torch import Tensor

from trueup.memory.bank import Bank

BATCH, M, K = 128, 100, 3
SIZES = [(7, 512), (65, 512), (345, 2048), (1000, 2048)]


Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class Stream:
    """Random batches, each more certain than the last."""

    def __init__(self, classes: int, dim: int) -> None:
        self.classes, self.dim, self.h = classes, dim, 1.0
        self.g = torch.Generator().manual_seed(0)

    def batch(self, labels: Tensor | None = None) -> Batch:
        if labels is None:
            labels = torch.randint(self.classes, (BATCH,), generator=self.g)
        n = len(labels)
        self.h -= 1e-3
        entropy = self.h + 1e-4 * torch.rand(n, generator=self.g)
        return torch.rand(n, self.dim, generator=self.g), torch.rand(n, self.classes, generator=self.g), labels, entropy


def filled(stream: Stream, per_class: int, classes: int) -> Bank:
    """Make a bank in which the first `classes` classes hold `per_class` entries each."""
    bank = Bank(stream.classes, stream.dim, M, torch.zeros(0))
    for _ in range(per_class):
        bank.insert(*stream.batch(torch.arange(classes)))
    return bank


class Released:
    """The bank of the released code, re-created: dense labels, rebuilt with every batch."""

    def __init__(self, bank: Bank) -> None:
        self.z, self.q = bank.features[: bank.size].clone(), bank.probs[: bank.size].clone()
        self.y = F.one_hot(bank.labels[: bank.size], len(bank.counts)).float()
        self.h = bank.entropy[: bank.size].clone()

    def insert(self, z: Tensor, q: Tensor, y: Tensor, h: Tensor) -> Tensor:
        self.z, self.q = torch.cat((self.z, z)), torch.cat((self.q, q))
        self.y, self.h = torch.cat((self.y, F.one_hot(y, self.y.shape[1]).float())), torch.cat((self.h, h))
        labels, every, keep = self.y.argmax(dim=1), torch.arange(len(self.h)), []
        for k in range(self.y.shape[1]):
            members = every[labels == k]
            keep.append(members[self.h[members].argsort()[:M]])
        rows = torch.cat(keep)
        self.z, self.q, self.y, self.h = self.z[rows], self.q[rows], self.y[rows], self.h[rows]
        return F.normalize(self.z, p=2, dim=1).T @ self.y


def measure(classes: int, dim: int, rounds: int) -> dict[str, Any]:
    stream, some = Stream(classes, dim), max(1, classes // 10)
    full, tenth, roomy = filled(stream, M, classes), filled(stream, M, some), filled(stream, 2, classes)

    def write_to(bank: Bank, batch: Batch) -> None:
        bank.insert(*batch)
        bank.prototypes()

    def step(batch: Batch) -> None:
        write_to(full, batch)
        full.neighbors(batch[0], K)

    def bare(batch: Batch) -> None:
        (batch[0] @ full.features[: full.size].T).topk(K, dim=1)

    steps = take_turns({"step": step, "bare": bare}, rounds, stream.batch)
    # The same work with a tenth of the entries: newcomers belong to classes that are full in both.
    labels = torch.arange(BATCH) % some
    banks = {"full": full, "tenth": tenth}
    same = take_turns({n: partial(write_to, b) for n, b in banks.items()}, 2 * rounds, lambda: stream.batch(labels))
    # A bank with room takes newcomers without removing entries.
    banks = {"full": full, "roomy": roomy}
    writes = take_turns({n: partial(write_to, b) for n, b in banks.items()}, rounds, stream.batch)
    released = Released(full)
    ways: dict[str, Callable[[Batch], object]] = {
        "ours": partial(write_to, full),
        "released": lambda batch: released.insert(*batch),
    }
    old = take_turns(ways, min(rounds, 5), stream.batch)
    return {
        "classes": classes,
        "dim": dim,
        "entries": full.size,
        "step_ms": milliseconds(steps["step"]),
        "bare_ms": milliseconds(steps["bare"]),
        "step_over_bare": quartiles(steps["step"], steps["bare"]),
        "write_ms": milliseconds(writes["full"]),
        "released_write_ms": milliseconds(old["released"]),
        "released_over_write": quartiles(old["released"], old["ours"]),
        "write_full_over_tenth": quartiles(same["full"], same["tenth"]),
        "write_full_over_roomy": quartiles(writes["full"], writes["roomy"]),
    }


def main() -> None:
    rounds = 3 if "--quick" in sys.argv else 15
    sizes = SIZES[:2] if "--quick" in sys.argv else SIZES
    rows = []
    print(f"Bank step, batch {BATCH}, M = {M}, K = {K}, {torch.get_num_threads()} threads; medians of {rounds} rounds")
    print(
        f"{'C':>5} {'D':>5} {'entries':>8} | {'step':>9} {'bare':>9} {'ratio':>6} | {'write':>9} {'released':>10}",
        end="",
    )
    print(f" {'speed-up':>9} | {'full/tenth':>10} {'full/roomy':>10}")
    for classes, dim in sizes:
        row = measure(classes, dim, rounds)
        rows.append(row)
        ratio, faster, tenth, roomy = (
            row[k][1]
            for k in ("step_over_bare", "released_over_write", "write_full_over_tenth", "write_full_over_roomy")
        )
        print(
            f"{classes:5} {dim:5} {row['entries']:8} | {row['step_ms']:6} ms {row['bare_ms']:6} ms {ratio:6.2f} |"
            f" {row['write_ms']:6} ms {row['released_write_ms']:7} ms {faster:8.0f}x | {tenth:10.2f} {roomy:10.2f}"
        )
    if "--quick" not in sys.argv:
        write("bank", rows)


if __name__ == "__main__":
    main()
