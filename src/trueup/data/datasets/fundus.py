"""Fundus photographs with optic disc and cup: REFUGE, Drishti-GS and RIM-ONE r3.

Each is read as its authors distribute it, or from the archives with crops of all three; if both are below one root, the
crops are used. Networks see a square around the disc. In whole photographs the mask places it, as in the public crops:
finding the disc is not part of the task.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trueup.data.datasets.file_matching import CaseFile, DomainNotFoundError, FoundCases, check_domain, walk_files
from trueup.data.datasets.folders import EXTENSIONS, simple_name
from trueup.data.pictures import BrokenImageError, Image, Reading, UnknownRangeError, decode, read_picture
from trueup.data.scanning import FolderScan
from trueup.data.slices import Mask, Volume, full_box

DOMAINS = ("refuge", "drishti-gs", "rim-one-r3")
CLASSES = ("background", "rim", "cup")
STRUCTURES = {"disc": (1, 2), "cup": (2,)}
PARTS = ("train", "test", "canon")
EXPERTS = {"average": "avg", "1": "exp1", "2": "exp2"}
SIDE, HEIGHT = 800, 2056  # pixels of the square in a REFUGE photograph, and of that photograph

LAYOUTS = {
    "refuge": "Training400 with Annotation-Training400/Disc_Cup_Masks",
    "drishti-gs": "Training and Test with Images/NAME.png and GT/NAME/SoftMap",
    "rim-one-r3": "Stereo Images with Average_masks, Expert1_masks or Expert2_masks",
}
ARCHIVES = {
    "refuge": ("Domain3", "refuge"),
    "drishti-gs": ("Domain1", "Drishti-GS"),
    "rim-one-r3": ("Domain2", "RIM-ONE_r3"),
}
_REFUGE = {"training400": "train", "validation400": "canon", "test400": "canon"}
_DRISHTI = {"training": "train", "test": "test"}
# Maninis et al., 2016: numbers of the 60 test images of RIM-ONE r3; N is healthy, G glaucoma, S suspected.
_RIM_ONE_TEST = {
    "n": {*range(1, 5), 17, 18, *range(20, 24), *range(28, 45), *range(46, 52), 78},
    "g": {2, *range(22, 32)},
    "s": {*range(2, 10), *range(29, 36)},
}


def find_fundus_cases(root: Path, domain: str, *, threshold: float = 0.75, expert: str = "average") -> FoundCases:
    """Find a domain's images that have masks; only names are read.

    Parts: for crops, their folders; REFUGE's 400 training images, and as "canon" all others with masks, from another
    camera; Training and Test of Drishti-GS (50 and 51); 99 and 60 of RIM-ONE r3 as in Maninis et al. (2016).

    `threshold` (Drishti-GS): the share of the four experts who must mark a pixel. `expert` (RIM-ONE r3): "1", "2", or
    their "average". Both are fixed in crops.
    """
    check_domain(domain, DOMAINS, "fundus")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it must be a share of experts, above 0 and at most 1")
    if expert not in EXPERTS:
        raise ValueError(f"expert is {expert!r}; there are: {', '.join(EXPERTS)}")
    if crops := _archive(root, domain):
        found = _match(root, _crops(crops), ("mask",), partial(_read_three_levels, whole=False))
    elif domain == "refuge":
        found = _match(root, _refuge(root), ("mask",), partial(_read_three_levels, whole=True))
    elif domain == "drishti-gs":
        found = _match(root, _drishti(root), ("disc", "cup"), partial(_read_drishti, threshold=threshold))
    else:
        found = _match(root, _rim_one(root, EXPERTS[expert]), ("disc", "cup"), _read_rim_one)
    if not found.cases:
        crop = " or ".join(f"{name}/{{train,test}}/[ROIs/]{{image,mask}}" for name in ARCHIVES[domain])
        why = f"; {found.missing[0]}" if found.missing else ""
        raise DomainNotFoundError(
            f"{root} holds no {domain}: looked for {LAYOUTS[domain]}, and for crops in {crop}{why}"
        )
    return found


def _archive(root: Path, domain: str) -> dict[str, Path]:
    """Return the folders of a domain's crops, by part."""
    names = [simple_name(name) for name in ARCHIVES[domain]]
    scan, level = FolderScan(root), [root]
    for _ in range(4):  # archives may put three levels of folders around a dataset
        for folder in level:
            # Whole photographs may lie beside the ROIs, which come later and win.
            places = ((part, folder / part / inner) for part in ("train", "test") for inner in ("", "ROIs"))
            crops = {part: place for part, place in places if (place / "image").is_dir() and (place / "mask").is_dir()}
            if crops and simple_name(folder.name) in names:
                return crops
        level = [Path(entry.path) for folder in level for entry in scan.list_folder(folder)[0]]
    return {}


# The files of each layout: the key of a photograph, its part or the kind of its mask, and the file.


def _crops(places: dict[str, Path]) -> Iterator[CaseFile]:
    for part, folder in places.items():
        for place, what in (("image", part), ("mask", "mask")):
            yield from ((f"{part}/{file.stem}", what, file) for file in walk_files(folder / place))


def _refuge(root: Path) -> Iterator[CaseFile]:
    for file in walk_files(root):
        above = [name.lower().removeprefix("refuge-") for name in file.relative_to(root).parts[:-1]]
        part = next((_REFUGE[name] for name in reversed(above) if name in _REFUGE), "")
        if what := "mask" if "disc_cup_masks" in above else part:
            yield file.stem.lower(), what, file


def _drishti(root: Path) -> Iterator[CaseFile]:
    for file in walk_files(root):
        above = [name.lower() for name in file.relative_to(root).parts[:-1]]
        name = re.fullmatch(r"(drishtigs_\d+)(?:_(od|cup)segsoftmap)?", file.stem.lower())
        part = next((_DRISHTI[folder] for folder in reversed(above) if folder in _DRISHTI), "")
        if name and part and (name[2] or "images" in above):
            yield name[1], {"od": "disc", "cup": "cup", None: part}[name[2]], file


def _rim_one(root: Path, expert: str) -> Iterator[CaseFile]:
    for file in walk_files(root):
        stem = file.stem.lower()
        if (name := re.fullmatch(r"([gns])-(\d+)-[lr]", stem)) and file.parent.name.lower() == "stereo images":
            yield stem, "test" if int(name[2]) in _RIM_ONE_TEST[name[1]] else "train", file
        elif name := re.fullmatch(rf"([gns]-\d+-[lr])(?:-1)?-(disc|cup)-{expert}", stem):
            yield name[1], name[2], file


def _match(root: Path, files: Iterable[CaseFile], needed: tuple[str, ...], read: Callable[..., Volume]) -> FoundCases:
    """Return cases of images that have all required masks, and the files without a partner."""
    images: dict[str, tuple[str, Path]] = {}
    masks: dict[str, dict[str, Path]] = {}
    for key, what, file in files:
        if file.suffix.lower() in EXTENSIONS and what in PARTS:
            images[key] = what, file
        elif file.suffix.lower() in EXTENSIONS:
            masks.setdefault(key, {})[what] = file
    found = FoundCases()
    without: dict[Path, list[str]] = {}
    for key, (part, file) in images.items():
        drawn = masks.get(key, {})
        if lacking := [what for what in needed if what not in drawn]:
            what = "mask" if lacking == ["mask"] else f"mask of the {' and the '.join(lacking)}"
            without.setdefault(file.parent, []).append(f"{_name(file, root)} has no {what}")
        else:
            case = found.make_case(file.stem, read, file, *(drawn[what] for what in needed))
            found.parts.setdefault(part, []).append(case)
    for folder, lines in without.items():
        count = sum(file.parent == folder for _, file in images.values())
        alone = len(lines) == count > 1  # one line if the masks were not downloaded
        found.missing += [f"{_name(folder, root)}: none of its {count} images has all masks"] if alone else lines
    lonely = [file for key, drawn in masks.items() if key not in images for file in drawn.values()]
    found.missing += [f"{_name(file, root)} has no image" for file in lonely]
    found.parts = {part: found.parts[part] for part in PARTS if part in found.parts}
    used = [file for _, file in images.values()] + [file for drawn in masks.values() for file in drawn.values()]
    found.others = [_name(file, root) for file in _beside(used)]
    return found


def _beside(used: list[Path]) -> Iterator[Path]:
    """Yield unused files in the folders of this dataset, not in those of other datasets."""
    known, base = set(used), Path(os.path.commonpath([file.parent for file in used])) if used else Path()
    for top in sorted({file.relative_to(base).parts[0] for file in used}):
        if (base / top).is_dir():
            yield from (file for file in walk_files(base / top) if file not in known)


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _read_three_levels(image: Path, mask: Path, *, whole: bool) -> Volume:
    """Read a whole photograph, or one that is cropped already."""
    pixels = _photograph(image)
    classes = _three_levels(mask, pixels)
    return _around_disc(pixels, classes, mask) if whole else _volume(pixels, classes)


def _read_drishti(image: Path, disc: Path, cup: Path, *, threshold: float) -> Volume:
    """Read soft maps: about 64 for each of four experts who agree."""
    pixels = _photograph(image)
    level = max(1, math.floor(255 * threshold))
    return _around_disc(pixels, _join(_grey(disc, pixels) >= level, _grey(cup, pixels) >= level), disc)


def _read_rim_one(image: Path, disc: Path, cup: Path) -> Volume:
    """Read the left image of a stereo pair. L or R in the file's name is the eye, shown in both halves."""
    pixels = _photograph(image)
    mask = _join(_grey(disc, pixels) > 127, _grey(cup, pixels) > 127)
    half = pixels.shape[1] // 2
    return _around_disc(pixels[:, :half], mask[:, :half], disc)


def _photograph(path: Path) -> Image:
    """Read an image as RGB; all of these datasets have 8 bits."""
    try:
        return decode(path)
    except UnknownRangeError as error:
        raise BrokenImageError(f"{error.name}: {error.reason}; save it with 8 bits") from error


def _grey(path: Path, image: Image) -> NDArray[np.uint8]:
    """Read a mask in grey, or in RGB with equal channels; values 0..255 in 16 bits are not scaled."""
    try:
        pixels = decode(path)
    except UnknownRangeError:
        if (most := read_picture(path).colours().max()) > 255:
            raise BrokenImageError(f"{path.name}: its largest value is {most}; a mask must have 0 to 255") from None
        pixels = decode(path, reading=Reading(range=(0, 255)))
    if pixels.shape != image.shape:
        (height, width), (tall, wide) = pixels.shape[:2], image.shape[:2]
        raise BrokenImageError(f"{path.name}: the mask is {width}×{height} pixels, its image {wide}×{tall}")
    if np.any(np.ptp(pixels, axis=2) > 8):
        raise BrokenImageError(f"{path.name}: is coloured; a mask is grey")
    return pixels[:, :, 0]


def _three_levels(path: Path, image: Image) -> Mask:
    """Convert a mask of about 255 (background), 128 (rim) and 0 (cup) to classes."""
    grey = _grey(path, image)
    mask = np.where(grey > 200, 0, np.where(grey > 50, 1, 2)).astype(np.uint8)
    if np.all(mask[[0, 0, -1, -1], [0, -1, 0, -1]] == 2):
        values = ", ".join(str(v) for v in np.unique(grey)[:8])
        raise BrokenImageError(
            f"{path.name}: cup in all four corners; expected 255 background, 128 rim, 0 cup, got values {values}"
        )
    return mask


def _join(disc: NDArray[np.bool_], cup: NDArray[np.bool_]) -> Mask:
    """Return the classes of two nested structures."""
    return (disc | cup).astype(np.uint8) + cup.astype(np.uint8)


def _around_disc(image: Image, mask: Mask, file: Path) -> Volume:
    """Crop the square around the disc: twice its diameter, at least as large as 800 pixels in REFUGE."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        raise BrokenImageError(f"{file.name}: the mask shows no disc")
    height, width = mask.shape
    disc = max(np.ptp(rows), np.ptp(columns)) + 1
    side = int(min(max(round(SIDE * height / HEIGHT), 2 * disc), height, width))
    top = int(np.clip((rows[0] + rows[-1] + 1 - side) // 2, 0, height - side))
    left = int(np.clip((columns[0] + columns[-1] + 1 - side) // 2, 0, width - side))
    square = np.s_[top : top + side, left : left + side]
    return _volume(image[square], mask[square])


def _volume(image: Image, mask: Mask) -> Volume:
    # Copy, so that a crop does not keep the photograph in memory.
    return Volume(image[None].copy(), mask[None].copy(), (1.0, 1.0, 1.0), full_box(*mask.shape))
