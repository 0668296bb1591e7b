"""Toy trainings: networks that remember their images, and images whose pixels say which image they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trueup.core import files
from trueup.data.datasets import Dataset
from trueup.data.domains import ArrayDomain, Domain
from trueup.source.networks import build_network
from trueup.source.recipe import Recipe, Training

CLASSES, COUNT, SIZE = 3, 30, 8


DOMAINS = ("amber", "blue")


# Networks, found by their names as a user's own are


SEEN: list[tuple[bool, Tensor]] = []  # whether in training mode, and the images, of each batch that the spy was shown


class Spy(nn.Sequential):
    """Remembers what it is shown."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append((self.training, x.clone()))
        return super().forward(x)


def layers(classes: int, between: nn.Module) -> list[nn.Module]:
    first = [nn.Conv2d(3, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), between]
    return [*first, nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, classes)]


def net(classes: int) -> nn.Module:
    return nn.Sequential(*layers(classes, nn.Identity()))


def dropout(classes: int) -> nn.Module:
    return nn.Sequential(*layers(classes, nn.Dropout2d(0.5)))


def spy(classes: int) -> nn.Module:
    return Spy(*layers(classes, nn.Identity()))


# Images


def domain(name: str, count: int = COUNT) -> ArrayDomain:
    """Red is the number of the image, green its domain, blue its class."""
    labels = np.arange(count) % CLASSES
    rows = [(i, 100 * DOMAINS.index(name), 100 * label) for i, label in enumerate(labels)]
    images = np.tile(np.array(rows, np.uint8)[:, None, None], (1, SIZE, SIZE, 1))
    return ArrayDomain(name, images, labels.astype(np.int64))


def decode(x: Tensor) -> list[tuple[int, int, int]]:
    """Number, domain and class of each image of a batch, which was normalised to values from -1 to 1."""
    assert torch.equal(x, x[:, :, :1, :1].expand_as(x))
    values = (x[:, :, 0, 0] * 127.5 + 127.5).round().long()
    return [(i, d // 100, label // 100) for i, d, label in values.tolist()]


def steps_of(seen: list[tuple[bool, Tensor]]) -> list[list[tuple[int, int, int]]]:
    return [decode(x) for training_mode, x in seen if training_mode]


def dataset(open_: Callable[[str], Domain] = domain) -> Dataset:
    return Dataset("made-up", tuple("xyz"), DOMAINS, open_)


def recipe(network: str = "net", seed: int = 0, **changed: Any) -> Recipe:
    values = {
        "iterations": 8, "batch": 4, "lr": 1e-2, "augment": "none", "normalize": "half", "size": SIZE,
        "first": 2, "every": 2, "converge": 2, "tolerate": 2, "refresh": 3, **changed,
    }  # fmt: skip
    name = network if network == "digits-net" else f"{__name__}:{network}"
    return Recipe(
        dataset="made-up", sources=DOMAINS, classes=CLASSES, network=name, seed=seed, training=Training(**values)
    )


RECIPES = {
    "adam": recipe(augment="shift"),
    "weight decay": recipe(weight_decay=0.1),
    "sgd with decay": recipe(optimizer="sgd", lr=0.05, weight_decay=1e-3, decay_at=(0.3, 0.7)),
    "swad": recipe(algorithm="swad"),
    "swad, long segments": recipe(algorithm="swad", first=3, every=3, converge=1),
    "dropout": recipe("dropout"),
    "swad with dropout": recipe("dropout", algorithm="swad"),
    "digits-net": recipe("digits-net"),
}


STEPS = 8


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return files.read(path, "source")


def same(a: Path, b: Path) -> bool:
    """Weights to the bit, and the report."""
    (mine, header), (yours, other) = read(a), read(b)
    return header == other and mine.keys() == yours.keys() and all(torch.equal(t, yours[n]) for n, t in mine.items())


class Stop(BaseException):
    """Somebody pulls the plug."""


class Clock:
    """Stands still while work is done and ticks before every step: each step is saved, at no cost."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def progress(self, stop: int | None, end: Callable[[], object]) -> Callable[[int, int], None]:
        def tick(done: int, of: int) -> None:
            self.now += 1
            if done == stop:
                end()

        return tick


def stop() -> None:
    raise Stop


def start(chosen: Recipe) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(chosen.seed)
        return build_network(chosen.network, chosen.classes, size=SIZE)
