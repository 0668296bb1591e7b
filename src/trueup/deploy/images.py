"""The images of a folder, one after the other, and masks that lie on them: each file is whole or not there."""

from __future__ import annotations

import colorsys
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trueup.atomic import put
from trueup.data.datasets.found import JUNK
from trueup.data.datasets.masks import DATA, IMAGES, is_volume, read_image
from trueup.data.domains import BrokenImageError
from trueup.data.slices import Mask, Volume, field_of_view, square
from trueup.data.volumes import Grid, count_channels, suffix, write_mask

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

    def read(self, field: float | None) -> Case:
        """Read it; of a volume's slices networks see `field` millimetres, if that is given, else all."""
        stamp = self.stamp()
        pixels, spacing, grid = read_image(self.path)
        if is_volume(self.path) and (several := count_channels(self.path)) > 1:
            log.warning("%s holds %d volumes; the first is segmented", self.name, several)
        height, width = pixels.shape[1:3]
        if field is None or grid is None:  # nobody knows how large the pixels of a picture are
            box, what = square(height, width, spacing), "all of it"
        else:
            box, what = field_of_view(height, width, spacing, field), f"{field:g} mm"
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
                put(path, _png(mask[0]))
            else:
                write_mask(path, mask, self.grid)


def find(folder: Path, out: Path, endings: Sequence[str]) -> tuple[list[Image], list[str]]:
    """The images in a folder and below, sorted by name, and the names of files that are none.

    `endings` is what the files of an image's masks have behind its name.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if folder.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"{out} is no place for masks: the images are there; choose another --out")
    found, others, taken = [], [], dict[Path, str]()
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in _below(folder, out.resolve())):
        if not name.lower().endswith(IMAGES):
            others += [] if name.lower().endswith(DATA) else [name]
            continue
        old = suffix(path) if is_volume(path) else path.suffix
        new = old.replace(".mhd", ".mha") if is_volume(path) else ".png"
        masks = tuple(out / f"{name[: -len(old)]}{ending}{new}" for ending in endings)
        if twin := next((taken[mask] for mask in masks if mask in taken), None):
            raise ValueError(f"{twin} and {name} would write to one file; rename one")
        taken |= dict.fromkeys(masks, name)
        found.append(Image(name, path, masks))
    if not found:
        raise ValueError(f"{folder} holds no image, nor do folders in it; images end with {', '.join(IMAGES)}")
    return found, others


def _below(folder: Path, out: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """All files but hidden ones, what operating systems leave behind, and masks that were made here.

    Links back up are not followed.
    """
    here = (*above, folder.resolve())
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in JUNK:
            continue
        if not path.is_dir():
            yield path
        elif path.resolve() not in (out, *here) and not (path / JOURNAL).exists():
            yield from _below(path, out, here)


def groups(images: Sequence[Image], *, field: float | None, batch: int, broken: dict[str, str]) -> Iterator[list[Case]]:
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
            group.append(image.read(field))
        except (BrokenImageError, OSError) as error:
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
