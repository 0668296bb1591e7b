"""Images with masks: cases, which are volumes or photographs, cut into slices that networks see, and put back again.

A network sees a square of pixels. Which part of a slice that is, a box says; it may reach beyond the image, where there
is nothing. Predictions go back the same way, so that they lie on the image as it is on disk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trueup.data.domains import BrokenImageError, Image, Labels
from trueup.data.pictures import Resize

Mask = NDArray[np.uint8]
Box = tuple[int, int, int, int]
CACHE = 2**29  # bytes of volumes that a domain keeps


@dataclass(frozen=True)
class Volume:
    """A case as it lies on disk, slices first; a photograph has one slice."""

    image: NDArray[np.uint8]
    """(Z, H, W, 1) grey or (Z, H, W, 3) colour; grey values of a scanner are brought to 0..255 by the reader."""
    mask: Mask | None
    """(Z, H, W): the class of each pixel, or None where nobody has drawn one."""
    spacing: tuple[float, float, float]
    """Millimetres between slices, rows and columns; ones where that is unknown."""
    box: Box
    """Top, left, height and width of what networks see of a slice, in pixels."""

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return self.image.nbytes + (0 if self.mask is None else self.mask.nbytes)

    def show(self, z: int, size: int | None = None) -> Image:
        """What a network sees of slice z: (size, size, 3), or the box as it is."""
        image = cut(self.image[z], self.box)
        return np.repeat(_resize(image, size, smooth=True), 4 - image.shape[2], axis=2)[:, :, :3]

    def answer(self, z: int, size: int | None = None) -> Mask:
        """What a network should say to slice z: (size, size) class numbers, never in between two."""
        if self.mask is None:
            raise ValueError("this case has no mask")
        return _resize(cut(self.mask[z][..., None], self.box), size, smooth=False)[..., 0]

    def put_back(self, scores: NDArray[np.float32], outside: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores (C, size, size) of what a network saw, on the whole slice (C, H, W); `outside` (C,) beyond the box."""
        return paste(scores, self.image.shape[1:3], self.box, outside)


@dataclass(frozen=True)
class Case:
    """A case that is read when it is needed."""

    name: str
    slices: int
    read: Callable[[], Volume]
    """A BrokenImageError if it cannot be read."""
    patient: str = ""
    """Cases of one patient are never divided between training and validation; empty: a patient of its own."""
    files: tuple[Path, ...] = ()
    """What it is read from, if it is read from files."""


class SliceDomain:
    """A domain whose images are the slices of cases, in the order of the cases."""

    def __init__(self, name: str, cases: Sequence[Case]) -> None:
        self.name, self.cases = name, list(cases)
        self.case = np.repeat(np.arange(len(self.cases)), [case.slices for case in self.cases])
        """The number of the case of each slice."""
        self.starts = np.cumsum([0, *(case.slices for case in self.cases)])
        patients = {name: i for i, name in enumerate(dict.fromkeys(c.patient or c.name for c in self.cases))}
        self.labels: Labels = np.array([patients[c.patient or c.name] for c in self.cases], dtype=np.int64)[self.case]
        """The number of the patient of each slice: what an order of the stream may go by."""
        self._kept: OrderedDict[int, Volume] = OrderedDict()
        self._lock, self._reading = threading.Lock(), [threading.Lock() for _ in self.cases]

    def volume(self, number: int) -> Volume:
        """A case by its number, read now or kept from before."""
        with self._reading[number]:  # slices that are asked for at once are often of one case: it is read once
            return self._volume(number)

    def _volume(self, number: int) -> Volume:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        case = self.cases[number]
        volume = case.read()
        if len(volume.image) != case.slices:
            raise BrokenImageError(f"{case.name} has {len(volume.image)} slices; its header said {case.slices}")
        with self._lock:
            self._kept[number] = volume
            while sum(v.nbytes for v in self._kept.values()) > CACHE and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return volume

    def place(self, i: int) -> tuple[int, int]:
        """The case of slice i, and which of its slices it is."""
        number = int(self.case[i])
        return number, int(i - self.starts[number])

    def image(self, i: int, size: int | None = None) -> Image:
        """What a network sees of slice i."""
        number, z = self.place(i)
        return self.volume(number).show(z, size)

    def mask(self, i: int, size: int | None = None) -> Mask:
        """What a network should say to slice i."""
        number, z = self.place(i)
        return self.volume(number).answer(z, size)

    def label_of(self, i: int) -> str:
        """The case, and the slice if there are several."""
        number, z = self.place(i)
        case = self.cases[number]
        return case.name if case.slices == 1 else f"{case.name}[{z}]"


def whole(height: int, width: int) -> Box:
    """The box that is all of a slice."""
    return 0, 0, height, width


def field_of_view(height: int, width: int, spacing: tuple[float, float, float], millimetres: float) -> Box:
    """A square of so many millimetres in the middle of a slice."""
    tall, wide = round(millimetres / spacing[1]), round(millimetres / spacing[2])
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def square(height: int, width: int, spacing: tuple[float, float, float]) -> Box:
    """The square in the middle that holds all of a slice."""
    return field_of_view(height, width, spacing, max(height * spacing[1], width * spacing[2]))


def seen_box(height: int, width: int, spacing: tuple[float, float, float], resize: Resize | None) -> Box:
    """The box that a network sees of a slice: padded to a square if `resize` is None."""
    if resize == "squash":
        return whole(height, width)
    if resize == "crop":
        return field_of_view(height, width, spacing, min(height * spacing[1], width * spacing[2]))
    return square(height, width, spacing)


def window(values: NDArray[Any], low: float = 1.0, high: float = 99.0) -> NDArray[np.uint8]:
    """Grey values of a scanner as 0..255: clipped at two percentiles of the volume, linear in between."""
    grey: NDArray[np.float32] = np.asarray(values, dtype=np.float32)
    bottom, top = (float(v) for v in np.percentile(grey, [low, high]))
    scaled = (grey - bottom) / max(top - bottom, 1e-12)
    return np.asarray(np.clip(255 * scaled + 0.5, 0, 255).astype(np.uint8))


def cut(pixels: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
    """The part of (H, W, C) in a box; zero where the box reaches beyond the image."""
    top, left, tall, wide = box
    part = pixels[max(0, top) : max(0, top + tall), max(0, left) : max(0, left + wide)]
    above, before = min(tall, max(0, -top)), min(wide, max(0, -left))
    below, after = tall - above - part.shape[0], wide - before - part.shape[1]
    if not (above or below or before or after):
        return part
    return np.pad(part, ((above, below), (before, after), (0, 0)))


def paste(
    scores: NDArray[np.float32], shape: tuple[int, int], box: Box, outside: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The reverse of cutting and resizing: (C, size, size) on (C, H, W), `outside` (C,) beyond the box."""
    from PIL import Image as Pillow

    top, left, tall, wide = box
    canvas = np.repeat(np.repeat(outside[:, None, None], shape[0], axis=1), shape[1], axis=2).astype(np.float32)
    rows, columns = slice(max(0, top), max(0, top + tall)), slice(max(0, left), max(0, left + wide))
    target = canvas[:, rows, columns]
    up, across = max(0, -top), max(0, -left)
    for channel, values in zip(target, scores, strict=True):
        full = values
        if values.shape != (tall, wide):
            picture = Pillow.fromarray(np.ascontiguousarray(values, dtype=np.float32))
            full = np.asarray(picture.resize((wide, tall), Pillow.Resampling.BILINEAR))
        channel[:] = full[up : up + channel.shape[0], across : across + channel.shape[1]]
    return canvas


def classes_on(volume: Volume, logits: Tensor) -> Mask:
    """The class of each pixel of a slice (H, W), by a network's answer (C, size, size) to what it saw of it."""
    scores = F.softmax(logits.float(), dim=0).numpy()
    outside = np.eye(len(scores), dtype=np.float32)[0]  # beyond what the network saw there is nothing
    return np.asarray(volume.put_back(scores, outside).argmax(axis=0), dtype=np.uint8)


def labels_on(volume: Volume, logits: Tensor) -> NDArray[np.bool_]:
    """Where on a slice each label is (L, H, W), by the answer (L, size, size) of a network with one sigmoid each."""
    scores = logits.float().sigmoid().numpy()
    return volume.put_back(scores, np.zeros(len(scores), dtype=np.float32)) > 0.5


def _resize(pixels: NDArray[np.uint8], size: int | None, *, smooth: bool) -> NDArray[np.uint8]:
    """(H, W, 1 or 3) as (size, size, ...); class numbers are taken, not mixed."""
    if size is None or pixels.shape[:2] == (size, size):
        return pixels
    from PIL import Image as Pillow

    how = Pillow.Resampling.BILINEAR if smooth else Pillow.Resampling.NEAREST
    picture = Pillow.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    return np.asarray(picture.resize((size, size), how)).reshape(size, size, pixels.shape[2])
