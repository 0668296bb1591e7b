"""Cases with masks, volumes or photographs, cut into slices for networks; predictions are pasted back.

A network sees a square box of a slice. The box may extend beyond the image; the outside is zero. Predictions are pasted
back onto the image as it is on disk.
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
from trueup.data.pictures import Resize, resize_pixels

Mask = NDArray[np.uint8]
Box = tuple[int, int, int, int]
CACHE = 2**29  # bytes of volumes that a domain keeps in memory


@dataclass(frozen=True)
class Volume:
    """A case as stored on disk, slices first; a photograph has one slice."""

    image: NDArray[np.uint8]  # (Z, H, W, 1) grey or (Z, H, W, 3) colour; a scanner's grey values scaled to 0..255
    mask: Mask | None  # (Z, H, W): the class of each pixel, or None without a mask
    spacing: tuple[float, float, float]  # millimetres between slices, rows and columns; ones if unknown
    box: Box  # top, left, height and width of the part of a slice that networks see, in pixels

    @property
    def nbytes(self) -> int:
        """Return the size in memory."""
        return self.image.nbytes + (0 if self.mask is None else self.mask.nbytes)

    def network_view(self, z: int, size: int | None = None) -> Image:
        """Return the network's view of slice z, (size, size, 3); without a size, the box unscaled."""
        image = crop_padded(self.image[z], self.box)
        return np.repeat(resize_pixels(image, size), 4 - image.shape[2], axis=2)[:, :, :3]

    def network_target(self, z: int, size: int | None = None) -> Mask:
        """Return the true classes of slice z in the network's view, (size, size), resized without interpolation."""
        if self.mask is None:
            raise ValueError("this case has no mask")
        return resize_pixels(crop_padded(self.mask[z], self.box), size, smooth=False)

    def paste_back(self, scores: NDArray[np.float32], outside: NDArray[np.float32]) -> NDArray[np.float32]:
        """Paste scores (C, size, size) of the network's view onto a slice (C, H, W); `outside` (C,) beyond the box."""
        from PIL import Image as Pillow

        tall, wide = self.box[2:]
        inside, within = _overlap(self.image.shape[1:3], self.box)
        canvas = np.broadcast_to(outside[:, None, None], (len(outside), *self.image.shape[1:3])).astype(np.float32)
        for channel, values in zip(canvas, scores, strict=True):
            full = values
            if values.shape != (tall, wide):
                picture = Pillow.fromarray(np.ascontiguousarray(values, dtype=np.float32))
                full = np.asarray(picture.resize((wide, tall), Pillow.Resampling.BILINEAR))
            channel[inside] = full[within]
        return canvas


@dataclass(frozen=True)
class LabelledCase:
    """A case with a mask, read on demand."""

    name: str
    slices: int
    read: Callable[[], Volume]  # raises a BrokenImageError if it cannot be read
    patient: str = ""  # cases of one patient are never split between training and validation; empty: its own patient
    files: tuple[Path, ...] = ()  # the files it is read from, if any

    def load(self) -> Volume:
        """Read the case; raise a BrokenImageError if its header gave another number of slices."""
        volume = self.read()
        if len(volume.image) != self.slices:
            raise BrokenImageError(f"{self.name} has {len(volume.image)} slices; its header said {self.slices}")
        return volume


class SliceDomain:
    """A domain of slices, case after case."""

    def __init__(self, name: str, cases: Sequence[LabelledCase]) -> None:
        self.name, self.cases = name, list(cases)
        self.case = np.repeat(np.arange(len(self.cases)), [case.slices for case in self.cases])
        """The number of the case of each slice."""
        self.starts = np.cumsum([0, *(case.slices for case in self.cases)])
        patients = {name: i for i, name in enumerate(dict.fromkeys(c.patient or c.name for c in self.cases))}
        self.labels: Labels = np.array([patients[c.patient or c.name] for c in self.cases], dtype=np.int64)[self.case]
        """The number of the patient of each slice, for stream orders."""
        self._kept: OrderedDict[int, Volume] = OrderedDict()
        self._lock, self._reading = threading.Lock(), [threading.Lock() for _ in self.cases]

    def volume(self, number: int) -> Volume:
        """Return a case by its number, from the cache if possible."""
        with self._reading[number]:  # threads often ask for slices of one case: read it once
            with self._lock:
                if number in self._kept:
                    self._kept.move_to_end(number)
                    return self._kept[number]
            volume = self.cases[number].load()
            with self._lock:
                self._kept[number] = volume
                while sum(v.nbytes for v in self._kept.values()) > CACHE and len(self._kept) > 1:
                    self._kept.popitem(last=False)
            return volume

    def place(self, i: int) -> tuple[int, int]:
        """Return the number of the case of slice i, and the slice within it."""
        number = int(self.case[i])
        return number, int(i - self.starts[number])

    def image(self, i: int, size: int | None = None) -> Image:
        """Return the network's view of slice i."""
        number, z = self.place(i)
        return self.volume(number).network_view(z, size)

    def mask(self, i: int, size: int | None = None) -> Mask:
        """Return the true classes of slice i in the network's view."""
        number, z = self.place(i)
        return self.volume(number).network_target(z, size)

    def image_name(self, i: int) -> str:
        """Return the case's name, with the slice if there are several."""
        number, z = self.place(i)
        return self.cases[number].name + (f"[{z}]" if self.cases[number].slices > 1 else "")


def full_box(height: int, width: int) -> Box:
    """Return the box of a whole slice."""
    return 0, 0, height, width


def field_of_view_box(height: int, width: int, spacing: tuple[float, float, float], millimetres: float) -> Box:
    """Return the box of a square of this many millimetres in the middle of a slice."""
    tall, wide = round(millimetres / spacing[1]), round(millimetres / spacing[2])
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def network_box(height: int, width: int, spacing: tuple[float, float, float], resize: Resize | None) -> Box:
    """Return the box that a network sees of a slice: padded to a square if `resize` is None."""
    if resize == "squash":
        return full_box(height, width)
    side = (min if resize == "crop" else max)(height * spacing[1], width * spacing[2])
    return field_of_view_box(height, width, spacing, side)


def window_to_uint8(values: NDArray[Any], low: float = 1.0, high: float = 99.0) -> NDArray[np.uint8]:
    """Scale a scanner's grey values to 0..255: linear between two percentiles of the volume, clipped outside."""
    grey: NDArray[np.float32] = np.asarray(values, dtype=np.float32)
    bottom, top = (float(v) for v in np.percentile(grey, [low, high]))
    scaled = (grey - bottom) / max(top - bottom, 1e-12)
    return np.asarray(np.clip(255 * scaled + 0.5, 0, 255).astype(np.uint8))


def crop_padded(pixels: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
    """Crop (H, W) or (H, W, C) to a box; zero beyond the image."""
    inside, within = _overlap(pixels.shape, box)
    part = np.zeros((*box[2:], *pixels.shape[2:]), dtype=np.uint8)
    part[within] = pixels[inside]
    return part


def _overlap(shape: tuple[int, ...], box: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the rows and columns that a slice and a box share, counted in the slice and in the box."""
    inside, within = list[slice](), list[slice]()
    for start, length, size in zip(box[:2], box[2:], shape[:2], strict=True):
        first = max(0, start)
        last = max(first, min(start + length, size))
        inside.append(slice(first, last))
        within.append(slice(first - start, last - start))
    return tuple(inside), tuple(within)


def class_mask(volume: Volume, logits: Tensor) -> Mask:
    """Return the class of each pixel of a slice (H, W) from logits (C, size, size) of the network's view."""
    scores = F.softmax(logits.float(), dim=0).numpy()
    outside = np.eye(len(scores), dtype=np.float32)[0]  # background beyond the network's view
    return np.asarray(volume.paste_back(scores, outside).argmax(axis=0), dtype=np.uint8)


def label_masks(volume: Volume, logits: Tensor) -> NDArray[np.bool_]:
    """Return the mask of each label on a slice (L, H, W) from logits (L, size, size) with one sigmoid each."""
    scores = logits.float().sigmoid().numpy()
    return volume.paste_back(scores, np.zeros(len(scores), dtype=np.float32)) > 0.5
