"""Training augmentations; all random draws come from the given generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.data.pictures import Image, resize_pixels

Random = np.random.Generator


def shift_and_flip(image: Image, size: int, rng: Random) -> Image:
    """Pad by four pixels, crop at random, and flip half of the images: the standard for CIFAR."""
    padded = np.pad(resize_pixels(image, size), ((4, 4), (4, 4), (0, 0)))
    top, left = rng.integers(9, size=2)
    crop = padded[top : top + size, left : left + size]
    return np.ascontiguousarray(crop[:, ::-1] if rng.random() < 0.5 else crop)


def domainbed(image: Image, size: int, rng: Random) -> Image:
    """Augment as DomainBed does: crop of 70 to 100 %, flip, colour jitter of 0.3, grey one time in ten."""
    import torchvision.transforms.functional as F

    top, left, height, width = crop_box(image.shape[0], image.shape[1], rng)
    picture = F.resized_crop(F.to_pil_image(image), top, left, height, width, [size, size])
    if rng.random() < 0.5:
        picture = F.hflip(picture)
    factors = rng.uniform(0.7, 1.3, size=3)
    hue = rng.uniform(-0.3, 0.3)
    jitter: list[Callable[[Any], Any]] = [
        lambda p: F.adjust_brightness(p, factors[0]),
        lambda p: F.adjust_contrast(p, factors[1]),
        lambda p: F.adjust_saturation(p, factors[2]),
        lambda p: F.adjust_hue(p, hue),
    ]
    for which in rng.permutation(4):
        picture = jitter[which](picture)
    if rng.random() < 0.1:
        picture = F.rgb_to_grayscale(picture, num_output_channels=3)
    return np.asarray(picture)


def crop_box(height: int, width: int, rng: Random) -> tuple[int, int, int, int]:
    """Draw top, left, height and width of a crop: 70 to 100 % of the area, sides from 3:4 to 4:3."""
    for _ in range(10):
        area = height * width * rng.uniform(0.7, 1.0)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        h, w = round(np.sqrt(area / ratio)), round(np.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    # No such crop fits a very long image: take its middle, at the most extreme ratio allowed.
    h, w = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


TRANSFORMS: dict[str, Callable[[Image, int, Random], Image]] = {
    "none": lambda image, size, rng: resize_pixels(image, size),
    "shift": shift_and_flip,
    "domainbed": domainbed,
}


def augment_with_mask(image: Image, mask: NDArray[np.uint8], rng: Random) -> tuple[Image, NDArray[np.uint8]]:
    """Rotate (15°), scale (15 %) and shift (5 %) an image with its mask; jitter the image's brightness and contrast.

    No flips: the sides of a body differ.
    """
    from PIL import Image as Pillow

    height, width = mask.shape
    angle, scale = rng.uniform(-np.pi / 12, np.pi / 12), rng.uniform(0.85, 1.15)
    down, right = rng.uniform(-0.05, 0.05, size=2) * (height, width)
    cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
    x, y = width / 2, height / 2  # pixel centres lie at half-integers
    where = (cos, -sin, x - cos * (x + right) + sin * (y + down), sin, cos, y - sin * (x + right) - cos * (y + down))
    moved = Pillow.fromarray(image).transform(
        (width, height), Pillow.Transform.AFFINE, where, Pillow.Resampling.BILINEAR
    )
    turned = Pillow.fromarray(mask).transform(
        (width, height), Pillow.Transform.AFFINE, where, Pillow.Resampling.NEAREST
    )
    contrast, light = rng.uniform(0.8, 1.2), rng.uniform(-20, 20)
    changed = np.clip((np.asarray(moved).astype(np.float32) - 128) * contrast + 128 + light, 0, 255)
    return changed.astype(np.uint8), np.asarray(turned)
