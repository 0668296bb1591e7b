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
from trueup.data.pictures import Resize

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
        return np.repeat(_resize(image, size, smooth=True), 4 - image.shape[2], axis=2)[:, :, :3]

    def network_target(self, z: int, size: int | None = None) -> Mask:
        """Return the true classes of slice z in the network's view, (size, size), resized without interpolation."""
        if self.mask is None:
            raise ValueError("this case has no mask")
        return _resize(crop_padded(self.mask[z][..., None], self.box), size, smooth=False)[..., 0]

    def paste_back(self, scores: NDArray[np.float32], outside: NDArray[np.float32]) -> NDArray[np.float32]:
        """Paste scores (C, size, size) of the network's view onto a slice (C, H, W); `outside` (C,) beyond the box."""
        return paste_scores(scores, self.image.shape[1:3], self.box, outside)


@dataclass(frozen=True)
class LabelledCase:
    """A case with a mask, read on demand."""

    name: str
    slices: int
    read: Callable[[], Volume]  # raises a BrokenImageError if it cannot be read
    patient: str = ""  # cases of one patient are never split between training and validation; empty: its own patient
    files: tuple[Path, ...] = ()  # the files it is read from, if any


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


def square_box(height: int, width: int, spacing: tuple[float, float, float]) -> Box:
    """Return the box of the smallest centred square that contains a slice."""
    return field_of_view_box(height, width, spacing, max(height * spacing[1], width * spacing[2]))


def network_box(height: int, width: int, spacing: tuple[float, float, float], resize: Resize | None) -> Box:
    """Return the box that a network sees of a slice: padded to a square if `resize` is None."""
    if resize == "squash":
        return full_box(height, width)
    if resize == "crop":
        return field_of_view_box(height, width, spacing, min(height * spacing[1], width * spacing[2]))
    return square_box(height, width, spacing)


def window_to_uint8(values: NDArray[Any], low: float = 1.0, high: float = 99.0) -> NDArray[np.uint8]:
    """Scale a scanner's grey values to 0..255: linear between two percentiles of the volume, clipped outside."""
    grey: NDArray[np.float32] = np.asarray(values, dtype=np.float32)
    bottom, top = (float(v) for v in np.percentile(grey, [low, high]))
    scaled = (grey - bottom) / max(top - bottom, 1e-12)
    return np.asarray(np.clip(255 * scaled + 0.5, 0, 255).astype(np.uint8))


def crop_padded(pixels: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
    """Crop (H, W, C) to a box; zero beyond the image."""
    top, left, tall, wide = box
    part = pixels[max(0, top) : max(0, top + tall), max(0, left) : max(0, left + wide)]
    above, before = min(tall, max(0, -top)), min(wide, max(0, -left))
    below, after = tall - above - part.shape[0], wide - before - part.shape[1]
    if not (above or below or before or after):
        return part
    return np.pad(part, ((above, below), (before, after), (0, 0)))


def paste_scores(
    scores: NDArray[np.float32], shape: tuple[int, int], box: Box, outside: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Undo crop and resize: paste (C, size, size) onto (C, H, W), with `outside` (C,) beyond the box."""
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


def class_mask(volume: Volume, logits: Tensor) -> Mask:
    """Return the class of each pixel of a slice (H, W) from logits (C, size, size) of the network's view."""
    scores = F.softmax(logits.float(), dim=0).numpy()
    outside = np.eye(len(scores), dtype=np.float32)[0]  # background beyond the network's view
    return np.asarray(volume.paste_back(scores, outside).argmax(axis=0), dtype=np.uint8)


def label_masks(volume: Volume, logits: Tensor) -> NDArray[np.bool_]:
    """Return the mask of each label on a slice (L, H, W) from logits (L, size, size) with one sigmoid each."""
    scores = logits.float().sigmoid().numpy()
    return volume.paste_back(scores, np.zeros(len(scores), dtype=np.float32)) > 0.5


def _resize(pixels: NDArray[np.uint8], size: int | None, *, smooth: bool) -> NDArray[np.uint8]:
    """Resize (H, W, 1 or 3) to (size, size, ...); class numbers are not interpolated."""
    if size is None or pixels.shape[:2] == (size, size):
        return pixels
    from PIL import Image as Pillow

    how = Pillow.Resampling.BILINEAR if smooth else Pillow.Resampling.NEAREST
    picture = Pillow.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    return np.asarray(picture.resize((size, size), how)).reshape(size, size, pixels.shape[2])
