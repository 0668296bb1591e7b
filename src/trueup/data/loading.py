"""Batches of tensors from images on disk, in a given order, decoded ahead of time by threads."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.data.channels import NORMALIZE as NORMALIZE  # re-exported
from trueup.data.channels import Channels, make_channels
from trueup.data.domains import BrokenImageError, Domain, Image, Labels

log = logging.getLogger("trueup")
T = TypeVar("T")
U = TypeVar("U")
CHUNK = 16  # images per thread task
CACHE = 2**30  # bytes of decoded images kept for another pass


@dataclass(frozen=True)
class ConcatDomains:
    """Several domains concatenated, with consecutive indices."""

    domains: Sequence[Domain]
    starts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", np.cumsum([0, *(len(d.labels) for d in self.domains)]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def labels(self) -> Labels:
        """Return the class of each image."""
        return np.concatenate([d.labels for d in self.domains])

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Return the number of the domain of each image."""
        return np.repeat(np.arange(len(self.domains)), np.diff(self.starts))

    def find(self, i: int) -> tuple[Domain, int]:
        """Return the domain of image i, and its index there."""
        if not 0 <= i < len(self):
            raise IndexError(f"no image {i} among {len(self)}")
        d = int(np.searchsorted(self.starts, i, side="right")) - 1
        return self.domains[d], int(i - self.starts[d])


class Loader:
    """Normalised float32 batches (x, indices) of a stream. Images that cannot be read are skipped and recorded."""

    def __init__(
        self, place: ConcatDomains, size: int, channels: Channels | str = "imagenet", *, threads: int = 2,
        keep: bool = False, device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        """channels: the network's input channels, or a name of `NORMALIZE`.

        keep: cache decoded images for another pass, if they fit into a gigabyte.
        device: target of the batches; uint8 is copied there and normalised there, a quarter of the traffic.
        """
        self.place, self.size, self.threads, self.device = place, size, threads, torch.device(device)
        self.cache: dict[int, Image] | None = {} if keep and 3 * size * size * len(place) <= CACHE else None
        self.channels = make_channels(channels) if isinstance(channels, str) else channels
        self.broken: dict[int, str] = {}

    def batches(self, orders: Sequence[NDArray[np.int64]]) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """Yield one batch per array of indices; a batch of broken files only is skipped."""
        with ThreadPoolExecutor(self.threads) as pool:
            # At most four batches ahead: hides decoding and bounds memory.
            for order, waiting in prefetch(orders, lambda o: self._submit(pool, o), 4):
                images = [image for part in waiting for image in part.result()]
                kept = np.array([image is not None for image in images])
                if kept.any():
                    yield self.tensor([image for image in images if image is not None]), order[kept]

    def _submit(self, pool: ThreadPoolExecutor, order: NDArray[np.int64]) -> list[Future[list[Image | None]]]:
        chunks = [order[i : i + CHUNK].tolist() for i in range(0, len(order), CHUNK)]
        return [pool.submit(lambda chunk: [self.read(i) for i in chunk], chunk) for chunk in chunks]

    def read(self, i: int) -> Image | None:
        """Return image i at the loader's size, or None if it cannot be read."""
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
                self.broken[i] = domain.image_name(at)
                log.warning("left out, cannot be read: %s (%s)", domain.image_name(at), error)
            return None

    def tensor(self, images: Sequence[Image]) -> Tensor:
        """Return a normalised batch on the loader's device."""
        return normalize_images(images, self.channels, self.device)


def normalize_images(images: Sequence[Image], channels: Channels, device: torch.device | None = None) -> Tensor:
    """Return a normalised batch (N, channels, H, W) in channels-last layout."""
    device = device or torch.device("cpu")
    x = torch.from_numpy(channels.take(np.stack(images)))
    if device.type == "cuda":
        x = x.pin_memory().to(device, non_blocking=True)
    x = x.to(device).permute(0, 3, 1, 2).to(torch.float32)
    mean, std = (torch.tensor(v).mul(255).view(1, -1, 1, 1).to(device) for v in (channels.mean, channels.std))
    return x.sub_(mean).div_(std)


def prefetch(items: Iterable[T], start: Callable[[T], U], depth: int) -> Iterator[tuple[T, U]]:
    """Start the work for each item `depth` items before it is yielded."""
    queue: deque[tuple[T, U]] = deque()
    for item in items:
        queue.append((item, start(item)))
        if len(queue) > depth:
            yield queue.popleft()
    yield from queue
