"""Growth of a TSD step with the bank, the classes and the batch, without a network.

The model is a linear head on random features, so a step is only the head, the bank, the losses and Adam. The
bank is full, and newcomers are more certain than its entries. The ratio is to the similarity product and top-k alone,
which an exact search cannot avoid.

Run: python benchmarks/growth.py [--quick] [--rounds 3]
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bank import K
from measure import asked_rounds, milliseconds, quartiles, take_turns, write
from torch import Tensor, nn

import trueup
from trueup.memory.bank import Bank

DIM, ROUNDS = 512, 7
CLASSES, SIZES, BATCHES = (7, 65, 345, 1000), (20, 100, 500), (16, 64, 256)
SEARCHED = 100_000  # similarities; below this the ratio measures call overhead


def adapter(classes: int, per_class: int) -> trueup.Adapter:
    """Make an adapter with a full bank."""
    torch.manual_seed(0)
    made = trueup.adapt(nn.Sequential(nn.Linear(DIM, classes)), per_class=per_class, example=torch.randn(2, DIM))
    assert isinstance(made.state, Bank)
    labels, uncertain = torch.arange(classes), torch.full((classes,), 10.0)
    for _ in range(per_class):
        made.state.insert(torch.rand(classes, DIM), torch.full((classes, classes), 1 / classes), labels, uncertain)
    return made


def measure(classes: int, per_class: int, batches: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    step = adapter(classes, per_class)
    bank, rows = step.state, []
    assert isinstance(bank, Bank)

    def bare(z: Tensor) -> None:
        (z @ bank.features[: bank.size].T).topk(K, dim=1)

    for batch in batches:
        variants: dict[str, Callable[[Tensor], object]] = {"step": step, "bare": bare}
        times = take_turns(variants, rounds, partial(torch.randn, batch, DIM))
        ratio = quartiles(times["step"], times["bare"]) if batch * bank.size >= SEARCHED else None
        rows.append(
            {
                "classes": classes,
                "per_class": per_class,
                "entries": bank.size,
                "dim": DIM,
                "batch": batch,
                "rounds": rounds,
                "step_ms": milliseconds(times["step"]),
                "bare_ms": milliseconds(times["bare"]),
                "step_over_bare": ratio,
            }
        )
    return rows


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, keep = asked_rounds(ROUNDS)
    cases = [(c, m) for c in CLASSES for m in SIZES]
    rows = []
    print(f"TSD step over {DIM} features, full bank, K = {K}, {torch.get_num_threads()} threads; {rounds} rounds")
    print(f"{'C':>5} {'M':>4} {'entries':>8} {'batch':>6} | {'step':>10} {'bare':>10} {'ratio':>6}")
    for classes, per_class in cases[:4] if quick else cases:
        for row in measure(classes, per_class, BATCHES[:2] if quick else BATCHES, rounds):
            rows.append(row)
            ratio = f"{row['step_over_bare'][1]:6.2f}" if row["step_over_bare"] else f"{'–':>6}"
            print(
                f"{classes:5} {per_class:4} {row['entries']:8} {row['batch']:6} |"
                f" {row['step_ms']:7} ms {row['bare_ms']:7} ms {ratio}",
                flush=True,
            )
    if keep:
        write("growth", rows)


if __name__ == "__main__":
    main()
