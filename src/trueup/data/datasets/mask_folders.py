"""User images with masks: ROOT/domain/images/NAME and ROOT/domain/masks/NAME, or ROOT/images and ROOT/masks.

Images are pictures or volumes (NIfTI, MetaImage, NRRD). A mask holds the class number of each pixel, 0 for background;
with two classes it may hold 0 and 255. ROOT/classes.txt may name the classes, one per line, background first.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.data.datasets.file_matching import FoundCases, align_mask, walk_files
from trueup.data.pictures import AS_STORED, BrokenImageError, Reading, decode, read_picture
from trueup.data.scanning import FolderScan
from trueup.data.slices import Mask, Volume, network_box, window_to_uint8
from trueup.data.volumes import SUFFIXES as VOLUMES
from trueup.data.volumes import Grid, is_volume, read_volume

LOSSY = (".jpg", ".jpeg")
IMAGES = (".png", ".bmp", ".tif", ".tiff", *LOSSY, *VOLUMES)
MASKS = (".png", ".bmp", ".tif", ".tiff", *VOLUMES)
ENDINGS = ("_mask", "_seg", "_gt", "_segmentation")  # suffixes of a mask's name after that of its image
DATA = (".raw", ".zraw", ".raw.gz")  # voxels of a volume with a separate header
MOST = 255  # classes

Pairs = dict[str, tuple[Path, Path]]  # image and mask, by name


def scan_mask_folder(root: Path, reading: Reading = AS_STORED) -> tuple[tuple[str, ...], dict[str, FoundCases]]:
    """Return the classes, and each domain's images with masks, all in one part: "train".

    Only names are read, unless there is no classes.txt: then all masks are read once to find the classes.
    """
    places = _domains(root)
    domains = {name: FoundCases() for name in places}
    pairs = {name: _pair(root, *places[name], domains[name]) for name in places}
    for name, found in domains.items():
        if not pairs[name]:
            raise ValueError(f"no image of {name} has a mask; {found.missing[0] if found.missing else 'it is empty'}")
    named = root / "classes.txt"
    classes = _named(named) if named.is_file() else _counted(m for both in pairs.values() for _, m in both.values())
    for name, found in domains.items():
        found.parts["train"] = [
            found.make_case(stem, partial(_read, classes=len(classes), reading=reading), image, mask)
            for stem, (image, mask) in pairs[name].items()
        ]
    return classes, domains


def _domains(root: Path) -> dict[str, tuple[Path, Path]]:
    """Return the folders of images and of masks of each domain."""
    inside = _folders(root)
    if here := _place(root):
        places = {root.resolve().name: here}
    else:
        places = {folder.name: place for folder in inside if (place := _place(folder))}
    if joined := [name for name in places if "+" in name]:
        raise ValueError(f"rename the folder {joined[0]!r}: a + in a target joins several domains")
    if not places:
        holds = ", ".join(folder.name for folder in inside[:8]) or "no folders"
        raise ValueError(f"{root} holds no images and masks, nor folders with images and masks; it holds: {holds}")
    return places


def _place(folder: Path) -> tuple[Path, Path] | None:
    """Return the folders images and masks in a folder, or None if it has neither."""
    inside = {inner.name.lower(): inner for inner in _folders(folder)}
    here = [inside[name] for name in ("images", "masks") if name in inside]
    if len(here) == 1:
        raise ValueError(f"{folder} has only the folder {here[0].name}; it needs both images and masks")
    return (here[0], here[1]) if here else None


def _folders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in FolderScan(folder).list_folder(folder)[0]]


def _pair(root: Path, images: Path, masks: Path, found: FoundCases) -> Pairs:
    """Pair images with masks by name; add files without a partner to `found`."""
    pictures = _by_name(root, images, IMAGES, found)
    drawn: dict[str, list[Path]] = {}
    for name, file in _by_name(root, masks, MASKS, found).items():
        plain = (name.removesuffix(ending) for ending in ("", *ENDINGS))
        if (image := next((n for n in plain if n in pictures), None)) is None:
            found.missing.append(f"{file.relative_to(root).as_posix()} has no image")
        else:
            drawn.setdefault(image, []).append(file)
    if twice := next((files for files in drawn.values() if len(files) > 1), None):
        raise ValueError(f"{twice[0].name} and {twice[1].name} in {masks} are masks of the same image; keep one")
    lonely = [file for name, file in pictures.items() if name not in drawn]
    found.missing += [f"{file.relative_to(root).as_posix()} has no mask" for file in lonely]
    return {name: (file, drawn[name][0]) for name, file in pictures.items() if name in drawn}


def _by_name(root: Path, folder: Path, suffixes: tuple[str, ...], found: FoundCases) -> dict[str, Path]:
    """Return the files of a folder by name without suffix."""
    files: dict[str, Path] = {}
    for file in walk_files(folder):
        path = file.relative_to(folder).as_posix()
        suffix = next((s for s in suffixes if path.lower().endswith(s)), "")
        name = path[: len(path) - len(suffix)]
        if suffix and name in files:
            raise ValueError(f"{files[name].name} and {file.name} in {folder} have the same name; rename one")
        if suffix:
            files[name] = file
        elif file.suffix.lower() in LOSSY:
            found.missing.append(f"{file.relative_to(root).as_posix()}: JPEG alters class numbers; save masks as PNG")
        elif not path.lower().endswith(DATA):
            found.others.append(file.relative_to(root).as_posix())
    return files


def _named(file: Path) -> tuple[str, ...]:
    """Read the class names from a file."""
    names = tuple(line.strip() for line in file.read_text(encoding="utf-8-sig").rstrip().splitlines())
    if len(set(names)) < len(names) or "" in names or not 2 <= len(names) <= MOST:
        raise ValueError(f"{file} names {', '.join(names) or 'nothing'}: give 2 to {MOST} distinct names, one per line")
    return names


def _counted(masks: Iterable[Path]) -> tuple[str, ...]:
    """Return the classes that occur in masks: 0 to the highest number, without gaps."""
    values = {mask: _held(_numbers(mask)) for mask in masks}
    every = {0.0}.union(*values.values())
    if every == {0}:
        raise ValueError("all masks are 0 everywhere; they hold the class number of each pixel")
    if every <= {0, 1, 255} and not any({1, 255} <= held for held in values.values()):
        return "background", "class 1"
    gap = next(n for n in range(len(every) + 1) if n not in every)
    if strange := next((mask for mask, held in values.items() if not held <= set(range(gap))), None):
        why = f"classes are 0, 1, 2 and so on, but no mask holds {gap}; name unused classes in classes.txt"
        raise _strange(strange, values[strange], why)
    if gap > MOST:
        raise ValueError(f"the masks hold {gap} classes; at most {MOST} are allowed")
    return "background", *(f"class {n}" for n in range(1, gap))


def _read(image: Path, mask: Path, classes: int, reading: Reading) -> Volume:
    """Read an image with its mask; networks see the slice padded to a square, unless `reading` says otherwise."""
    pixels, spacing, grid = read_image(image, reading)
    answer = _mask(mask, classes, grid)
    if answer.shape != pixels.shape[:3]:
        seen, drawn = ("×".join(str(n) for n in shape) for shape in (pixels.shape[:3], answer.shape))
        raise BrokenImageError(f"{mask.name}: the mask is {drawn} (slices, rows, columns), its image {seen}")
    height, width = answer.shape[1:]
    return Volume(pixels, answer, spacing, network_box(height, width, spacing, reading.resize))


def read_image(
    path: Path, reading: Reading = AS_STORED
) -> tuple[NDArray[np.uint8], tuple[float, float, float], Grid | None]:
    """Return (Z, H, W, 1 or 3), spacing and grid of a volume or picture.

    Grey values of volumes are windowed; those of pictures of more than 8 bits, too, unless their range is given.
    """
    if is_volume(path):
        volume = read_volume(path)
        return window_to_uint8(volume.values)[..., None], volume.spacing, volume.grid
    picture = read_picture(path)
    if picture.mode == "L":
        image = picture.values[None, :, :, None]
    elif picture.deep and picture.values.ndim == 2:
        grey = window_to_uint8(picture.values) if reading.range is None else picture.to_uint8(reading.range)
        image = grey[None, :, :, None]
    else:
        image = decode(path, reading=Reading(reading.range))[None]
    return image, (1.0, 1.0, 1.0), None


def _mask(path: Path, classes: int, grid: Grid | None) -> Mask:
    """Read a mask as (Z, H, W) class numbers below `classes`."""
    numbers = _numbers(path, grid)
    held = _held(numbers)
    if classes == 2 and held <= {0, 255}:
        return np.asarray(numbers != 0, dtype=np.uint8)
    if not held <= set(range(classes)):
        raise _strange(path, held, f"there are {classes} classes, 0 to {classes - 1}")
    return numbers.astype(np.uint8)


def _held(numbers: NDArray[Any]) -> set[float]:
    return set(np.unique(numbers).tolist())


def _numbers(path: Path, grid: Grid | None = None) -> NDArray[Any]:
    """Read the stored values of a mask as (Z, H, W); palette indices, not colours."""
    if is_volume(path):
        volume = read_volume(path)
        values = volume.values if grid is None else align_mask(volume, grid, path.name)
        near = np.round(values)
        return near if np.all(np.abs(values - near) < 1e-3) else values  # scaled masks hold 0.99999
    picture = read_picture(path)
    pixels = picture.values
    if pixels.ndim == 3:
        grey = pixels[:, :, : 1 if picture.mode in ("LA", "La", "PA") else 3]
        if np.any(grey != grey[:, :, :1]):
            raise BrokenImageError(f"{path.name}: is coloured; a mask must hold class numbers, in grey or a palette")
        pixels = grey[:, :, 0]
    return pixels[None]


def _strange(path: Path, held: Iterable[float], why: str) -> BrokenImageError:
    values = sorted(held)
    listed = ", ".join(f"{v:g}" for v in values[:8]) + (", ..." if len(values) > 8 else "")
    return BrokenImageError(f"{path.name}: the mask holds {listed}; {why}")
