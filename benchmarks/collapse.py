"""Detection of collapse by the guard: delay, recovery and false alarms, on the embedded digits.

A collapse is injected after 768 images: the learning rate times 1,000, or a head that always predicts one class. On
benign streams the guarded method is better than the frozen source: shuffled, in bursts of a class, sorted by class,
and ten times the same images.

Run: python benchmarks/collapse.py [--quick] [--checkpoints FOLDER]
"""

import argparse
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import write
from torch import Tensor, nn

import trueup
from trueup.bench.settings import make_sweep
from trueup.bench.stream_runner import make_stream
from trueup.data.loading import ConcatDomains, Loader
from trueup.source.checkpoints import Store
from trueup.source.train import train

START = 768
ALARMS = ("suspect", "rollback", "fallback")
Batch = tuple[Tensor, np.ndarray[Any, Any]]


class Digits:
    """Source models and streams of the embedded digits."""

    def __init__(self, folder: Path, quick: bool) -> None:
        training = {"iterations": 10} if quick else {}
        self.limit = START + 512 if quick else None
        self.sweep = make_sweep({"dataset": "digits", "method": "source", "seed": [0, 1, 2], "training": training})
        self.dataset, self.store = self.sweep.open("digits"), Store(folder)
        self.recipes = {(run.target, run.seed): run.recipe(self.dataset) for run in self.sweep.runs()}

    def model(self, target: str, seed: int) -> nn.Module:
        recipe = self.recipes[target, seed]
        assert recipe is not None
        train(recipe, self.dataset, self.store)
        return self.store.load(recipe)[0]

    def stream(self, target: str, seed: int, name: str, batch: int, repeat: int = 1) -> Iterator[Batch]:
        place = ConcatDomains([self.dataset.domain(target)])
        stream = make_stream(
            place, name, {}, seed=seed, batch=batch, limit=self.limit, reset=False, repeat=repeat
        )  # fmt: skip
        loader = Loader(place, 32, "half", keep=True)
        for x, at in loader.batches(stream):
            yield x, place.labels[at]


def alarms(adapter: trueup.Adapter) -> int:
    return sum(adapter.health.events[name] for name in ALARMS)


def inject(adapter: trueup.Adapter, how: str) -> None:
    if how == "learning rate":
        assert adapter.optimizer is not None
        for group in adapter.optimizer.param_groups:
            group["lr"] *= 1000
    else:
        with torch.no_grad():
            adapter.net.layer.get_parameter("bias")[3] += 50.0


def collapse(digits: Digits, target: str, seed: int, method: str, norm: str, how: str, batch: int) -> dict[str, Any]:
    """Return images from the injection to the first alarm, and accuracy before and after, with and without a guard."""
    accuracy, delay = {}, None
    for guard in (False, True):
        adapter = trueup.adapt(digits.model(target, seed), method, norm=norm, guard=guard)
        right: list[float] = []
        seen, first, before = 0, None, 0
        for x, y in digits.stream(target, seed, "iid", batch):
            if seen >= START > seen - len(x):
                inject(adapter, how)
                before = alarms(adapter) if guard else 0
            right += (adapter(x).argmax(dim=1).numpy() == y).tolist()
            seen += len(x)
            if guard and first is None and seen > START and alarms(adapter) > before:
                first = seen
        if guard:
            delay = None if first is None else first - START
        accuracy["guarded" if guard else "alone"] = round(100 * float(np.mean(right[START + 256 :])), 1)
        accuracy["before"] = round(100 * float(np.mean(right[256:START])), 1)
    return {
        "collapse": how, "target": target, "seed": seed, "method": method, "norm": norm, "batch": batch,
        "delay": delay, **accuracy,
    }  # fmt: skip


def benign(
    digits: Digits, target: str, seed: int, method: str, stream: str, repeat: int = 1, preset: str | None = "safe"
) -> dict[str, Any]:
    """Return the alarms on a benign stream."""
    adapter = trueup.adapt(digits.model(target, seed), method, preset=preset, guard=True)
    right: list[bool] = []
    for x, y in digits.stream(target, seed, stream, 64, repeat):
        right += (adapter(x).argmax(dim=1).numpy() == y).tolist()
    return {
        "stream": stream if repeat == 1 else f"{repeat} times", "target": target, "seed": seed, "method": method,
        "preset": preset or "", "images": len(right), "alarms": alarms(adapter),
        "accuracy": round(100 * float(np.mean(right)), 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--checkpoints", default="")
    options = parser.parse_args()
    quick = options.quick
    logging.getLogger("trueup").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    targets = ["poster"] if quick else ["hand", "type", "poster", "neon"]
    seeds = [0] if quick else [0, 1, 2]
    with tempfile.TemporaryDirectory() as temporary:
        digits = Digits(Path(options.checkpoints or temporary), quick)
        cases = [
            collapse(digits, target, seed, method, norm, how, batch)
            for target in targets
            for seed in seeds[:1]
            for method, norm, how in (
                ("tent", "ema", "learning rate"),
                ("tsd", "ema", "learning rate"),
                ("pl", "batch", "one class"),
                ("tsd", "robust", "one class"),
            )
            for batch in ((64,) if quick else (64, 16))
        ]
        for row in cases:
            print({key: value for key, value in row.items() if key != "seed"})
        methods = {"tsd": seeds[:2], "tent": seeds[:1], "shot-im": seeds[:1]}
        calm = [
            benign(digits, target, seed, method, stream)
            for target in targets
            for method in (["tsd"] if quick else methods)
            for seed in methods[method]
            for stream in ("iid", "dirichlet", "class-sorted")
        ]
        calm += [benign(digits, target, 0, "tsd", "iid", 2 if quick else 10) for target in targets[:2]]
        calm += [benign(digits, target, 0, method, "iid", preset=None) for target in targets for method in methods]
    images, cries = sum(row["images"] for row in calm), sum(row["alarms"] for row in calm)
    delays = [row["delay"] for row in cases]
    longest = "never seen" if None in delays else f"{max(delays)} images at most"
    print(f"collapse: {len(cases)} injected, delay {longest}")
    print(f"benign: {cries} alarms in {images:,} images, {10_000 * cries / images:.2f} in 10,000")
    if not quick:
        write("collapse", [*cases, *calm])


if __name__ == "__main__":
    main()
