"""Speed and recall of the sketch search: C = 1,000, D = 2,048, M = 100, K = 3, batch 128, a full bank.

"step" is insertion (with the upkeep of sketches), prototypes and the search; "bare" is the similarity product
128 × N × D and top-k, which an exact search cannot avoid. Recall is the share of the exact neighbours that are found,
for queries that are not in the bank. Features are rectified, as a network's are, and made in four ways:
around a centre for each class ("centres"), the same with a large part that all have in common ("common"), in a few
directions of all ("directions"), and with directions of its own for each class ("classes").

Run: python benchmarks/sketch.py [--quick] [--rounds 3]
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from bank import BATCH, Batch, K, M
from measure import asked_rounds, milliseconds, quartiles, take_turns, write
from torch import Tensor

from trueup.memory.bank import Bank
from trueup.memory.nearest import CANDIDATES

CLASSES, DIM, ROUNDS = 1000, 2048, 11
KINDS = ("centres", "common", "directions", "classes")
DIRECTIONS, OWN = 64, 8


class Features:
    """Batches of one kind, each more certain than the last."""

    def __init__(self, kind: str, classes: int, dim: int) -> None:
        self.g, self.kind, self.classes, self.h = torch.Generator().manual_seed(0), kind, classes, 1.0
        self.centres = self._normal(classes, dim)
        self.common = self._normal(DIRECTIONS, dim) / DIRECTIONS**0.5
        self.places = self._normal(classes, DIRECTIONS)
        self.own = self._normal(classes, OWN, 64)  # in a few dimensions, to save memory
        self.where = torch.randint(dim, (classes, 64), generator=self.g)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g)

    def of(self, labels: Tensor) -> Tensor:
        noise = self._normal(len(labels), self.centres.shape[1])
        if self.kind in ("centres", "common"):
            return self.centres[labels].add(noise, alpha=0.5).add(8 * (self.kind == "common")).relu()
        if self.kind == "directions":
            places = self.places[labels].add(self._normal(len(labels), DIRECTIONS), alpha=0.5)
            z: Tensor = places @ self.common
            return z.relu()
        moved = torch.bmm(self._normal(len(labels), 1, OWN), self.own[labels]).squeeze(1)
        return self.centres[labels].add(noise, alpha=0.3).scatter_add(1, self.where[labels], moved).relu()

    def batch(self, labels: Tensor | None = None) -> Batch:
        if labels is None:
            labels = torch.randint(self.classes, (BATCH,), generator=self.g)
        self.h -= 1e-3
        entropy = self.h + 1e-4 * torch.rand(len(labels), generator=self.g)
        return self.of(labels), torch.rand(len(labels), self.classes, generator=self.g), labels, entropy


def recall(bank: Bank, queries: Tensor) -> float:
    """Return the share of neighbours found; they are matched by similarity, which both searches compute exactly."""
    similarity, _ = bank.neighbors(queries, K)
    bank.sketch = False
    exact, _ = bank.neighbors(queries, K)
    bank.sketch = True
    return float((similarity >= exact[:, -1:] - 1e-6).float().mean())


def measure(kind: str, classes: int, dim: int, rounds: int) -> dict[str, Any]:
    features = Features(kind, classes, dim)
    banks = {sketch: Bank(classes, dim, M, torch.zeros(0), sketch=sketch) for sketch in (True, False)}
    for _ in range(M):
        batch = features.batch(torch.arange(classes))
        for bank in banks.values():
            bank.insert(*batch)
    by_sketch, exact = banks.values()

    def step(bank: Bank) -> Callable[[Batch], object]:
        def run(batch: Batch) -> None:
            bank.insert(*batch)
            bank.prototypes()
            bank.neighbors(batch[0], K)

        return run

    def bare(batch: Batch) -> None:
        (batch[0] @ exact.features[: exact.size].T).topk(K, dim=1)

    times = take_turns({"sketch": step(by_sketch), "exact": step(exact), "bare": bare}, rounds, features.batch)
    found = [recall(by_sketch, features.batch()[0]) for _ in range(4)]
    return {
        "features": kind,
        "classes": classes,
        "dim": dim,
        "entries": exact.size,
        "candidates": CANDIDATES,
        "rounds": rounds,
        "recall": round(sum(found) / len(found), 4),
        "sketch_ms": milliseconds(times["sketch"]),
        "exact_ms": milliseconds(times["exact"]),
        "bare_ms": milliseconds(times["bare"]),
        "sketch_over_bare": quartiles(times["sketch"], times["bare"]),
        "sketch_over_exact": quartiles(times["sketch"], times["exact"]),
    }


def main() -> None:
    rounds, keep = asked_rounds(ROUNDS)
    case = (250, 512, rounds) if "--quick" in sys.argv else (CLASSES, DIM, rounds)
    print(f"A step of the bank with sketches; {torch.get_num_threads()} threads, {rounds} rounds")
    rows = []
    for kind in KINDS:
        rows.append(row := measure(kind, *case))
        low, median, high = row["sketch_over_bare"]
        print(
            f"{kind:10} recall {row['recall']:.3f}; {row['sketch_ms']} ms over {row['bare_ms']} ms; "
            f"ratio {median:.3f} (quartiles {low:.3f}, {high:.3f})",
            flush=True,
        )
    if keep:
        write("sketch", rows)


if __name__ == "__main__":
    main()
