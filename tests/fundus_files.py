"""Small fundus photographs and masks in the published layouts."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trueup.data.datasets.file_matching import FoundCases
from trueup.data.slices import Volume

Pixels = NDArray[np.uint8]
HEIGHT, WIDTH = 257, 250  # an eighth of REFUGE's height, so that its square of 800 pixels is one of 100


def where(height: int = HEIGHT, width: int = WIDTH) -> Pixels:
    """A picture whose pixels say where they are: row, column, and 7 in the third channel."""
    rows, columns = np.indices((height, width))
    return np.stack([rows % 256, columns % 256, np.full_like(rows, 7)], axis=2).astype(np.uint8)


def blank(value: int, height: int = HEIGHT, width: int = WIDTH) -> Pixels:
    return np.full((height, width), value, dtype=np.uint8)


def square(pixels: Pixels, top: int, left: int, side: int, value: int) -> Pixels:
    pixels[top : top + side, left : left + side] = value
    return pixels


def levels(top: int = 120, left: int = 130, disc: int = 20, cup: int = 8) -> Pixels:
    """A mask as in REFUGE: a square disc with a square cup in its upper left corner."""
    return square(square(blank(255), top, left, disc, 128), top, left, cup, 0)


def save(path: Path, pixels: Pixels, mode: str | None = None) -> None:
    """Without loss, whatever the name says: decoders look at the content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(path, format="BMP" if path.suffix == ".bmp" else "PNG")


def touch(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def names(found: FoundCases) -> dict[str, list[str]]:
    return {part: [case.name for case in cases] for part, cases in found.parts.items()}


def only(found: FoundCases) -> Volume:
    (case,) = found.cases
    assert case.slices == 1
    return case.read()


def refuge(root: Path, image: Pixels | None = None, mask: Pixels | None = None, mode: str | None = None) -> Path:
    save(root / "Training400/Glaucoma/g0001.jpg", where() if image is None else image)
    save(
        root / "Annotation-Training400/Disc_Cup_Masks/Glaucoma/g0001.bmp", levels() if mask is None else mask, mode=mode
    )
    return root


def drishti(root: Path, disc: Pixels, cup: Pixels, part: str = "Training", gt: str = "GT") -> Path:
    folder = root / "Drishti-GS1_files" / part
    save(folder / "Images/drishtiGS_002.png", where())
    for what, pixels in (("OD", disc), ("cup", cup)):
        save(folder / gt / "drishtiGS_002/SoftMap" / f"drishtiGS_002_{what}segSoftmap.png", pixels)
    return root


def rim_one(root: Path, stem: str = "N-5-L", folder: str = "Average_masks", form: str = "{}-{}-Avg.png") -> Path:
    """A stereo pair: left halves have the disc at row 120, column 60, right halves elsewhere; each half 150 wide."""
    save(root / "Healthy/Stereo Images" / f"{stem}.jpg", where(HEIGHT, 300))
    for what, side in (("Disc", 20), ("Cup", 8)):
        pixels = square(square(blank(0, HEIGHT, 300), 120, 60, side, 255), 30, 210, side + 10, 255)
        save(root / "Healthy" / folder / form.format(stem, what), pixels)
    return root
