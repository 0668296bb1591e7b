"""Images of a folder, read one after the other, and their mask files, written atomically."""

from __future__ import annotations

import colorsys
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.atomic import longest_name, shorten_name, write_atomic
from trueup.data.datasets.mask_folders import DATA, IMAGES, read_image
from trueup.data.pictures import AS_STORED, BrokenImageError, Range, Reading, UnknownRangeError
from trueup.data.scanning import UNREADABLE, FolderScan, describe_skipped
from trueup.data.slices import Mask, Volume, field_of_view_box, network_box
from trueup.data.volumes import Grid, count_channels, is_volume, read_volume, volume_suffix, write_mask

log = logging.getLogger("trueup")

JOURNAL = Path(".trueup", "journal.json")
"""The run log, which marks a folder as one of masks."""
PERCENTILES = (1, 99)  # of a volume for a 3-D network, that become 0 and 1 by default
WIDEST = 2**13  # pixels; a wider box, also wider than four images, comes from a wrong header


@dataclass(frozen=True)
class ImageFile:
    """An image that has not been read yet."""

    name: str  # path below the folder
    path: Path
    masks: tuple[Path, ...]  # its mask files: one, or one per label

    def stamp(self) -> list[int]:
        """Return size and time of the file, which tell if it was replaced."""
        stat = self.path.stat()
        return [stat.st_size, stat.st_mtime_ns]

    def read(self, field: float | None, reading: Reading = AS_STORED) -> tuple[Volume, Grid | None]:
        """Read the image. Networks see `field` millimetres of a volume's slices if given, else what `reading` says."""
        pixels, spacing, grid = read_image(self.path, reading)
        height, width = pixels.shape[1:3]
        if field is None or grid is None:  # the pixel size of a picture is unknown
            box, what = network_box(height, width, spacing, reading.resize), "all of it"
        else:
            box, what = field_of_view_box(height, width, spacing, field), f"{field:g} mm"
        if min(box[2:]) < 1 or max(box[2:]) > max(WIDEST, 4 * height, 4 * width):
            size = f"{box[2]}×{box[3]}"
            raise BrokenImageError(f"{self.path.name}: {what} would be {size} pixels; its voxels have a wrong size")
        return Volume(pixels, None, spacing, box), grid

    def read_ras(self, limits: Range | None) -> tuple[NDArray[np.float32], Grid]:
        """Read a volume (X, Y, Z) with axes towards the patient's right, front and head (RAS), in its voxel size.

        It is clipped and scaled so that `limits`, or two of its percentiles, become 0 and 1.
        """
        scan = read_volume(self.path)
        values = scan.values.astype(np.float32)
        low, high = limits or (float(v) for v in np.percentile(values, PERCENTILES))
        scaled = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
        axes, against = _orientation(scan.grid)
        stored = scan.grid.store(scaled).reshape(scan.grid.shape_3d)
        return np.ascontiguousarray(np.flip(stored, against).transpose(np.argsort(axes))), scan.grid


def show_ras(values: NDArray[Any], grid: Grid) -> NDArray[Any]:
    """Return values (X, Y, Z) in RAS order as slices (Z, H, W)."""
    axes, against = _orientation(grid)
    return grid.show(np.flip(values.transpose(axes), against))


def _orientation(grid: Grid) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the RAS axis of each stored axis, and the stored axes that run against theirs."""
    found = import_module("nibabel").io_orientation(grid.affine)
    return tuple(int(axis) for axis in found[:, 0]), tuple(np.flatnonzero(found[:, 1] < 0).tolist())


@dataclass(frozen=True)
class LoadedImage:
    """An image that was read."""

    image: ImageFile
    stamp: list[int]
    content: Any  # a `Volume`, or for 3-D networks an array in RAS order
    grid: Grid | None  # the voxels of a volume; None for a picture

    def write(self, masks: Iterable[Mask]) -> None:
        """Write a mask (Z, H, W) to each of its files."""
        for path, mask in zip(self.image.masks, masks, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.grid is None:
                write_atomic(path, _png(mask[0]))
            else:
                write_mask(path, mask, self.grid)


@dataclass(frozen=True)
class OtherFiles:
    """Files in a folder and below that are not segmented."""

    others: list[str]  # files that are not images
    skipped: dict[str, str]  # entries that are neither folders nor regular files, or circular links, with the reason
    broken: dict[str, str]  # images and folders that cannot be read, with the reason


def find_images(
    folder: Path, out: Path, endings: Sequence[str], kinds: tuple[str, ...] = IMAGES
) -> tuple[list[ImageFile], OtherFiles]:
    """Find the images in a folder and below, sorted by name, and the other files.

    endings: suffixes of mask names, one for each mask of an image.
    kinds: file endings of images.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if folder.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"{out} cannot hold the masks: it contains the images; choose another --out")
    scan, masks_here = FolderScan(folder), out.resolve()
    paths = scan.walk(leave=lambda path: path.resolve() == masks_here or (path / JOURNAL).exists())
    found, others, taken = [], [], dict[Path, str]()
    longest = longest_name(out)
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
        if not name.lower().endswith(kinds):
            others += [] if name.lower().endswith(DATA) else [name]
            continue
        masks = tuple(out / mask for mask in _mask_names(name, path, endings, longest))
        if twin := next((taken[mask] for mask in masks if mask in taken), None):
            raise ValueError(f"{twin} and {name} would have the same mask file; rename one")
        taken |= dict.fromkeys(masks, name)
        found.append(ImageFile(name, path, masks))
    broken = {n: why for n, why in scan.skipped.items() if n.lower().endswith(kinds) or why.startswith(UNREADABLE)}
    if not found:
        raise ValueError(
            f"{folder} and its subfolders contain no images; images end with {', '.join(kinds)}"
            + (f". Left out: {describe_skipped(scan.skipped)}" if scan.skipped else "")
        )
    return found, OtherFiles(others, {n: why for n, why in scan.skipped.items() if n not in broken}, broken)


def _mask_names(name: str, path: Path, endings: Sequence[str], longest: int) -> Iterator[str]:
    """Return the names of an image's masks, shortened to what the file system allows."""
    old = volume_suffix(path) if is_volume(path) else path.suffix
    new = old.replace(".mhd", ".mha") if is_volume(path) else ".png"
    for ending in endings:
        whole = f"{name[: -len(old)]}{ending}{new}"
        mask = shorten_name(whole, f"{ending}{new}", longest)
        if mask != whole:
            log.warning("the name of a mask of %s was too long and is shortened: %s", name, mask)
        yield mask


def read_batches(
    images: Sequence[ImageFile],
    read: Callable[[ImageFile], tuple[Any, Grid | None]],
    batch: int,
    broken: dict[str, str],
) -> Iterator[list[LoadedImage]]:
    """Read volumes one by one, and consecutive pictures in batches. Unreadable images go to `broken`.

    `read` returns the content and the grid of an image. The next picture takes the place of a broken one, so that
    batches do not depend on where a call resumed.
    """
    group: list[LoadedImage] = []
    for image in images:
        alone = is_volume(image.path)
        if alone and group:
            yield group
            group = []
        try:
            several = count_channels(image.path) if alone else 1
            group.append(LoadedImage(image, image.stamp(), *read(image)))
        except (BrokenImageError, UnknownRangeError, OSError) as error:
            broken[image.name] = str(error)
            continue
        if several > 1:
            log.warning("%s holds %d volumes; the first is segmented", image.name, several)
        if alone or len(group) == batch:
            yield group
            group = []
    if group:
        yield group


def _png(mask: Mask) -> bytes:
    """Return class numbers as a PNG with a palette, so that viewers show colours."""
    from PIL import Image as Pillow

    # Neighbouring classes have distant hues.
    colours = (colorsys.hsv_to_rgb(k * 0.618 % 1, 0.85, 1.0) for k in range(255))
    picture = Pillow.fromarray(mask)
    picture.putpalette([0, 0, 0, *(round(255 * part) for colour in colours for part in colour)])
    blob = io.BytesIO()
    picture.save(blob, "png")
    return blob.getvalue()
