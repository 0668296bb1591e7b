"""Streams of made-up images, and what a plain loop over them gives."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.bench.stream_runner import Indices, StreamRunner, make_stream
from trueup.data.domains import ArrayDomain, BrokenImageError, Image
from trueup.data.loading import ConcatDomains, Loader
from trueup.testing import convnet, images

FROZEN = [(name, norm) for name in ("source", "bn", "t3a", "lame") for norm in ("source", "batch")]


Seen = list[tuple[Any, Any]]


class BrokenDomain(ArrayDomain):
    """Some of its images cannot be read."""

    def __init__(self, name: str, array: Image, labels: Any, broken: Sequence[int]) -> None:
        super().__init__(name, array, labels)
        self.broken = set(broken)

    def image(self, i: int, size: int | None = None) -> Image:
        if i in self.broken:
            raise BrokenImageError("cut short")
        return super().image(i, size)


def domain(n: int, *, seed: int, shift: float = 0.5, broken: Sequence[int] = ()) -> ArrayDomain:
    x, y = images(n, seed=seed, shift=shift)
    array = (40 * x + 127.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return BrokenDomain(f"d{seed}", array, y.numpy(), broken)


def net() -> nn.Sequential:
    """Trained on images whose values are 127.5 / 40 times as large as the loader's."""
    model = convnet()
    first = model.get_submodule("conv0")
    assert isinstance(first, nn.Conv2d)
    first.weight.data *= 127.5 / 40
    return model


def toy_runner(
    *domains: ArrayDomain, model: nn.Module | None = None, batch: int = 16, seed: int = 0, **more: Any
) -> StreamRunner:
    place = ConcatDomains(domains)
    name = "iid" if len(domains) == 1 else "continual"
    stream = make_stream(place, name, {}, seed=seed, batch=batch, limit=None, reset=more.get("reset", False))
    return StreamRunner(model or net(), Loader(place, 16, "half", keep=True), stream, seed, **more)


def tensor(place: ConcatDomains, indices: Indices) -> Tensor:
    """What the loader makes of images, written out."""
    array = np.concatenate([d.images for d in place.domains if isinstance(d, ArrayDomain)])[indices]
    return torch.from_numpy(array).permute(0, 3, 1, 2).float().sub(127.5).div(127.5)


def by_hand(adapter: Callable[[Tensor], Tensor], place: ConcatDomains, stream: Sequence[Indices]) -> tuple[Any, Any]:
    """Probabilities and labels of a plain loop."""
    probs = [F.softmax(adapter(tensor(place, b)).double(), dim=1).numpy() for b in stream]
    return np.concatenate(probs), np.concatenate([place.labels[b] for b in stream])


def same(first: tuple[Any, Any], second: tuple[Any, Any]) -> bool:
    return np.array_equal(first[0], second[0]) and np.array_equal(first[1], second[1])
