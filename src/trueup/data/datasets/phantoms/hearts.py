"""Phantom short-axis stacks of the heart, base first and apex last, in two MRI sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from trueup.data.datasets.phantoms import painting
from trueup.data.datasets.phantoms.painting import Array, PixelGrid, Point, Random, Scanner, cover, paint
from trueup.data.slices import Mask, Volume

SIZE, SLICES = 96, 8
SPACING = (8.0, 1.8, 1.8)
# Tissues: blood, muscle, scar, fat, liver, lung.
SEQUENCES = {
    "cine": Scanner((0.85, 0.30, 0.30, 0.75, 0.38, 0.05), spread=0.05, bias=0.08, blur=0.5, noise=0.02),
    "lge": Scanner((0.50, 0.10, 0.85, 0.60, 0.30, 0.07), spread=0.14, bias=0.32, blur=0.8, noise=0.065),
}


@dataclass(frozen=True)
class Heart:
    """The anatomy of a heart: signed distances to outlines, positive inside, (8, 96, 96)."""

    left: Array  # the cavity of the left ventricle
    outer: Array  # the left ventricle with its wall
    right: Array  # the cavity of the right ventricle, which ends before the last slice
    muscles: Array  # the share of papillary muscle in each pixel; labels count it as cavity
    scar: Array  # the share of scar in each pixel
    organs: dict[str, Array]

    @property
    def mask(self) -> Mask:
        """Return 0 background, 1 right ventricle, 2 myocardium, 3 left ventricle."""
        mask = (self.right > 0).astype(np.uint8)
        mask[self.outer > 0] = 2
        mask[self.left > 0] = 3
        return mask


def make_heart(rng: Random) -> Heart:
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
    right = _right(rng, at, z, centre, thick, outer)
    muscles = _papillary(rng, at, z, centre, cavity)
    scar = _scar(rng, at, z, centre, left, outer)
    return Heart(left, outer, right, muscles, scar, _organs(rng, at, z, centre))


def _right(rng: Random, at: PixelGrid, z: Array, centre: Point, thick: Array, outer: Array) -> Array:
    """Draw the right ventricle: a crescent at the septum, on the upper left of the image."""
    angle = np.pi + rng.uniform(-0.1, 0.6)
    size = np.sqrt(np.clip(1 - (z / rng.uniform(0.93, 1.1)) ** 2, 0.02, 1))
    away = thick * (0.75 + 0.3 * size)
    middle = centre[0] + away * np.sin(angle), centre[1] + away * np.cos(angle)
    radii = thick[0] * size * rng.uniform(1.05, 1.3), thick[0] * size * rng.uniform(0.75, 0.95)
    right = np.minimum(painting.ellipse(at, middle, radii, angle, painting.ripples(rng, 0.05)), -outer)
    right[-1] = -painting.FAR
    return right


def _papillary(rng: Random, at: PixelGrid, z: Array, centre: Point, cavity: Array) -> Array:
    """Draw the two papillary muscles in the cavity, largest halfway down."""
    amount = np.zeros((SLICES, SIZE, SIZE))
    for angle in (rng.uniform(-0.3, 0.4), rng.uniform(1.3, 2.0)):
        away = rng.uniform(0.5, 0.68) * cavity
        middle = centre[0] + away * np.sin(angle), centre[1] + away * np.cos(angle)
        radius = cavity * rng.uniform(0.16, 0.25) * np.exp(-(((z - 0.5) / 0.4) ** 2)) + 0.1
        radii = radius * rng.uniform(0.8, 1.3), radius
        amount = np.maximum(amount, cover(painting.ellipse(at, middle, radii, angle), 1.5))
    return amount


def _scar(rng: Random, at: PixelGrid, z: Array, centre: Point, left: Array, outer: Array) -> Array:
    """Draw a scar, a wedge of the wall from the cavity outwards, in four of five patients."""
    middle, half, deep = rng.uniform(-np.pi, np.pi), rng.uniform(0.3, 0.9), rng.uniform(0.4, 1.1)
    level, tall, present = rng.uniform(0.2, 0.9), rng.uniform(0.15, 0.4), rng.random() < 0.8
    angle = np.arctan2(at[0] - centre[0], at[1] - centre[1])
    off = np.abs((angle - middle + np.pi) % (2 * np.pi) - np.pi)
    wedge = np.clip((half - off) / 0.15 + 0.5, 0, 1) * np.clip((tall - np.abs(z - level)) / 0.1 + 0.5, 0, 1)
    depth = -left / np.maximum(outer - left, 1)
    wall = cover(outer) * (1 - cover(left))
    return np.asarray(present * wedge * np.clip((deep - depth) / 0.2 + 0.5, 0, 1) * wall)


def _organs(rng: Random, at: PixelGrid, z: Array, centre: Point) -> dict[str, Array]:
    """Draw the organs around the heart: liver and stomach rise towards the apex, the right atrium is at the base."""
    organ = partial(painting.organ, rng, at, move=3, wobble=0.05)
    rise, size = rng.uniform(8, 16, size=2), np.clip(1 - rng.uniform(2, 4) * z, 0.01, 1)
    return {
        "chest": organ(66, 55, rng.uniform(52, 57), rng.uniform(52, 60), 0.15),
        "liver": organ(96 - rise[0] * z, 16, 20 + 6 * z, 32 + 8 * z, 0.2),
        "stomach": organ(102 - rise[1] * z, 78, 20 + 6 * z, 24 + 5 * z, -0.2),
        "aorta": organ(82, 64, 6.0, 6.0),
        "spine": organ(98, 46, 12, 11),
        "atrium": organ(centre[0] + 13, centre[1] - 25, 14 * size, 11 * size),
    }


def scan_heart(heart: Heart, domain: str, rng: Random) -> Volume:
    """Scan a heart with the sequence of a domain."""
    how = SEQUENCES[domain]
    signal = _signal(heart, how, rng)
    return how.scan(rng, signal * painting.bias_field(rng, signal.shape, how.bias), heart.mask, SPACING)


def _signal(heart: Heart, how: Scanner, rng: Random) -> Array:
    """Return the signal of each tissue, (8, 96, 96)."""
    blood, muscle, scar, fat, liver, lung = how.draw_tissues(rng)
    shape = heart.left.shape
    slow, clouds, fine = (painting.smooth_noise(rng, shape, (n, m, m)) for n, m in ((3, 6), (4, 12), (8, 34)))
    image = np.full(shape, lung)
    paint(image, cover(fine - 2.2), 0.6 * blood)  # vessels of the lung
    organs = heart.organs
    paint(image, cover(organs["liver"], 1.5), liver * (1 + 0.08 * clouds))
    paint(image, cover(organs["stomach"], 1.5), 0.8 * liver * (1 + 0.3 * clouds))
    paint(image, cover(organs["spine"], 1.5), 1.2 * liver * (1 + 0.15 * clouds))
    for vessel in (organs["aorta"], organs["atrium"]):
        paint(image, cover(vessel + 1.5, 1.2), muscle)
        paint(image, cover(vessel, 1.2), blood * (0.95 + 0.05 * clouds))
    paint(image, cover(-organs["chest"], 1.5), muscle * (1 + 0.2 * clouds))
    paint(image, cover(-organs["chest"] - 5 - 2 * clouds, 1.5), fat * (1 + 0.06 * clouds))
    paint(image, cover(-organs["chest"] - 13, 1.5), 0.02)
    whole_heart = np.maximum(heart.outer, heart.right + 2)
    paint(image, cover(whole_heart + 2 + 3 * clouds, 2), fat * (0.85 + 0.2 * slow + 0.06 * fine))
    paint(image, cover(heart.right + 1.8, 1.2), muscle)
    paint(image, cover(heart.right, 1.2), 0.94 * blood * (1 + 0.05 * clouds + 0.07 * fine))
    paint(image, cover(heart.outer, 1.2), muscle * (1 + 0.06 * clouds + 0.06 * fine))
    paint(image, heart.scar, scar)
    paint(image, cover(heart.left, 1.2), blood * (1 + 0.05 * clouds + 0.03 * fine))
    paint(image, 0.85 * heart.muscles * cover(heart.left, 1.2), muscle)
    return image
