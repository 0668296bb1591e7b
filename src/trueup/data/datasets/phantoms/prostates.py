"""Phantom axial stacks of the prostate, apex first and bladder last, with a body or an endorectal coil."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from trueup.data.datasets.phantoms import painting
from trueup.data.datasets.phantoms.painting import Array, PerSlice, PixelGrid, Point, Random, Scanner, cover, paint
from trueup.data.slices import Volume

SIZE, SLICES = 96, 8
SPACING = (3.5, 1.2, 1.2)
# Tissues: central gland, peripheral zone, muscle, fat, urine, bone.
SETUPS = {
    "body-coil": Scanner((0.42, 0.72, 0.17, 0.58, 0.95, 0.36), spread=0.06, bias=0.08, blur=0.6, noise=0.025),
    "endorectal": Scanner((0.34, 0.56, 0.22, 0.46, 0.75, 0.30), spread=0.10, bias=0.12, blur=0.9, noise=0.09, coil=4.5),
}


@dataclass(frozen=True)
class Pelvis:
    """The anatomy of a pelvis: signed distances to outlines, positive inside, (8, 96, 96)."""

    gland: Array
    central: Array  # the inner part of the gland; the rest is the peripheral zone
    stroma: Array  # the fibrous front of the gland
    rectum: Array
    bladder: Array
    vesicles: Array
    muscles: Array
    bones: Array
    coil: Point  # the middle of the rectum in each slice
    filled: float  # the content of the rectum, from 0 (gas) to 1 (stool)


def make_pelvis(rng: Random, *, coil: bool) -> Pelvis:
    """Draw a prostate and its neighbours. An endorectal coil fills the rectum and flattens the gland."""
    at = painting.pixel_grid(SIZE)
    z = np.linspace(-1, 1, SLICES)[:, None, None]
    # The gland ends near the first and the last slice, rarely beyond.
    size = np.sqrt(np.clip(1 - ((z - rng.uniform(-0.03, 0.03)) / rng.uniform(0.92, 1.01)) ** 2, 1e-4, 1))
    wide, tall = rng.uniform(18, 24), rng.uniform(14, 19)
    radius, flat = rng.uniform(6, 10), rng.uniform(0.65, 1.0)
    if coil:
        wide, tall, radius, flat = 1.08 * wide, 0.75 * tall, radius + 6, 0.6 + 0.4 * flat
    centre = (38 if coil else 43) + rng.uniform(-3, 3) + rng.uniform(-3, 1) * z, 48 + rng.uniform(-3, 3)
    turn, wobble = rng.uniform(-0.1, 0.1), painting.ripples(rng, 0.04)
    gland = painting.ellipse(at, centre, (tall * size, wide * size), turn, wobble)
    gland[size[:, 0, 0] < 0.15] = -painting.FAR
    dent = rng.uniform(3, 6) if coil else rng.uniform(-1, 3)
    behind = 40 + tall + 4 + flat * radius - dent + rng.uniform(0, 3) * z, 48 + rng.uniform(-3, 3)
    rectum = painting.ellipse(at, behind, (flat * radius, radius), turn, painting.ripples(rng, 0.04))
    gland = np.minimum(gland, -rectum - 3)
    bulk = rng.uniform(0.55, 0.8)  # the central gland grows with age
    inner = centre[0] - (0.95 - bulk) * tall * size, centre[1] + rng.uniform(-1, 1)
    radii = bulk * tall * size, bulk * wide * size * rng.uniform(1.0, 1.15)
    central = np.minimum(painting.ellipse(at, inner, radii, turn, painting.ripples(rng, 0.06)), gland)
    stroma = np.minimum(gland, centre[0] - rng.uniform(0.65, 0.8) * tall * size - at[0])
    around = _neighbours(rng, at, z, centre, wide)
    return Pelvis(gland, central, stroma, rectum, *around, behind, rng.uniform(0, 1))


def _neighbours(rng: Random, at: PixelGrid, z: Array, centre: Point, wide: float) -> tuple[Array, Array, Array, Array]:
    """Draw bladder, seminal vesicles, muscles and bones; all but the first on both sides."""
    organ = partial(painting.organ, rng, at, move=2, wobble=0.04)

    def pair(down: PerSlice, aside: PerSlice, tall: PerSlice, wide: PerSlice, turn: float) -> Array:
        return np.maximum(*(organ(down, centre[1] + side * aside, tall, wide, side * turn) for side in (-1, 1)))

    fill = np.sqrt(np.clip((z - rng.uniform(0.3, 0.6)) / 0.6, 1e-4, 2))
    top = np.clip((z - 0.45) / 0.3, 1e-3, 1)
    bladder = organ(centre[0] - 6 - 4 * z, centre[1], rng.uniform(11, 15) * fill, rng.uniform(17, 24) * fill)
    vesicles = pair(centre[0] + rng.uniform(10, 12), 9, 4 * top, 11 * top, 0.3)
    gap = rng.uniform(0, 2)
    muscles = pair(centre[0] + 10 + 2 * z, wide + gap + 2, 19 - 4 * z, 2.6, 0.25)  # the levators
    muscles = np.maximum(muscles, pair(42, wide + gap + rng.uniform(14, 17), 24, rng.uniform(7, 9), 0.2))
    muscles = np.maximum(muscles, pair(96 + 3 * z, 42, 16, 26, 0.5))  # the glutei
    bones = np.maximum(pair(36 - 4 * z, rng.uniform(50, 55), 17, 15, 0.2), pair(4 - 10 * z, 11, 5.5, 13, 0.5))
    return bladder, vesicles, muscles, np.maximum(bones, organ(98 - 3 * z, 48, 7, 9))


def scan_prostate(pelvis: Pelvis, domain: str, rng: Random) -> Volume:
    """Scan a prostate with the coil of a domain."""
    how, at = SETUPS[domain], painting.pixel_grid(SIZE)
    signal = _signal(pelvis, how, rng)
    far = np.hypot(at[0] - pelvis.coil[0] + 4, at[1] - pelvis.coil[1]) / rng.uniform(20, 26)
    light = painting.bias_field(rng, signal.shape, how.bias) * (1 + how.coil * rng.uniform(0.7, 1.3) / (1 + far**3))
    return how.scan(rng, signal * light, (pelvis.gland > 0).astype(np.uint8), SPACING)


def _signal(pelvis: Pelvis, how: Scanner, rng: Random) -> Array:
    """Return the signal of each tissue, (8, 96, 96)."""
    central, peripheral, muscle, fat, urine, bone = how.draw_tissues(rng)
    shape = pelvis.gland.shape
    clouds, fine, nodules = (painting.smooth_noise(rng, shape, (n, m, m)) for n, m in ((4, 10), (8, 34), (6, 18)))
    image = fat * (1 + 0.08 * clouds + 0.04 * fine)
    paint(image, 0.6 * cover(nodules - 1.9, 0.8), muscle)  # veins and strands in the fat
    paint(image, cover(pelvis.bones + 1.5, 1.2), 0.5 * muscle)
    paint(image, cover(pelvis.bones, 1.2), bone * (1 + 0.1 * clouds))
    paint(image, cover(pelvis.muscles, 1.2), muscle * (1 + 0.1 * clouds + 0.1 * fine))
    paint(image, cover(pelvis.vesicles, 1.5), urine * (0.8 + 0.15 * fine))
    paint(image, cover(pelvis.bladder + 2.5, 1.2), 1.3 * muscle)
    paint(image, cover(pelvis.bladder, 1.2), urine)
    paint(image, cover(pelvis.rectum + 2.8, 1.2), 1.5 * muscle * (1 + 0.1 * fine))
    stool = 0.0 if how.coil else pelvis.filled * fat * (0.6 + 0.25 * clouds)
    paint(image, cover(pelvis.rectum, 1.2), np.maximum(stool, 0.02))
    paint(image, cover(pelvis.gland + 0.9, 1.2), 1.2 * muscle)  # the capsule
    paint(image, cover(pelvis.gland, 1.2), peripheral * (1 + 0.08 * clouds + 0.06 * fine))
    paint(image, cover(pelvis.central + 0.8, 1.2), 0.6 * central)
    paint(image, cover(pelvis.central, 1.5), central * (1 + 0.22 * nodules + 0.08 * fine))
    paint(image, 0.9 * cover(pelvis.stroma, 3), 1.3 * muscle)
    return np.asarray(image)
