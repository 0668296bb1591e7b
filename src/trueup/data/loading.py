"""From images on disk to batches of tensors: decoded by threads ahead of time, in an order that is given."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.data.channels import NORMALIZE as NORMALIZE  # where others look for it
from trueup.data.channels import Channels, make_channels
from trueup.data.domains import BrokenImageError, Domain, Image, Labels

log = logging.getLogger("trueup")
T = TypeVar("T")
U = TypeVar("U")
CHUNK = 16  # images that a thread reads in one go
CACHE = 2**30  # bytes of decoded images that may be kept for another pass


@dataclass(frozen=True)
class ConcatDomains:
    """Where the images of a stream come from: several domains, one after the other, numbered through."""

    domains: Sequence[Domain]
    starts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", np.cumsum([0, *(len(d.labels) for d in self.domains)]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def labels(self) -> Labels:
        """The class of each image."""
        return np.concatenate([d.labels for d in self.domains])

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The number of the domain of each image."""
        return np.repeat(np.arange(len(self.domains)), np.diff(self.starts))

    def find(self, i: int) -> tuple[Domain, int]:
        """The domain of image i, and its number there."""
        if not 0 <= i < len(self):
            raise IndexError(f"no image {i} among {len(self)}")
        d = int(np.searchsorted(self.starts, i, side="right")) - 1
        return self.domains[d], int(i - self.starts[d])


class Loader:
    """Batches (x, indices) of a stream, normalised float32. Images that cannot be read are left out and remembered."""

    def __init__(
        self, place: ConcatDomains, size: int, channels: Channels | str = "imagenet", *, threads: int = 2,
        keep: bool = False, device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        """channels: those that the network sees; a name of `NORMALIZE` for three.

        keep: hold what was decoded for another pass, if it fits into a gigabyte.

        device: where batches go; bytes travel there, a quarter of what floats would be, and are normalised there.
        """
        self.place, self.size, self.threads, self.device = place, size, threads, torch.device(device)
        self.cache: dict[int, Image] | None = {} if keep and 3 * size * size * len(place) <= CACHE else None
        self.channels = make_channels(channels) if isinstance(channels, str) else channels
        self.mean = torch.tensor(self.channels.mean).mul(255).view(1, -1, 1, 1).to(self.device)
        self.std = torch.tensor(self.channels.std).mul(255).view(1, -1, 1, 1).to(self.device)
        self.broken: dict[int, str] = {}

    def batches(self, orders: Sequence[NDArray[np.int64]]) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """One batch for each array of indices; a batch of broken files alone is left out."""
        with ThreadPoolExecutor(self.threads) as pool:
            # Four batches ahead at most: enough to hide decoding, and memory stays bounded.
            for order, waiting in ahead(orders, lambda o: self._submit(pool, o), 4):
                images = [image for part in waiting for image in part.result()]
                kept = np.array([image is not None for image in images])
                if kept.any():
                    yield self.tensor([image for image in images if image is not None]), order[kept]

    def _submit(self, pool: ThreadPoolExecutor, order: NDArray[np.int64]) -> list[Future[list[Image | None]]]:
        chunks = [order[i : i + CHUNK].tolist() for i in range(0, len(order), CHUNK)]
        return [pool.submit(lambda chunk: [self.read(i) for i in chunk], chunk) for chunk in chunks]

    def read(self, i: int) -> Image | None:
        """Image i at the loader's size, or None if it cannot be read."""
        if self.cache is not None and i in self.cache:
            return self.cache[i]
        domain, at = self.place.find(i)
        try:
            image = domain.image(at, self.size)
            if self.cache is not None:
                self.cache[i] = image
            return image
        except BrokenImageError as error:
            if i not in self.broken:
                self.broken[i] = domain.label_of(at)
                log.warning("left out, cannot be read: %s (%s)", domain.label_of(at), error)
            return None

    def tensor(self, images: Sequence[Image]) -> Tensor:
        """A normalised batch (N, channels, size, size), laid out with channels last, as images are."""
        x = torch.from_numpy(self.channels.take(np.stack(images)))
        if self.device.type == "cuda":
            x = x.pin_memory().to(self.device, non_blocking=True)
        x = x.to(self.device).permute(0, 3, 1, 2).to(torch.float32)
        return x.sub_(self.mean).div_(self.std)


def ahead(items: Sequence[T], start: Callable[[T], U], depth: int) -> Iterator[tuple[T, U]]:
    """Start the work for each item `depth` items before it is handed out."""
    queue: deque[tuple[T, U]] = deque()
    for item in items:
        queue.append((item, start(item)))
        if len(queue) > depth:
            yield queue.popleft()
    yield from queue
