"""The images of a folder, one after the other, and masks that lie on them: each file is whole or not there."""

from __future__ import annotations

import colorsys
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trueup.atomic import longest_name, shortened, write_atomic
from trueup.data.datasets.mask_folders import DATA, IMAGES, is_volume, read_image
from trueup.data.pictures import AS_STORED, BrokenImageError, Reading, UnknownRangeError
from trueup.data.scanning import UNREADABLE, FolderScan, describe_skipped
from trueup.data.slices import Mask, Volume, field_of_view_box, network_box
from trueup.data.volumes import Grid, count_channels, volume_suffix, write_mask

log = logging.getLogger("trueup")

JOURNAL = Path(".trueup", "journal.json")
"""Where a folder of masks says of itself that it is one."""
WIDEST = 2**13  # pixels; a box that is wider, and wider than four images, comes of a wrong header


@dataclass(frozen=True)
class Image:
    """An image that is read when it is its turn."""

    name: str
    """Its path below the folder."""
    path: Path
    masks: tuple[Path, ...]
    """The files of its masks: one, or one for each label."""

    def stamp(self) -> list[int]:
        """Size and time of the file, by which another in its place is told."""
        stat = self.path.stat()
        return [stat.st_size, stat.st_mtime_ns]

    def read(self, field: float | None, reading: Reading = AS_STORED) -> Case:
        """Read it; of a volume's slices networks see `field` millimetres, if that is given, else as `reading` says."""
        stamp = self.stamp()
        pixels, spacing, grid = read_image(self.path, reading)
        if is_volume(self.path) and (several := count_channels(self.path)) > 1:
            log.warning("%s holds %d volumes; the first is segmented", self.name, several)
        height, width = pixels.shape[1:3]
        if field is None or grid is None:  # nobody knows how large the pixels of a picture are
            box, what = network_box(height, width, spacing, reading.resize), "all of it"
        else:
            box, what = field_of_view_box(height, width, spacing, field), f"{field:g} mm"
        if min(box[2:]) < 1 or max(box[2:]) > max(WIDEST, 4 * height, 4 * width):
            size = f"{box[2]}×{box[3]}"
            raise BrokenImageError(f"{self.path.name}: {what} would be {size} pixels; its voxels have a wrong size")
        return Case(self, stamp, Volume(pixels, None, spacing, box), grid)


@dataclass(frozen=True)
class Case:
    """An image that was read."""

    image: Image
    stamp: list[int]
    volume: Volume
    grid: Grid | None

    def write(self, masks: Mask) -> None:
        """Write (files, Z, H, W) classes."""
        for path, mask in zip(self.image.masks, masks, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.grid is None:
                write_atomic(path, _png(mask[0]))
            else:
                write_mask(path, mask, self.grid)


@dataclass(frozen=True)
class Rest:
    """Files beside the images in a folder and below."""

    others: list[str]
    """Files that are no images."""
    skipped: dict[str, str]
    """Entries that are neither a folder nor a regular file, or lead back, and why they were left out."""
    broken: dict[str, str]
    """Images and folders that cannot be read, and why."""


def find(folder: Path, out: Path, endings: Sequence[str], kinds: tuple[str, ...] = IMAGES) -> tuple[list[Image], Rest]:
    """Find the images in a folder and below, sorted by name, and what lies beside them.

    endings: what the files of an image's masks have behind its name.
    kinds: how the names of images end; all others are left out.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if folder.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"{out} is no place for masks: the images are there; choose another --out")
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
            raise ValueError(f"{twin} and {name} would write to one file; rename one")
        taken |= dict.fromkeys(masks, name)
        found.append(Image(name, path, masks))
    broken = {n: why for n, why in scan.skipped.items() if n.lower().endswith(kinds) or why.startswith(UNREADABLE)}
    if not found:
        raise ValueError(
            f"{folder} holds no image, nor do folders in it; images end with {', '.join(kinds)}"
            + (f". Left out: {describe_skipped(scan.skipped)}" if scan.skipped else "")
        )
    return found, Rest(others, {n: why for n, why in scan.skipped.items() if n not in broken}, broken)


def _mask_names(name: str, path: Path, endings: Sequence[str], longest: int) -> Iterator[str]:
    """The names of an image's masks; those that a file system would not take are shortened."""
    old = volume_suffix(path) if is_volume(path) else path.suffix
    new = old.replace(".mhd", ".mha") if is_volume(path) else ".png"
    for ending in endings:
        whole = f"{name[: -len(old)]}{ending}{new}"
        mask = shortened(whole, f"{ending}{new}", longest)
        if mask != whole:
            log.warning("a mask of %s has a shorter name, as its own would be too long: %s", name, mask)
        yield mask


def groups(
    images: Sequence[Image], *, field: float | None, batch: int, broken: dict[str, str], reading: Reading = AS_STORED
) -> Iterator[list[Case]]:
    """Read images: volumes alone, consecutive pictures together. Those that cannot be read go to `broken`.

    A broken picture leaves no gap, the next takes its place: so what comes together does not depend on where a call
    starts that goes on with an earlier one and tries what was broken again.
    """
    group: list[Case] = []
    for image in images:
        alone = is_volume(image.path)
        if alone and group:
            yield group
            group = []
        try:
            group.append(image.read(field, reading))
        except (BrokenImageError, UnknownRangeError, OSError) as error:
            broken[image.name] = str(error)
            continue
        if alone or len(group) == batch:
            yield group
            group = []
    if group:
        yield group


def _png(mask: Mask) -> bytes:
    """Class numbers with a palette: programs read the numbers, people see colours."""
    from PIL import Image as Pillow

    colours = (colorsys.hsv_to_rgb(k * 0.618 % 1, 0.85, 1.0) for k in range(255))  # neighbours are far apart
    picture = Pillow.fromarray(mask)
    picture.putpalette([0, 0, 0, *(round(255 * part) for colour in colours for part in colour)])
    blob = io.BytesIO()
    picture.save(blob, "png")
    return blob.getvalue()
