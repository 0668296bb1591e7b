"""Photographs of the back of the eye with optic disc and cup: REFUGE, Drishti-GS and RIM-ONE r3.

Each is read as its authors distribute it, or from the archives in which all three circulate ready-cropped; where both
lie below one root, the crops are taken. Networks see a square around the disc. In whole photographs that square is
placed by means of the mask, as in the public crops: finding the disc is no part of the task.
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

from trueup.data.datasets.file_matching import DEEPEST, Found, NotThereError, levels, visible
from trueup.data.datasets.folders import EXTENSIONS
from trueup.data.domains import BrokenImageError, Image, decode
from trueup.data.pictures import Reading, UnknownRangeError, read_picture
from trueup.data.slices import Mask, Volume, whole

DOMAINS = ("refuge", "drishti-gs", "rim-one-r3")
CLASSES = ("background", "rim", "cup")
STRUCTURES = {"disc": (1, 2), "cup": (2,)}
PARTS = ("train", "test", "canon")
EXPERTS = {"average": "avg", "1": "exp1", "2": "exp2"}
SIDE, HEIGHT = 800, 2056  # of the square in a photograph of REFUGE, and of that photograph

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
# Maninis et al., 2016: numbers of the 60 images of RIM-ONE r3 to test with; N is healthy, G glaucoma, S suspected.
_RIM_ONE_TEST = {
    "n": {*range(1, 5), 17, 18, *range(20, 24), *range(28, 45), *range(46, 52), 78},
    "g": {2, *range(22, 32)},
    "s": {*range(2, 10), *range(29, 36)},
}

Files = dict[str, tuple[str, Path]]
"""Image files by their names: the part and the file."""
Drawn = dict[str, dict[str, Path]]
"""Mask files by the names of their images, and by what they show."""
Read = Callable[..., Volume]


def scan(root: Path, domain: str, *, threshold: float = 0.75, expert: str = "average") -> Found:
    """List a domain's images that have masks; only names are looked at.

    Parts: crops as their folders say; REFUGE's 400 training images, and as "canon" all others that have masks, which
    were taken with another camera; Training and Test of Drishti-GS (50 and 51); 99 and 60 of RIM-ONE r3 as Maninis et
    al. (2016) have them.

    `threshold` is for Drishti-GS: the share of its four experts who must see a structure in a pixel. `expert` is for
    RIM-ONE r3: "1", "2", or their "average". Crops have both decided already.
    """
    if domain not in DOMAINS:
        raise ValueError(f"no fundus domain is called {domain!r}; there are: {', '.join(DOMAINS)}")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it is a share of experts, above 0 and at most 1")
    if expert not in EXPERTS:
        raise ValueError(f"expert is {expert!r}; there are: {', '.join(EXPERTS)}")
    files = [] if (crops := _archive(root, domain)) else list(visible(root))
    if crops:
        found = _found(root, *_crops(crops), ("mask",), _read_crop)
    elif domain == "refuge":
        found = _found(root, *_refuge(root, files), ("mask",), _read_refuge)
    elif domain == "drishti-gs":
        found = _found(root, *_drishti(root, files), ("disc", "cup"), partial(_read_drishti, threshold=threshold))
    else:
        found = _found(root, *_rim_one(files, EXPERTS[expert]), ("disc", "cup"), _read_rim_one)
    if not found.cases:
        crop = " or ".join(f"{name}/{{train,test}}/[ROIs/]{{image,mask}}" for name in ARCHIVES[domain])
        why = f"; {found.missing[0]}" if found.missing else ""
        raise NotThereError(f"{root} holds no {domain}: looked for {LAYOUTS[domain]}, and for crops in {crop}{why}")
    return found


def _archive(root: Path, domain: str) -> dict[str, Path]:
    """The folders of a domain's ready-made crops, by part."""
    names = [_plain(name) for name in ARCHIVES[domain]]
    for folder in levels(root, DEEPEST + 1):
        if _plain(folder.name) not in names:
            continue
        places = {part: (folder / part / "ROIs", folder / part) for part in ("train", "test")}
        # Where there are ROIs, whole photographs may lie beside them.
        parts = {part: next((p for p in both if _has_crops(p)), None) for part, both in places.items()}
        if any(parts.values()):
            return {part: place for part, place in parts.items() if place is not None}
    return {}


def _has_crops(folder: Path) -> bool:
    return (folder / "image").is_dir() and (folder / "mask").is_dir()


def _crops(places: dict[str, Path]) -> tuple[Files, Drawn]:
    """Images and masks of an archive. A name may be in both parts, so the part belongs to it."""
    images: Files = {}
    masks: Drawn = {}
    for part, folder in places.items():
        for file in _pictures(visible(folder / "image")):
            images[f"{part}/{file.stem}"] = part, file
        for file in _pictures(visible(folder / "mask")):
            masks[f"{part}/{file.stem}"] = {"mask": file}
    return images, masks


def _refuge(root: Path, files: Iterable[Path]) -> tuple[Files, Drawn]:
    images: Files = {}
    masks: Drawn = {}
    for file in _pictures(files):
        above = [name.lower().removeprefix("refuge-") for name in file.relative_to(root).parts[:-1]]
        if "disc_cup_masks" in above:
            masks[file.stem.lower()] = {"mask": file}
        elif part := next((_REFUGE[name] for name in reversed(above) if name in _REFUGE), None):
            images[file.stem.lower()] = part, file
    return images, masks


def _drishti(root: Path, files: Iterable[Path]) -> tuple[Files, Drawn]:
    images: Files = {}
    masks: Drawn = {}
    for file in _pictures(files):
        above = [name.lower() for name in file.relative_to(root).parts[:-1]]
        name = re.fullmatch(r"(drishtigs_\d+)(?:_(od|cup)segsoftmap)?", file.stem.lower())
        part = next((_DRISHTI[folder] for folder in reversed(above) if folder in _DRISHTI), None)
        if name is None or part is None:
            continue
        if name[2]:
            masks.setdefault(name[1], {})["disc" if name[2] == "od" else "cup"] = file
        elif "images" in above:
            images[name[1]] = part, file
    return images, masks


def _rim_one(files: Iterable[Path], expert: str) -> tuple[Files, Drawn]:
    images: Files = {}
    masks: Drawn = {}
    for file in _pictures(files):
        stem = file.stem.lower()
        if (name := re.fullmatch(r"([gns])-(\d+)-[lr]", stem)) and file.parent.name.lower() == "stereo images":
            images[stem] = "test" if int(name[2]) in _RIM_ONE_TEST[name[1]] else "train", file
        elif name := re.fullmatch(rf"([gns]-\d+-[lr])(?:-1)?-(disc|cup)-{expert}", stem):
            masks.setdefault(name[1], {})[name[2]] = file
    return images, masks


def _found(root: Path, images: Files, masks: Drawn, needed: tuple[str, ...], read: Read) -> Found:
    """Cases of images that have all the masks they need, and what has no partner."""
    found = Found()
    without: dict[Path, list[str]] = {}
    for key, (part, file) in images.items():
        drawn = masks.get(key, {})
        if lacking := [what for what in needed if what not in drawn]:
            what = "mask" if lacking == ["mask"] else f"mask of the {' and the '.join(lacking)}"
            without.setdefault(file.parent, []).append(f"{_name(file, root)} has no {what}")
        else:
            case = found.case(file.stem, lambda _: 1, read, file, *(drawn[what] for what in needed))
            found.parts.setdefault(part, []).append(case)
    for folder, lines in without.items():
        count = sum(file.parent == folder for _, file in images.values())
        alone = len(lines) == count > 1  # masks that were not downloaded need no line each
        found.missing += [f"{_name(folder, root)}: none of its {count} images has all it needs"] if alone else lines
    lonely = [file for key, drawn in masks.items() if key not in images for file in drawn.values()]
    found.missing += [f"{_name(file, root)} has no image" for file in lonely]
    found.parts = {part: found.parts[part] for part in PARTS if part in found.parts}
    used = [file for _, file in images.values()] + [file for drawn in masks.values() for file in drawn.values()]
    found.others = [_name(file, root) for file in _beside(used)]
    return found


def _beside(used: list[Path]) -> Iterator[Path]:
    """Further files of the dataset: those below the folders that hold its files, not those of other datasets there."""
    if not used:
        return
    base = Path(os.path.commonpath([file.parent for file in used]))
    known = set(used)
    for top in sorted({file.relative_to(base).parts[0] for file in used}):
        if (base / top).is_dir():
            yield from (file for file in visible(base / top) if file not in known)


def _pictures(files: Iterable[Path]) -> Iterator[Path]:
    return (file for file in files if file.suffix.lower() in EXTENSIONS)


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _read_crop(image: Path, mask: Path) -> Volume:
    """A photograph that has been cropped already."""
    pixels = _photograph(image)
    return _volume(pixels, _three_levels(mask, pixels))


def _read_refuge(image: Path, mask: Path) -> Volume:
    pixels = _photograph(image)
    return _around_disc(pixels, _three_levels(mask, pixels), mask)


def _read_drishti(image: Path, disc: Path, cup: Path, *, threshold: float) -> Volume:
    """Soft maps say how many of four experts agree: about 64 for each."""
    pixels = _photograph(image)
    level = max(1, math.floor(255 * threshold))
    return _around_disc(pixels, _join(_grey(disc, pixels) >= level, _grey(cup, pixels) >= level), disc)


def _read_rim_one(image: Path, disc: Path, cup: Path) -> Volume:
    """The left one of a stereo pair. The L or R in a file's name is the eye, which both halves show."""
    pixels = _photograph(image)
    mask = _join(_grey(disc, pixels) > 127, _grey(cup, pixels) > 127)
    half = pixels.shape[1] // 2
    return _around_disc(pixels[:, :half], mask[:, :half], disc)


def _photograph(path: Path) -> Image:
    """An image as RGB; all of these datasets have 8 bits."""
    try:
        return decode(path)
    except UnknownRangeError as error:
        raise BrokenImageError(f"{error.name}: {error.reason}; save it with 8 bits") from error


def _grey(path: Path, image: Image) -> NDArray[np.uint8]:
    """A mask as it is, in grey or as colours that are all grey; 0..255 in 16 bits are not scaled."""
    try:
        pixels = decode(path)
    except UnknownRangeError:
        if (most := read_picture(path).colours().max()) > 255:
            raise BrokenImageError(f"{path.name}: its largest value is {most}; a mask has 0 to 255") from None
        pixels = decode(path, reading=Reading(range=(0, 255)))
    if pixels.shape != image.shape:
        (height, width), (tall, wide) = pixels.shape[:2], image.shape[:2]
        raise BrokenImageError(f"{path.name}: the mask is {width}×{height} pixels, its image {wide}×{tall}")
    if np.any(np.ptp(pixels, axis=2) > 8):
        raise BrokenImageError(f"{path.name}: is coloured; a mask is grey")
    return pixels[:, :, 0]


def _three_levels(path: Path, image: Image) -> Mask:
    """Classes of a mask that is 255 in the background, 128 in the rim and 0 in the cup, or nearly so."""
    grey = _grey(path, image)
    mask = np.where(grey > 200, 0, np.where(grey > 50, 1, 2)).astype(np.uint8)
    if np.all(mask[[0, 0, -1, -1], [0, -1, 0, -1]] == 2):
        values = ", ".join(str(v) for v in np.unique(grey)[:8])
        raise BrokenImageError(
            f"{path.name}: cup in all four corners; 255 is background, 128 rim, 0 cup, and its values are {values}"
        )
    return mask


def _join(disc: NDArray[np.bool_], cup: NDArray[np.bool_]) -> Mask:
    """Classes of two structures, one within the other."""
    return (disc | cup).astype(np.uint8) + cup.astype(np.uint8)


def _around_disc(image: Image, mask: Mask, file: Path) -> Volume:
    """The square around the disc: twice its diameter, or more if 800 pixels of REFUGE's height say so."""
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
    # Copies, so that a crop does not keep the photograph in memory.
    return Volume(image[None].copy(), mask[None].copy(), (1.0, 1.0, 1.0), whole(*mask.shape))
