"""Delay and cost of the drift alarm: a source model of the digits, on clean and then corrupted images.

Run: python benchmarks/alarm.py [--quick] [--checkpoints FOLDER]
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import write
from torch import Tensor, nn

import trueup
from trueup.bench.settings import make_sweep
from trueup.bench.stream_runner import make_stream
from trueup.data.loading import ConcatDomains, Loader
from trueup.source.checkpoints import Store
from trueup.source.train import train

DATASET = "digits-c"


def batches(dataset: Any, domain: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a domain in batches of 64."""
    place = ConcatDomains([dataset.domain(domain)])
    stream = make_stream(place, "iid", {}, seed=0, batch=64, limit=None, reset=False, repeat=1)
    for x, at in Loader(place, 32, "half", keep=True).batches(stream):
        yield x, torch.as_tensor(place.labels[at])


def watch(model: nn.Module, dataset: Any, domain: str) -> dict[str, Any]:
    """Show a drift alarm the clean digits, then a domain."""
    adapter = trueup.adapt(model, "source", guard=True)
    for x, _ in batches(dataset, "clean"):
        adapter(x)
    start, before = adapter.health.images, adapter.health.events["drift"]
    right = images = 0
    after = None
    for x, y in batches(dataset, domain):
        right += int((adapter(x).argmax(dim=1) == y).sum())
        images += len(y)
        if after is None and adapter.health.events["drift"] > before:
            after = adapter.health.images - start
    numbers = {name: round(value, 3) for name, value in adapter.health.numbers.items()}
    return {"domain": domain, "accuracy": 100 * right / images, "false": before, "alarm": after, **numbers}


def cost(rounds: int = 15) -> dict[str, float]:
    """Return the ratio of a ResNet-18 forward with and without the alarm: 64 images of 64 pixels, in turns."""
    import torchvision

    model, x = torchvision.models.resnet18(num_classes=7).eval(), torch.randn(64, 3, 64, 64)
    plain, alarm = (trueup.adapt(model, "source", guard=guard) for guard in (False, True))
    ratios = []
    for i in range(rounds + 8):
        seconds = []
        for adapter in (plain, alarm):
            begin = time.perf_counter()
            for _ in range(8):  # one of them is measured
                adapter(x)
            seconds.append(time.perf_counter() - begin)
        if i >= 8:  # the first window is measured as a whole
            ratios.append(seconds[1] / seconds[0])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": middle, "lower": low, "upper": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--quick", action="store_true", help="train less, two domains, and keep nothing")
    asked = parser.parse_args()
    folder = asked.checkpoints or Path(tempfile.mkdtemp())
    logging.getLogger("trueup").setLevel(logging.ERROR)
    training = {"iterations": 10} if asked.quick else {}
    sweep = make_sweep({"dataset": DATASET, "method": "source", "seed": [0], "training": training})
    dataset, store = sweep.open(DATASET), Store(folder)
    runs = list(sweep.runs())[: 2 if asked.quick else None]
    recipe = runs[0].recipe(dataset)
    assert recipe is not None
    train(recipe, dataset, store)
    model = store.load(recipe)[0]
    rows = [watch(model, dataset, domain) for domain in ("clean", *(run.target for run in runs))]
    for row in sorted(rows, key=lambda row: -row["accuracy"]):
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if asked.quick:
        return
    spent = cost()
    print(f"cost: {spent['ratio']:.3f} times a plain forward ({spent['lower']:.3f}, {spent['upper']:.3f})")
    write("alarm", [*rows, {"cost": spent}])


if __name__ == "__main__":
    main()
