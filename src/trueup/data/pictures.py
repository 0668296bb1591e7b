"""The decoder of picture files: whatever depth they have on disk, networks see 8 bits per channel.

Files of 8 bits or fewer are taken as Pillow reads them. Deeper ones are scaled from the range of values that is black
and white. That range is, in this order: the one that is asked for; the one that the file declares (the maximum of a
PGM, BitsPerSample and the sample limits of a TIFF, sBIT of a PNG); 0 to 1 for floats that lie there; 0 to 65535 for 16
bits that are used beyond the lower 14. Anything else is refused: cameras store 10, 12 and 14 bits in files of 16.
"""

from __future__ import annotations

import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
Range = tuple[float, float]
Resize = Literal["squash", "crop", "pad"]
RESIZES: tuple[Resize, ...] = get_args(Resize)
UNCLEAR = 2**14 - 1  # 16 bits whose largest value is no higher may be 10, 12 or 14 bits
FULL = 2**16 - 1
ALPHA = {"LA": 1, "La": 1, "PA": 1, "RGBA": 3, "RGBa": 3}
"""The channel that is no colour, by mode."""


class BrokenImageError(ValueError):
    """A file that should be an image and cannot be read as one."""


class UnknownRangeError(ValueError):
    """A picture of more than 8 bits that does not say which of its values are black and white."""

    def __init__(self, name: str, reason: str, way_out: str) -> None:
        super().__init__(f"{name}: {reason}; {way_out}")
        self.name, self.reason, self.way_out = name, reason, way_out

    def called(self, name: str) -> UnknownRangeError:
        """Return the same of a picture by another name, such as its path within a dataset."""
        return UnknownRangeError(name, self.reason, self.way_out)


@dataclass(frozen=True)
class Reading:
    """How picture files become images for a network; the default is how they were always read."""

    range: Range | None = None
    """The values that are black and white in files of more than 8 bits; those beyond are clipped. None: as they say."""
    resize: Resize | None = None
    """How a picture becomes square: "squash" it, "crop" its middle, "pad" it with black. None: as its dataset does."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.resize is not None and self.resize not in RESIZES:
            raise ValueError(f"resize={self.resize!r} is not known: it must be {', '.join(RESIZES)}")
        if self.range is not None:
            check_range(self.range)


AS_STORED = Reading()


def usual_resize(dataset: str) -> Resize:
    """Return how the pictures of a dataset become square if nothing is said."""
    return "pad" if dataset == "masks" else "squash"


@dataclass(frozen=True)
class Picture:
    """A picture as it is stored."""

    name: str
    mode: str
    """Pillow's name for its kind: L, P, RGB, I;16 ..."""
    values: NDArray[Any]
    """(H, W) or (H, W, channels), in the depth that the file has; of a palette its numbers."""
    deep: bool
    """True if it has more than 8 bits per channel."""
    declared: Range | None
    """The values that are black and white, if the file says it."""
    inverted: bool
    """True if its lowest value is white."""

    def colours(self) -> NDArray[Any]:
        """The values without transparency."""
        if self.values.ndim == 2 or self.mode not in ALPHA:
            return self.values
        return self.values[..., : ALPHA[self.mode]]

    def limits(self, asked: Range | None = None) -> Range:
        """Return the values that are black and white; an UnknownRangeError if nobody says them."""
        values = self.colours()
        if values.dtype.kind == "f" and not np.all(np.isfinite(values)):
            raise BrokenImageError(f"{self.name}: holds values that are not finite")
        if (known := asked or self.declared) is not None:
            return known
        low, high = values.min(), values.max()
        if values.dtype.kind == "f" and low >= 0 and high <= 1:
            return 0, 1
        if values.dtype == np.uint16 and (high > UNCLEAR or high == 0):
            return 0, FULL
        raise UnknownRangeError(self.name, *_unclear(values.dtype, low, high))

    def shown(self, asked: Range | None = None) -> Image:
        """Return its values as 8 bits per channel, scaled from the range that is asked for or known."""
        image = scale(self.values, self.limits(asked))
        return 255 - image if self.inverted else image


def check_range(limits: Range) -> None:
    """Refuse a range that has no inside."""
    low, high = limits
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise ValueError(f"range={low:g} {high:g} is empty: the value of black must be below that of white")


def scale(values: NDArray[Any], limits: Range) -> Image:
    """Map values to 0..255, linearly between the two limits; integers of n bits keep their upper eight."""
    low, high = limits
    bits = int(high).bit_length()
    if values.dtype.kind == "u" and low == 0 and high == 2**bits - 1 and bits >= 8:
        most = min(int(high), int(np.iinfo(values.dtype).max))
        return np.asarray(np.minimum(values, most) >> (bits - 8), dtype=np.uint8)
    scaled = (values.astype(np.float64) - low) * (255 / (high - low))
    return np.asarray(np.clip(np.rint(scaled), 0, 255), dtype=np.uint8)


def decode(path: Path, size: int | None = None, reading: Reading = AS_STORED) -> Image:
    """Read a picture file as RGB, resized to size × size (bilinear) if a size is given.

    An UnknownRangeError if it is deeper than 8 bits and nobody knows which of its values are black and white.
    """
    from PIL import Image as Pillow

    with opened(path) as file:
        if is_deep(file):
            image = _eight_bits(path, file, reading.range)
        elif "transparency" in file.info:  # by way of RGBA, or Pillow warns
            image = file.convert("RGBA").convert("RGB")
        else:
            image = file.convert("RGB")
        image = as_square(image, reading.resize)
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Pillow.Resampling.BILINEAR)
        return np.asarray(image)


def read_picture(path: Path) -> Picture:
    """Read a picture's values as they are stored: class numbers of masks, grey values of scanners."""
    with opened(path) as file:
        pages = getattr(file, "n_frames", 1) if file.format == "TIFF" else 1
        if pages > 1:
            raise BrokenImageError(f"{path.name}: has {pages} pages; save a stack as NIfTI, or each slice as a file")
        return _picture(path, file)


def as_square(image: Any, resize: Resize | None) -> Any:
    """Crop the middle of a Pillow image, or pad it with black, to a square; leave it as it is to be squashed."""
    from PIL import Image as Pillow

    width, height = image.size
    if resize not in ("crop", "pad") or width == height:
        return image
    side = min(width, height) if resize == "crop" else max(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    if resize == "crop":
        return image.crop((left, top, left + side, top + side))
    canvas = Pillow.new(image.mode, (side, side))
    canvas.paste(image, (-left, -top))
    return canvas


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a picture file with Pillow; whatever goes wrong with it is a BrokenImageError that names it."""
    from PIL import Image as Pillow

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a named pipe would wait for ever
            raise BrokenImageError(f"{path.name}: is not a regular file")
        with Pillow.open(path) as file:
            yield file
    except (BrokenImageError, UnknownRangeError):
        raise
    except Exception as error:  # decoders raise whatever they like on damaged files
        raise BrokenImageError(f"{path.name}: {error or type(error).__name__}") from error


def is_deep(file: Any) -> bool:
    """Return True if an open picture has more than 8 bits per channel; Pillow reads colours of 16 bits as 8."""
    return file.mode in ("I", "F") or file.mode.startswith("I;16") or _is_deep_colour(file)


def _is_deep_colour(file: Any) -> bool:
    if file.mode.startswith("I") or file.mode == "F":
        return False
    if file.format == "TIFF" and max(file.tag_v2.get(258, (8,))) > 8:  # the tiles of separate planes do not say it
        return True
    return bool(file.tile) and ";16" in _raw_mode(file.tile[0])


def _raw_mode(tile: Any) -> str:
    """The layout of the bytes in a file, as Pillow calls it."""
    return str(tile.args if isinstance(tile.args, str) else (*(tile.args or ()), "")[0])


def _eight_bits(path: Path, file: Any, asked: Range | None) -> Any:
    """A deep picture as a Pillow image in RGB."""
    from PIL import Image as Pillow

    picture = _picture(path, file)
    image = picture.shown(asked)
    return Pillow.frombytes("L" if image.ndim == 2 else picture.mode, file.size, image.tobytes()).convert("RGB")


def _picture(path: Path, file: Any) -> Picture:
    mode, deep = file.mode, is_deep(file)
    tags: Any = getattr(file, "tag_v2", {}) if file.format == "TIFF" else {}
    values = _deep_colours(path, file) if _is_deep_colour(file) else np.asarray(file)
    if mode.startswith("I;16") or (file.format == "PPM" and mode == "I"):
        # In the machine's order of bytes; a PPM has been scaled from the maximum in its header.
        values = values.astype(np.uint16)
    if deep and tags.get(258) == (32,) and tags.get(339, (1,)) == (1,):
        values = values.view(np.uint32)  # Pillow reads them as signed
    inverted = deep and values.ndim == 2 and tags.get(262) == 0
    picture = Picture(path.name, mode, values, deep, None, inverted)
    return replace(picture, declared=_declared(path, file, tags, picture.colours())) if deep else picture


def _deep_colours(path: Path, file: Any) -> NDArray[np.uint16]:
    """All 16 bits of a picture of several channels, of which Pillow gives one byte at a time."""
    from PIL import Image as Pillow

    if file.format == "TIFF" and file.tag_v2.get(284) == 2:
        raise BrokenImageError(f"{path.name}: stores 16-bit channels in separate planes; save it with them interleaved")
    upper = np.asarray(file).astype(np.uint16)
    with Pillow.open(path) as again:
        raw = _raw_mode(again.tile[0])
        # The other order of bytes makes the lower one count. Grey with alpha has no other: its four bytes pass as RGBA.
        low = "RGBA" if raw == "LA;16B" else raw[:-1] + _OTHER[raw[-1]]
        again.tile = [
            tile._replace(args=(low, *tile.args[1:]) if isinstance(tile.args, tuple) else low) for tile in again.tile
        ]
        lower = np.asarray(again)
    if raw == "LA;16B":
        return np.asarray(lower[..., ::2].astype(np.uint16) << 8 | lower[..., 1::2])[..., [0, 0, 0, 1]]
    return np.asarray(upper << 8 | lower)


_OTHER = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}


def _declared(path: Path, file: Any, tags: Any, values: NDArray[Any]) -> Range | None:
    """The range that a file of more than 8 bits says it has."""
    if file.format == "PPM":
        return 0, FULL
    if file.format == "PNG":
        return _by_significant_bits(path, values)
    bits = set(tags.get(258, ()))
    if bits == {12}:
        return 0, 2**12 - 1
    for low, high in ((340, 341), (280, 281)):
        least, most = (float(np.max(tags.get(tag, 0))) for tag in (low, high))
        # Some programs write the extremes of the picture there, by which no two pictures would be scaled alike.
        depth = most == 1 or (most >= 255 and (most + 1).is_integer() and int(most + 1).bit_count() == 1)
        if depth and least == 0 and values.min() >= 0 and values.max() <= most:
            return 0, most
    return None


def _by_significant_bits(path: Path, values: NDArray[Any]) -> Range | None:
    """The range by a PNG's sBIT chunk.

    The standard has values of fewer bits spread over all 16. Some programs write the chunk and leave them as they are:
    then they fit into the bits, and the lowest bits of 16, which would be empty in dark images, are used.
    """
    bits = max(_significant_bits(path)[: 1 if values.ndim == 2 else 3], default=0)
    if not 8 <= bits <= 16:
        return None
    unscaled = values.max() < 2**bits and bool(np.any(values & (2 ** (16 - bits) - 1)))
    return (0, 2**bits - 1) if unscaled else (0, FULL)


def _significant_bits(path: Path) -> bytes:
    """The content of a PNG's sBIT chunk; empty if it has none."""
    with path.open("rb") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"sBIT":
                return file.read(min(length, 4))
            if kind in (b"PLTE", b"IDAT"):  # it would stand before these
                break
            file.seek(length + 4, 1)
    return b""


def _unclear(dtype: np.dtype[Any], low: Any, high: Any) -> tuple[str, str]:
    """Why the range of a picture is not known, and what to do."""
    way_out = "say which values are black and white with --range LOW HIGH"
    if dtype == np.uint16:
        bits = 12 if high < 2**12 else 14
        reason = f"its largest value is {high} of {FULL}: a dark picture of 16 bits, or one of {bits}"
        return reason, f"say --range 0 {2**bits - 1} or --range 0 {FULL}"
    if dtype.kind == "f":
        return f"holds floats from {low:g} to {high:g}, which is not within 0 to 1", way_out
    return f"holds integers from {low} to {high}", way_out
