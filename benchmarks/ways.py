"""Optimisers, precisions and memory layouts, as ratios to the default; they take turns.

The optimisers' steps are of a ResNet-50's parameters, all and those of normalisation layers, each of a network of
its own. The others are whole TSD steps on ResNet-50 at 224 pixels, batch 8; one is what "auto" chooses.

Run: python benchmarks/ways.py [--quick] [--rounds 3]
"""

import logging
import sys
from functools import partial
from typing import Any

import torch
import torchvision
from measure import asked_rounds, milliseconds, quartiles, take_turns, write

import trueup
from trueup.model.params import select_parameters

ROUNDS = 9
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, channels last": {"channels_last": True},
    "bf16": {"precision": "bf16"},
    "bf16, channels last": {"precision": "bf16", "channels_last": True},
    "low memory": {"memory": "low"},
    "auto": {"precision": "auto", "channels_last": "auto"},
}


def optimizers(params: str, rounds: int) -> list[dict[str, Any]]:
    """Time Adam's steps alone."""
    steps: dict[str, Any] = {}
    for name in ("fused", "foreach"):
        with torch.random.fork_rng():
            chosen = list(select_parameters(torchvision.models.resnet50(weights=None), params, "fc").values())
        for p in chosen:
            p.grad = torch.randn_like(p)
        optimizer = torch.optim.Adam(chosen, lr=1e-4, fused=name == "fused", foreach=name == "foreach")
        steps[name] = partial(_step, optimizer)
    return _rows(f"Adam of {params}", steps, "fused", rounds, lambda: None)


def _step(optimizer: torch.optim.Optimizer, _: None) -> None:
    optimizer.step()


def engines(batch: int, size: int, rounds: int) -> list[dict[str, Any]]:
    """Time whole steps, and name what "auto" chose."""
    torch.manual_seed(0)
    model, example = torchvision.models.resnet50(weights=None), torch.randn(batch, 3, size, size)
    adapters = {name: trueup.adapt(model, "tsd", per_class=5, example=example, **way) for name, way in ENGINES.items()}
    rows = _rows("TSD step", dict(adapters), "float32", rounds, lambda: torch.randn(batch, 3, size, size))
    engine = adapters["auto"].net.engine
    rows[-1]["chosen"] = f"{engine.precision}{', channels last' if engine.channels_last else ''}"
    return rows


def _rows(what: str, steps: dict[str, Any], usual: str, rounds: int, fresh: Any) -> list[dict[str, Any]]:
    times = take_turns(steps, rounds, fresh, warm=1)
    return [
        {"what": what, "way": n, "rounds": rounds, "ms": milliseconds(t), "over_usual": quartiles(t, times[usual])}
        for n, t in times.items()
    ]


def main() -> None:
    quick = "--quick" in sys.argv
    logging.getLogger("trueup").setLevel(logging.ERROR)
    rounds, keep = asked_rounds(ROUNDS)
    rows = [row for params in ("all", "norm") for row in optimizers(params, rounds)]
    rows += engines(*((2, 32) if quick else (8, 224)), rounds)
    for row in rows:
        low, median, high = row["over_usual"]
        print(
            f"{row['what']}, {row['way']}: {row['ms']} ms; ratio {median:.2f} (quartiles {low:.2f}, {high:.2f})",
            f"chosen: {row['chosen']}" if "chosen" in row else "",
        )
    if keep:
        write("ways", rows)


if __name__ == "__main__":
    main()
