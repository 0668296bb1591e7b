"""Phantom short-axis stacks of the heart, base first and apex last, in two MRI sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trueup.data.datasets.phantoms import painting
from trueup.data.datasets.phantoms.painting import Array, PerSlice, PixelGrid
from trueup.data.slices import Volume, full_box, window_to_uint8

SIZE, SLICES = 96, 8
SPACING = (8.0, 1.8, 1.8)


@dataclass(frozen=True)
class Heart:
    """The anatomy of a heart: signed distances to outlines, positive inside, (8, 96, 96)."""

    left: Array
    """The cavity of the left ventricle."""
    outer: Array
    """The left ventricle with its wall."""
    right: Array
    """The cavity of the right ventricle, which ends before the last slice."""
    muscles: Array
    """The share of papillary muscle in each pixel; labels count it as cavity."""
    scar: Array
    """The share of scar in each pixel."""
    organs: dict[str, Array]

    @property
    def mask(self) -> NDArray[np.uint8]:
        """Return 0 background, 1 right ventricle, 2 myocardium, 3 left ventricle."""
        mask = (self.right > 0).astype(np.uint8)
        mask[self.outer > 0] = 2
        mask[self.left > 0] = 3
        return mask


@dataclass(frozen=True)
class MriSequence:
    """The brightness of tissues, and the scanner's effects."""

    blood: float
    muscle: float
    scar: float
    fat: float
    liver: float
    lung: float
    spread: float
    """The relative spread of brightness between patients."""
    bias: float
    blur: float
    noise: float


SEQUENCES = {
    "cine": MriSequence(
        blood=0.85,
        muscle=0.30,
        scar=0.30,
        fat=0.75,
        liver=0.38,
        lung=0.05,
        spread=0.05,
        bias=0.08,
        blur=0.5,
        noise=0.02,
    ),
    "lge": MriSequence(
        blood=0.50,
        muscle=0.10,
        scar=0.85,
        fat=0.60,
        liver=0.30,
        lung=0.07,
        spread=0.14,
        bias=0.32,
        blur=0.8,
        noise=0.065,
    ),
}


def make_heart(rng: np.random.Generator) -> Heart:
    """Draw a heart at a random phase of the beat, and its neighbours."""
    at = painting.pixel_grid(SIZE)
    z = np.linspace(0, 1, SLICES)[:, None, None]
    emptied = rng.uniform(0, 1)
    taper = np.sqrt(1 - (rng.uniform(0.88, 0.94) * z) ** 2)
    cavity = (rng.uniform(13.5, 17.5) - 5 * emptied) * taper
    thick = cavity + (rng.uniform(3.8, 5.2) + 1.8 * emptied) * (1 - 0.2 * z)
    centre = 50 + rng.uniform(-4, 4) + rng.uniform(-4, 5) * z, 54 + rng.uniform(-4, 4) + rng.uniform(-2, 6) * z
    turn, flat = rng.uniform(-0.6, 0.6), rng.uniform(0.92, 1.0)
    wobble = painting.ripples(rng, 0.03)
    left = painting.ellipse(at, centre, (cavity, flat * cavity), turn, wobble)
    uneven = wobble + painting.ripples(rng, 0.025)
    outer = np.maximum(painting.ellipse(at, centre, (thick, flat * thick), turn, uneven), left + 2)
    return Heart(
        left,
        outer,
        _right(rng, at, z, centre, thick, outer),
        _papillary(rng, at, z, centre, cavity),
        _scar(rng, at, z, centre, left, outer),
        _organs(rng, at, z, centre),
    )


def _right(
    rng: np.random.Generator, at: PixelGrid, z: Array, centre: tuple[PerSlice, PerSlice], thick: Array, outer: Array
) -> Array:
    """Draw the right ventricle: a crescent at the septum, on the upper left of the image."""
    angle = np.pi + rng.uniform(-0.1, 0.6)
    size = np.sqrt(np.clip(1 - (z / rng.uniform(0.93, 1.1)) ** 2, 0.02, 1))
    away = thick * (0.75 + 0.3 * size)
    middle = centre[0] + away * np.sin(angle), centre[1] + away * np.cos(angle)
    radii = thick[0] * size * rng.uniform(1.05, 1.3), thick[0] * size * rng.uniform(0.75, 0.95)
    free = painting.ellipse(at, middle, radii, angle, painting.ripples(rng, 0.05))
    right = np.minimum(free, -outer)
    right[-1] = -painting.FAR
    return right


def _papillary(
    rng: np.random.Generator, at: PixelGrid, z: Array, centre: tuple[PerSlice, PerSlice], cavity: Array
) -> Array:
    """Draw the two papillary muscles in the cavity, largest halfway down."""
    amount = np.zeros((SLICES, SIZE, SIZE))
    for angle in (rng.uniform(-0.3, 0.4), rng.uniform(1.3, 2.0)):
        away = rng.uniform(0.5, 0.68) * cavity
        middle = centre[0] + away * np.sin(angle), centre[1] + away * np.cos(angle)
        radius = cavity * rng.uniform(0.16, 0.25) * np.exp(-(((z - 0.5) / 0.4) ** 2)) + 0.1
        radii = radius * rng.uniform(0.8, 1.3), radius
        amount = np.maximum(amount, painting.cover(painting.ellipse(at, middle, radii, angle), 1.5))
    return amount


def _scar(
    rng: np.random.Generator, at: PixelGrid, z: Array, centre: tuple[PerSlice, PerSlice], left: Array, outer: Array
) -> Array:
    """Draw a scar, a wedge of the wall from the cavity outwards, in four of five patients."""
    middle, half, deep = rng.uniform(-np.pi, np.pi), rng.uniform(0.3, 0.9), rng.uniform(0.4, 1.1)
    level, tall, present = rng.uniform(0.2, 0.9), rng.uniform(0.15, 0.4), rng.random() < 0.8
    angle = np.arctan2(at[0] - centre[0], at[1] - centre[1])
    off = np.abs((angle - middle + np.pi) % (2 * np.pi) - np.pi)
    wedge = np.clip((half - off) / 0.15 + 0.5, 0, 1) * np.clip((tall - np.abs(z - level)) / 0.1 + 0.5, 0, 1)
    depth = -left / np.maximum(outer - left, 1)
    wall = painting.cover(outer) * (1 - painting.cover(left))
    return np.asarray(present * wedge * np.clip((deep - depth) / 0.2 + 0.5, 0, 1) * wall)


def _organs(rng: np.random.Generator, at: PixelGrid, z: Array, centre: tuple[PerSlice, PerSlice]) -> dict[str, Array]:
    """Draw the organs around the heart: liver and stomach rise towards the apex, the right atrium is at the base."""

    def organ(down: PerSlice, across: PerSlice, tall: PerSlice, wide: PerSlice, turn: float = 0.0) -> Array:
        move = rng.uniform(-3, 3, size=2)
        return painting.ellipse(at, (down + move[0], across + move[1]), (tall, wide), turn, painting.ripples(rng, 0.05))

    rise, size = rng.uniform(8, 16, size=2), np.clip(1 - rng.uniform(2, 4) * z, 0.01, 1)
    return {
        "chest": organ(66, 55, rng.uniform(52, 57), rng.uniform(52, 60), 0.15),
        "liver": organ(96 - rise[0] * z, 16, 20 + 6 * z, 32 + 8 * z, 0.2),
        "stomach": organ(102 - rise[1] * z, 78, 20 + 6 * z, 24 + 5 * z, -0.2),
        "aorta": organ(82, 64, 6.0, 6.0),
        "spine": organ(98, 46, 12, 11),
        "atrium": organ(centre[0] + 13, centre[1] - 25, 14 * size, 11 * size),
    }


def scan_heart(heart: Heart, domain: str, rng: np.random.Generator) -> Volume:
    """Scan a heart with the sequence of a domain."""
    how = SEQUENCES[domain]
    image = _signal(heart, how, rng)
    image = painting.blur(image * painting.bias_field(rng, image.shape, how.bias), how.blur * rng.uniform(0.8, 1.2))
    image = painting.rician(rng, image, how.noise * rng.uniform(0.7, 1.3))
    return Volume(window_to_uint8(image)[..., None], heart.mask, SPACING, full_box(SIZE, SIZE))


def _signal(heart: Heart, how: MriSequence, rng: np.random.Generator) -> Array:
    """Return the signal of each tissue, (8, 96, 96)."""
    blood, muscle, scar, fat, liver, lung = (
        value * (1 + how.spread * rng.normal())
        for value in (how.blood, how.muscle, how.scar, how.fat, how.liver, how.lung)
    )
    shape = heart.left.shape
    slow, clouds, fine = (painting.smooth_noise(rng, shape, (n, m, m)) for n, m in ((3, 6), (4, 12), (8, 34)))
    image = np.full(shape, lung)
    painting.paint(image, painting.cover(fine - 2.2), 0.6 * blood)  # vessels of the lung
    _surround(image, heart.organs, (blood, muscle, fat, liver), clouds)
    whole_heart = np.maximum(heart.outer, heart.right + 2)
    painting.paint(image, painting.cover(whole_heart + 2 + 3 * clouds, 2), fat * (0.85 + 0.2 * slow + 0.06 * fine))
    painting.paint(image, painting.cover(heart.right + 1.8, 1.2), muscle)
    painting.paint(image, painting.cover(heart.right, 1.2), 0.94 * blood * (1 + 0.05 * clouds + 0.07 * fine))
    painting.paint(image, painting.cover(heart.outer, 1.2), muscle * (1 + 0.06 * clouds + 0.06 * fine))
    painting.paint(image, heart.scar, scar)
    painting.paint(image, painting.cover(heart.left, 1.2), blood * (1 + 0.05 * clouds + 0.03 * fine))
    painting.paint(image, 0.85 * heart.muscles * painting.cover(heart.left, 1.2), muscle)
    return image


def _surround(image: Array, organs: dict[str, Array], tissue: tuple[float, float, float, float], clouds: Array) -> None:
    """Paint chest wall, liver, stomach, spine and aorta over the lungs."""
    blood, muscle, fat, liver = tissue
    painting.paint(image, painting.cover(organs["liver"], 1.5), liver * (1 + 0.08 * clouds))
    painting.paint(image, painting.cover(organs["stomach"], 1.5), 0.8 * liver * (1 + 0.3 * clouds))
    painting.paint(image, painting.cover(organs["spine"], 1.5), 1.2 * liver * (1 + 0.15 * clouds))
    for vessel in (organs["aorta"], organs["atrium"]):
        painting.paint(image, painting.cover(vessel + 1.5, 1.2), muscle)
        painting.paint(image, painting.cover(vessel, 1.2), blood * (0.95 + 0.05 * clouds))
    painting.paint(image, painting.cover(-organs["chest"], 1.5), muscle * (1 + 0.2 * clouds))
    painting.paint(image, painting.cover(-organs["chest"] - 5 - 2 * clouds, 1.5), fat * (1 + 0.06 * clouds))
    painting.paint(image, painting.cover(-organs["chest"] - 13, 1.5), 0.02)
