"""The embedded benchmark: ten digits in four styles, made in seconds from handwriting and fonts.

The handwriting is the test part of the UCI handwritten digits (1,797 images, 8×8) of scikit-learn; the fonts ship with
matplotlib. Nothing is downloaded. No digit is in two domains.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from trueup.data.domains import ArrayDomain, Labels

VERSION = "1"  # raise it with every change of the images, so that old records differ
SIZE = 32
DOMAINS = ("hand", "type", "poster", "neon")
IMAGES = 2000  # per domain
Masks = NDArray[np.float64]  # (N, 32, 32): amount of ink, from 0 to 1


@cache
def digits_domain(name: str) -> ArrayDomain:
    """Return one of the four domains; always the same images."""
    rng = np.random.default_rng([2023, DOMAINS.index(name)])
    if name == "type":
        masks, labels = _typed(rng)
    else:
        third = ("hand", "poster", "neon").index(name)
        masks, labels = _written(rng, slice(third, None, 3), IMAGES)
    return ArrayDomain(name, _to_uint8(STYLES[name](masks, rng)), labels)


@cache
def clean_digits(part: str) -> ArrayDomain:
    """Return plain handwriting for the corrupted benchmark: "train", or "test" with other digits."""
    rng = np.random.default_rng([2023, 10 + ("train", "test").index(part)])
    digits, images = (slice(0, 1200), 3000) if part == "train" else (slice(1200, None), 1000)
    masks, labels = _written(rng, digits, images)
    return ArrayDomain(f"clean-{part}", _to_uint8(poster(masks, rng)), labels)


def _written(rng: np.random.Generator, which: slice, count: int) -> tuple[Masks, Labels]:
    """Return handwritten digits, each slightly rotated, sheared and shifted."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(7).permutation(len(digits.target))[which]  # the set is sorted by writer
    labels = digits.target[order].astype(np.int64)
    pick = rng.permutation(np.resize(np.arange(len(labels)), count))
    small = digits.images[order][pick] / 16
    return np.stack([_place(image, rng) for image in small]), labels[pick]


def _place(image: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw an 8×8 image into 32×32 pixels under a small random affine map."""
    angle, shear, scale = rng.uniform(-0.2, 0.2), rng.uniform(-0.15, 0.15), rng.uniform(2.7, 3.4)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turn @ np.array([[1.0, shear], [0.0, 1.0]]) / scale
    middle, target = np.array([3.5, 3.5]), (SIZE - 1) / 2 + rng.uniform(-2, 2, size=2)
    drawn = ndimage.affine_transform(image, matrix, middle - matrix @ target, (SIZE, SIZE), order=3, prefilter=True)
    return np.asarray(np.clip(1.3 * drawn - 0.15, 0, 1))


def _typed(rng: np.random.Generator) -> tuple[Masks, Labels]:
    """Return digits in the upright and slanted faces of matplotlib's text fonts, in many sizes and positions."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    labels = rng.permutation(np.resize(np.arange(10), IMAGES)).astype(np.int64)
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"  # without symbol fonts and those without digits
    kinds = ("DejaVuSans", "DejaVuSerif", "STIXGeneral")
    faces = sorted(f for kind in kinds for f in fonts.glob(f"{kind}*.ttf") if "Display" not in f.name)
    masks = np.zeros((IMAGES, SIZE, SIZE))
    for mask, label in zip(masks, labels, strict=True):
        font = ImageFont.truetype(faces[rng.integers(len(faces))], int(rng.integers(44, 62)))
        canvas = Image.new("L", (2 * SIZE, 2 * SIZE))
        across, down = SIZE + rng.uniform(-5, 5, size=2)
        ImageDraw.Draw(canvas).text((across, down), str(label), fill=255, font=font, anchor="mm")
        canvas = canvas.rotate(float(rng.uniform(-12, 12)), Image.Resampling.BICUBIC)
        mask[:] = np.asarray(canvas.resize((SIZE, SIZE), Image.Resampling.BOX)) / 255
    return masks, labels


# Styles: masks and a generator to colour images (N, 32, 32, 3) with values from 0 to 1.


def hand(masks: Masks, rng: np.random.Generator) -> Masks:
    """Draw pencil on grainy grey paper."""
    paper = rng.uniform(0.5, 0.6, size=(len(masks), 1, 1))
    stroke = rng.uniform(0.2, 0.25, size=(len(masks), 1, 1)) * masks
    light = paper - stroke + rng.normal(0, 0.03, size=masks.shape)
    return np.repeat(light[..., None], 3, axis=3)


def printed(masks: Masks, rng: np.random.Generator) -> Masks:
    """Draw dark ink on warm paper with fibres."""
    paper = _colour(rng, len(masks), low=(0.80, 0.76, 0.66), high=(0.98, 0.95, 0.88))
    ink = _colour(rng, len(masks), low=(0.05, 0.05, 0.08), high=(0.22, 0.20, 0.30))
    fibres = ndimage.gaussian_filter(rng.normal(0, 0.15, size=masks.shape), sigma=(0, 0.5, 1.5))
    return np.asarray(_blend(paper, ink, masks) + fibres[..., None])


def poster(masks: Masks, rng: np.random.Generator) -> Masks:
    """Draw light paint on a wall of coloured patches."""
    patches = ndimage.gaussian_filter(rng.normal(size=(len(masks), SIZE, SIZE, 3)), sigma=(0, 5, 5, 0))
    patches = 0.45 + 0.13 * patches / patches.std(axis=(1, 2, 3), keepdims=True)
    paint = rng.uniform(0.35, 0.55, size=(len(masks), 1, 1, 3))
    return np.asarray(patches + paint * masks[..., None])


def neon(masks: Masks, rng: np.random.Generator) -> Masks:
    """Draw neon tubes: bright rims, glowing in one hue on a dark wall."""
    soft = ndimage.gaussian_filter(masks, sigma=(0, 0.6, 0.6))
    edge = np.hypot(ndimage.sobel(soft, axis=1), ndimage.sobel(soft, axis=2))
    edge = np.clip(edge / edge.max(axis=(1, 2), keepdims=True), 0, 1)
    glow = np.clip(0.5 * edge + 0.5 * masks + 0.4 * ndimage.gaussian_filter(edge, sigma=(0, 1.5, 1.5)), 0, 1)
    hue = _colour(rng, len(masks), low=(0.1, 0.1, 0.1), high=(1.0, 1.0, 1.0))
    hue /= hue.max(axis=3, keepdims=True)
    wall = _colour(rng, len(masks), low=(0.08, 0.02, 0.15), high=(0.2, 0.1, 0.3))
    return _blend(wall, hue, glow) + rng.normal(0, 0.04, size=(*masks.shape, 1))


STYLES = {"hand": hand, "type": printed, "poster": poster, "neon": neon}


def _colour(rng: np.random.Generator, n: int, low: tuple[float, ...], high: tuple[float, ...]) -> Masks:
    return rng.uniform(low, high, size=(n, 1, 1, 3))


def _blend(ground: Masks, ink: Masks, masks: Masks) -> Masks:
    return ground + (ink - ground) * masks[..., None]


def _to_uint8(images: Masks) -> NDArray[np.uint8]:
    result = np.clip(255 * images + 0.5, 0, 255).astype(np.uint8)
    result.setflags(write=False)  # cached and returned again
    return result
