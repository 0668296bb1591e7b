"""The decoder of picture files: networks see 8 bits per channel, whatever the depth on disk.

Files of up to 8 bits are read by Pillow. Deeper ones are scaled from their range, the values of black and white: the
requested range; else the declared one (the maximum of a PGM, BitsPerSample and the sample limits of a TIFF, sBIT of a
PNG); else 0 to 1 for floats within it; else 0 to 65535 for 16 bits with values above the lower 14. Anything else is
refused: cameras store 10, 12 and 14 bits in 16-bit files.
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
UNCLEAR = 2**14 - 1  # up to this largest value, 16-bit files may hold 10, 12 or 14 bits
FULL = 2**16 - 1
ALPHA = {"LA": 1, "La": 1, "PA": 1, "RGBA": 3, "RGBa": 3}  # the index of the alpha channel, by mode


class BrokenImageError(ValueError):
    """An image file that cannot be read."""


class UnknownRangeError(ValueError):
    """A picture of more than 8 bits whose values of black and white are unknown."""

    def __init__(self, name: str, reason: str, way_out: str) -> None:
        super().__init__(f"{name}: {reason}; {way_out}")
        self.name, self.reason = name, reason


@dataclass(frozen=True)
class Reading:
    """Options for reading picture files."""

    range: Range | None = None
    """The values of black and white in files of more than 8 bits; others are clipped. None: as declared."""
    resize: Resize | None = None
    """The way to make a picture square: "squash", "crop" the middle, "pad" with black. None: the dataset's default."""

    def __post_init__(self) -> None:
        """Refuse unknown values."""
        if self.resize is not None and self.resize not in RESIZES:
            raise ValueError(f"resize={self.resize!r} is not known: it must be {', '.join(RESIZES)}")
        if self.range is not None:
            check_range(self.range)


AS_STORED = Reading()


def default_resize(dataset: str) -> Resize:
    """Return the default `resize` of a dataset."""
    return "pad" if dataset == "masks" else "squash"


@dataclass(frozen=True)
class StoredPicture:
    """A picture with its values as stored."""

    name: str
    mode: str  # Pillow's mode: L, P, RGB, I;16 ...
    values: NDArray[Any]  # (H, W) or (H, W, channels), in the depth of the file; palette indices for mode P
    deep: bool  # True if it has more than 8 bits per channel
    declared: Range | None  # the values of black and white, if the file declares them
    inverted: bool  # True if its lowest value is white

    def colours(self) -> NDArray[Any]:
        """Return the values without the alpha channel."""
        if self.values.ndim == 2 or self.mode not in ALPHA:
            return self.values
        return self.values[..., : ALPHA[self.mode]]

    def value_range(self, asked: Range | None = None) -> Range:
        """Return the values of black and white; raise an UnknownRangeError if they are unknown."""
        values = self.colours()
        if (known := asked or self.declared) is not None:
            return known
        low, high = values.min(), values.max()
        if values.dtype.kind == "f" and low >= 0 and high <= 1:
            return 0, 1
        if values.dtype == np.uint16 and (high > UNCLEAR or high == 0):
            return 0, FULL
        raise UnknownRangeError(self.name, *_unclear(values.dtype, low, high))

    def to_uint8(self, asked: Range | None = None) -> Image:
        """Return 8 bits per channel, scaled from the requested or known range."""
        image = scale(self.values, self.value_range(asked))
        return 255 - image if self.inverted else image


def check_range(limits: Range) -> None:
    """Refuse an empty range."""
    low, high = limits
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise ValueError(f"range={low:g} {high:g} is empty: the value of black must be below that of white")


def scale(values: NDArray[Any], limits: Range) -> Image:
    """Map values to 0..255, linearly between the limits; n-bit integers keep their upper eight bits."""
    low, high = limits
    bits = int(high).bit_length()
    if values.dtype.kind == "u" and low == 0 and high == 2**bits - 1 and bits >= 8:
        most = min(int(high), int(np.iinfo(values.dtype).max))
        return np.asarray(np.minimum(values, most) >> (bits - 8), dtype=np.uint8)
    scaled = (values.astype(np.float64) - low) * (255 / (high - low))
    return np.asarray(np.clip(np.rint(scaled), 0, 255), dtype=np.uint8)


def decode(path: Path, size: int | None = None, reading: Reading = AS_STORED, name: str | None = None) -> Image:
    """Read a picture file as RGB, resized to size × size (bilinear) if a size is given.

    Raises an UnknownRangeError, with the name, if it is deep and its values of black and white are unknown.
    """
    from PIL import Image as Pillow

    with open_picture(path) as file:
        if is_deep(file):
            picture = _picture(path, file, name)
            values = picture.to_uint8(reading.range)
            mode = "L" if values.ndim == 2 else picture.mode
            image = Pillow.frombytes(mode, file.size, values.tobytes()).convert("RGB")
        elif "transparency" in file.info:  # through RGBA, or Pillow warns
            image = file.convert("RGBA").convert("RGB")
        else:
            image = file.convert("RGB")
        image = make_square(image, reading.resize)
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Pillow.Resampling.BILINEAR)
        return np.asarray(image)


@dataclass(frozen=True)
class PictureInfo:
    """The size of a picture, and its clipped values."""

    width: int
    height: int
    clipped: float  # the share of values beyond the requested range

    @property
    def squashed(self) -> bool:
        """Return True if the sides differ by more than a pixel of rounding."""
        return abs(self.width - self.height) > 1


def inspect_picture(path: Path, asked: Range | None, name: str) -> PictureInfo:
    """Inspect a picture; raise a BrokenImageError or an UnknownRangeError if a network cannot see it."""
    with open_picture(path) as file:
        (width, height), deep = file.size, is_deep(file)
    if not deep:
        return PictureInfo(width, height, 0.0)
    picture = read_picture(path, name)
    low, high = picture.value_range(asked)
    values = picture.colours()
    return PictureInfo(width, height, float(np.mean((values < low) | (values > high))))


def read_picture(path: Path, name: str | None = None) -> StoredPicture:
    """Read a picture's stored values: class numbers of masks, grey values of scanners."""
    with open_picture(path) as file:
        pages = getattr(file, "n_frames", 1) if file.format == "TIFF" else 1
        if pages > 1:
            raise BrokenImageError(f"{path.name}: has {pages} pages; save a stack as NIfTI, or each slice as a file")
        return _picture(path, file, name)


def make_square(image: Any, resize: Resize | None) -> Any:
    """Crop or pad a Pillow image to a square; "squash" and None leave it unchanged."""
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


def resize_pixels(pixels: Image, size: int | None, *, smooth: bool = True) -> Image:
    """Resize (H, W) or (H, W, channels) to size × size if a size is given; class numbers are not `smooth`."""
    from PIL import Image as Pillow

    if size is None or pixels.shape[:2] == (size, size):
        return pixels
    how = Pillow.Resampling.BILINEAR if smooth else Pillow.Resampling.NEAREST
    picture = Pillow.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels))
    return np.asarray(picture.resize((size, size), how)).reshape(size, size, *pixels.shape[2:])


@contextmanager
def open_picture(path: Path) -> Iterator[Any]:
    """Open a picture file with Pillow; any error becomes a BrokenImageError with the file's name."""
    from PIL import Image as Pillow

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a named pipe would block for ever
            raise BrokenImageError(f"{path.name}: is not a regular file")
        with Pillow.open(path) as file:
            yield file
    except (BrokenImageError, UnknownRangeError):
        raise
    except Exception as error:  # decoders raise any error on damaged files
        raise BrokenImageError(f"{path.name}: {error or type(error).__name__}") from error


def is_deep(file: Any) -> bool:
    """Return True if an open picture has more than 8 bits per channel; Pillow reads 16-bit colours as 8 bits."""
    return file.mode in ("I", "F") or file.mode.startswith("I;16") or _is_deep_colour(file)


def _is_deep_colour(file: Any) -> bool:
    if file.mode.startswith("I") or file.mode == "F":
        return False
    deep_tiff = file.format == "TIFF" and max(file.tag_v2.get(258, (8,))) > 8  # tiles of separate planes do not show it
    return deep_tiff or (bool(file.tile) and ";16" in _raw_mode(file.tile[0]))


def _raw_mode(tile: Any) -> str:
    """Return Pillow's name of the byte layout in the file."""
    return str(tile.args if isinstance(tile.args, str) else (*(tile.args or ()), "")[0])


def _picture(path: Path, file: Any, name: str | None) -> StoredPicture:
    mode, deep = file.mode, is_deep(file)
    tags: Any = getattr(file, "tag_v2", {}) if file.format == "TIFF" else {}
    values = _deep_colours(path, file) if _is_deep_colour(file) else np.asarray(file)
    if mode.startswith("I;16") or (file.format == "PPM" and mode == "I"):
        # In native byte order; Pillow has scaled a PPM by the maximum in its header.
        values = values.astype(np.uint16)
    if deep and tags.get(258) == (32,) and tags.get(339, (1,)) == (1,):
        values = values.view(np.uint32)  # Pillow reads it as signed
    if values.dtype.kind == "f" and not np.all(np.isfinite(values)):
        raise BrokenImageError(f"{path.name}: holds values that are not finite")
    inverted = deep and values.ndim == 2 and tags.get(262) == 0
    picture = StoredPicture(name or path.name, mode, values, deep, None, inverted)
    return replace(picture, declared=_declared(path, file, tags, picture.colours())) if deep else picture


def _deep_colours(path: Path, file: Any) -> NDArray[np.uint16]:
    """Read all 16 bits of a picture with several channels; Pillow gives one byte at a time."""
    from PIL import Image as Pillow

    if file.format == "TIFF" and file.tag_v2.get(284) == 2:
        raise BrokenImageError(f"{path.name}: stores 16-bit channels in separate planes; save it with them interleaved")
    upper = np.asarray(file).astype(np.uint16)
    with Pillow.open(path) as again:
        raw = _raw_mode(again.tile[0])
        # Swapping the byte order yields the lower byte. Grey with alpha has no swapped mode: read its 4 bytes as RGBA.
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
    """Return the declared range of a file of more than 8 bits."""
    if file.format == "PPM":
        return 0, FULL
    if file.format == "PNG":
        bits = max(_significant_bits(path)[: 1 if values.ndim == 2 else 3], default=0)
        if not 8 <= bits <= 16:
            return None
        # The standard scales values to 16 bits. Where programs do not, values fit into the declared bits and use the
        # lowest, which scaled dark images leave empty.
        unscaled = values.max() < 2**bits and np.any(values & (2 ** (16 - bits) - 1))
        return 0, 2**bits - 1 if unscaled else FULL
    if set(tags.get(258, ())) == {12}:
        return 0, 2**12 - 1
    for low, high in ((340, 341), (280, 281)):
        least, most = (float(np.max(tags.get(tag, 0))) for tag in (low, high))
        # Some programs write the extremes of the picture here, which would scale every picture differently.
        depth = most == 1 or (most >= 255 and (most + 1).is_integer() and int(most + 1).bit_count() == 1)
        if depth and least == 0 and values.min() >= 0 and values.max() <= most:
            return 0, most
    return None


def _significant_bits(path: Path) -> bytes:
    """Return the content of a PNG's sBIT chunk; empty if there is none."""
    with path.open("rb") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"sBIT":
                return file.read(min(length, 4))
            if kind in (b"PLTE", b"IDAT"):  # sBIT comes before these
                break
            file.seek(length + 4, 1)
    return b""


def _unclear(dtype: np.dtype[Any], low: Any, high: Any) -> tuple[str, str]:
    """Return why the range of a picture is unknown, and the way out."""
    way_out = "give the values of black and white with --range LOW HIGH"
    if dtype == np.uint16:
        bits = 12 if high < 2**12 else 14
        reason = f"its largest value is {high} of {FULL}: a dark picture of 16 bits, or one of {bits}"
        return reason, f"give --range 0 {2**bits - 1} or --range 0 {FULL}"
    if dtype.kind == "f":
        return f"holds floats from {low:g} to {high:g}, which is not within 0 to 1", way_out
    return f"holds integers from {low} to {high}", way_out
