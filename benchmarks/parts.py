"""Savings of updating fewer parameters: TSD steps as ratios to the step that updates all.

ResNet-50 at 224 pixels, 1,000 classes, a full bank (M = 100). The variants take turns. A goal is the
target. A floor is the arithmetic limit: the multiplications of the network's forward and backward with these
parameters, counted, over those with all.

Run: python benchmarks/parts.py [--quick] [--rounds 3]
"""

import sys
from typing import Any

import torch
import torchvision
from measure import asked_rounds, milliseconds, quartiles, take_turns, write
from step import M, fill
from torch.utils.flop_counter import FlopCounterMode

import trueup
from trueup.model.params import select_parameters

BATCH, ROUNDS = 16, 11
GOALS = {"norm": 0.75, "layer[34]": 0.78, "layer4": 0.55}


def work(params: str) -> int:
    """Count the operations of a forward and backward that updates these parameters, by shapes."""
    with torch.device("meta"):
        model, x = torchvision.models.resnet50(weights=None).requires_grad_(False), torch.empty(2, 3, 224, 224)
    for p in select_parameters(model, params, "fc").values():
        p.requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return int(counter.get_total_flops())


def measure(batch: int, size: int, rounds: int, per_class: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, example = torchvision.models.resnet50(weights=None), torch.randn(2, 3, size, size)
    adapters = {}
    for params in ("all", *GOALS):
        adapters[params] = trueup.adapt(model, "tsd", params=params, per_class=per_class, example=example)
        fill(adapters[params].state, per_class)
    times = take_turns(dict(adapters), rounds, lambda: torch.randn(batch, 3, size, size))
    return [
        {
            "network": "resnet50",
            "params": params,
            "batch": batch,
            "pixels": size,
            "rounds": rounds,
            "ms": milliseconds(times[params]),
            "all_ms": milliseconds(times["all"]),
            "over_all": quartiles(times[params], times["all"]),
            "goal": goal,
            "floor": round(work(params) / work("all"), 3),
        }
        for params, goal in GOALS.items()
    ]


def main() -> None:
    rounds, keep = asked_rounds(ROUNDS)
    case = (4, 64, rounds, 5) if "--quick" in sys.argv else (BATCH, 224, rounds, M)
    print(f"TSD steps over the step that updates all; {torch.get_num_threads()} threads, {rounds} rounds")
    rows = measure(*case)
    for row in rows:
        low, median, high = row["over_all"]
        print(
            f"params={row['params']}: {row['ms']} ms over {row['all_ms']} ms; ratio {median:.3f} "
            f"(quartiles {low:.3f}, {high:.3f}); goal {row['goal']}, floor {row['floor']}"
        )
    if keep:
        write("parts", rows)


if __name__ == "__main__":
    main()
