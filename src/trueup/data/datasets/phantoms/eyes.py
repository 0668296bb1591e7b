"""Phantom photographs of the optic disc: retina, rim, cup and vessels, by three cameras."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trueup.data.datasets.phantoms import painting
from trueup.data.datasets.phantoms.painting import Array, Curve, PixelGrid
from trueup.data.slices import Volume, full_box

SIZE = 128
Range = tuple[float, float]
Colour = tuple[float, float, float]  # red, green, blue


@dataclass(frozen=True)
class Eye:
    """The anatomy of an eye."""

    disc: Array  # (128, 128): signed distance to the outline, positive inside; cup, too
    cup: Array
    centre: tuple[float, float]
    radius: float
    temporal: int  # 1 if the temple is on the right of the image, -1 on the left
    vessels: list[Array]  # veins, arteries, and the light reflex along their middle
    crescent: float  # the amount of atrophy beside the disc


@dataclass(frozen=True)
class Camera:
    """The ranges of a camera's properties over its photographs."""

    colour: tuple[Colour, Colour] = ((0.96, 0.94, 0.9), (1.04, 1.06, 1.1))
    gamma: Range = (0.93, 1.07)
    contrast: Range = (0.95, 1.05)
    light: Range = (0.92, 1.05)
    tilt: Range = (0.0, 0.12)
    vignette: Range = (0.1, 0.2)
    blur: Range = (0.3, 0.6)
    noise: Range = (0.006, 0.014)
    haze: Range = (0.0, 0.02)
    glare: Range = (0.0, 0.0)


CAMERAS = {
    "clinic": Camera(),
    "screening": Camera(
        colour=((0.72, 0.92, 0.9), (0.92, 1.15, 1.6)),
        gamma=(0.65, 0.9),
        contrast=(0.5, 0.8),
        light=(0.8, 1.0),
        tilt=(0.05, 0.25),
        blur=(1.0, 1.8),
        noise=(0.018, 0.035),
        haze=(0.04, 0.14),
    ),
    "handheld": Camera(
        colour=((0.9, 0.72, 0.6), (1.1, 0.95, 1.1)),
        gamma=(0.95, 1.25),
        contrast=(0.75, 1.0),
        light=(0.55, 0.85),
        tilt=(0.25, 0.6),
        vignette=(0.25, 0.5),
        blur=(0.7, 1.5),
        noise=(0.015, 0.035),
        haze=(0.01, 0.05),
        glare=(0.1, 0.6),
    ),
}


def make_eye(rng: np.random.Generator) -> Eye:
    """Draw the anatomy of an eye."""
    at = painting.pixel_grid(SIZE)
    temporal = 1 if rng.random() < 0.5 else -1
    centre = SIZE / 2 + rng.uniform(-9, 9, size=2)
    wide = rng.uniform(23, 33)
    tall = wide * rng.uniform(1.0, 1.18)
    turn = rng.uniform(-0.3, 0.3)
    disc = painting.ellipse(at, (centre[0], centre[1]), (tall, wide), turn, painting.ripples(rng, 0.025))
    ratio = rng.uniform(0.3, 0.75)
    room = 1 - 1.1 * ratio
    middle = centre + room * wide * np.array([rng.uniform(-0.4, 0.4), temporal * rng.uniform(-0.2, 0.5)])
    radii = ratio * tall * rng.uniform(0.93, 1.07), ratio * wide * rng.uniform(0.93, 1.1)
    cup = painting.ellipse(at, (middle[0], middle[1]), radii, turn, painting.ripples(rng, 0.05))
    cup = np.minimum(cup, disc - 1.6)  # even the largest cup leaves some rim
    entry = middle - np.array([0.0, temporal * rng.uniform(0.1, 0.4) * radii[1]])
    veins, arteries = (_tree(rng, entry, wide, temporal, vein=vein) for vein in (True, False))
    reflex = [(points, 0.3 * widths) for points, widths in (*veins, *arteries) if widths.max() > 2]
    vessels = [painting.draw_curves(SIZE, curves) for curves in (veins, arteries, reflex)]
    return Eye(disc, cup, (centre[0], centre[1]), wide, temporal, vessels, max(0.0, rng.uniform(-0.8, 0.8)))


def _tree(rng: np.random.Generator, entry: Array, radius: float, temporal: int, *, vein: bool) -> list[Curve]:
    """Draw arteries or veins: two trunks up and two down, branches, and twigs towards the temple."""
    curves: list[Curve] = []
    for down in (-1, 1):
        start = entry + rng.normal(0, 0.1 * radius, size=2) - [0.15 * down * radius, 0]
        stem = start + radius * np.array([down * rng.uniform(0.5, 0.9), -temporal * rng.uniform(-0.1, 0.3)])
        for side in (temporal, -temporal):
            # The arcades bend around the macula; nasal vessels are straighter.
            angle = rng.uniform(0.55, 1.25) if side == temporal else rng.uniform(0.35, 1.15)
            end = start + 95 * np.array([down * np.sin(angle), side * np.cos(angle)])
            early = radius * np.array([down * rng.uniform(1.2, 1.9), side * rng.uniform(-0.1, 0.6)])
            width = radius / 28 * (rng.uniform(3.0, 4.6) if vein else rng.uniform(2.2, 3.3))
            trunk = _vessel(rng, np.stack([start, stem, start + early, end]), width, 0.55)
            curves += [trunk, *_branches(rng, trunk, radius)]
    for _ in range(int(rng.integers(1, 4))):
        start = entry + radius * rng.uniform((-0.35, 0.0), (0.35, 0.3)) * [1, temporal]
        steep = rng.uniform(-0.8, 0.8)
        way = np.array([[0.0, 0.0], [0.2 * steep, 0.6], [0.5 * steep, 1.3], [steep, rng.uniform(1.8, 2.6)]])
        curves.append(_vessel(rng, start + radius * way * [1, temporal], rng.uniform(0.8, 1.5), 0.3))
    return curves


def _vessel(rng: np.random.Generator, corners: Array, width: float, thin: float) -> Curve:
    """Draw a curve that winds a little and thins out to a fraction of its width."""
    points = painting.bezier(corners)
    t = np.linspace(0, 1, len(points))
    sway = rng.uniform(0.3, 1.6) * np.sin(rng.uniform(6, 14) * t + rng.uniform(0, 6)) * np.minimum(1, 3 * t)
    rise = np.minimum(1, 0.3 + 7 * t)  # it emerges from the cup or from another vessel
    return points + painting.normals(points) * sway[:, None], width * rise * (1 - (1 - thin) * t)


def _branches(rng: np.random.Generator, trunk: Curve, radius: float) -> list[Curve]:
    """Draw branches of a trunk, about half as wide."""
    points, widths = trunk
    curves: list[Curve] = []
    for _ in range(int(rng.integers(1, 4))):
        k = int(rng.integers(5, 14))
        along = points[k + 1] - points[k]
        angle = np.arctan2(along[0], along[1]) + rng.choice([-1, 1]) * rng.uniform(0.35, 0.8)
        bend, length = rng.normal(0, 0.3), radius * rng.uniform(0.9, 2.2)
        steps = np.array([0.0, 0.33, 0.66, 1.0])
        way = np.stack([np.sin(angle + bend * steps), np.cos(angle + bend * steps)], axis=1)
        corners = points[k] + length * steps[:, None] * way
        curves.append(_vessel(rng, corners, widths[k] * rng.uniform(0.4, 0.65), 0.35))
    return curves


def photograph_eye(eye: Eye, domain: str, rng: np.random.Generator) -> Volume:
    """Photograph an eye with the camera of a domain."""
    image = painting.to_uint8(_photograph(_scene(eye, rng), CAMERAS[domain], rng))
    mask = (eye.disc > 0).astype(np.uint8) + (eye.cup > 0).astype(np.uint8)
    return Volume(image[None], mask[None], (1.0, 1.0, 1.0), full_box(SIZE, SIZE))


def _scene(eye: Eye, rng: np.random.Generator) -> Array:
    """Return the colours of the eye in even light, (128, 128, 3)."""
    at = painting.pixel_grid(SIZE)
    pale = rng.uniform(0, 1)  # from a dark retina to a light one
    scene = np.empty((SIZE, SIZE, 3))
    scene[:] = np.array([0.62, 0.27, 0.11]) + pale * np.array([0.16, 0.13, 0.08])
    scene *= 1 + _texture(eye, at, rng)[..., None] * np.array([0.7, 1.0, 1.1])
    beside = painting.cover(eye.temporal * (at[1] - eye.centre[1]) - 0.4 * eye.radius, 0.8 * eye.radius)
    wasted = painting.cover(eye.disc + rng.uniform(2, 8), 3) * beside
    painting.paint(scene, eye.crescent * wasted, (0.80, 0.52, 0.30))
    _disc(scene, eye, at, rng)
    blood = np.array([0.44, 0.11, 0.07]) + rng.uniform(-0.03, 0.03)
    veins, arteries, reflex = eye.vessels
    painting.paint(scene, 0.78 * veins, blood)
    painting.paint(scene, 0.68 * arteries, blood * [1.3, 1.5, 1.5])
    scene += (rng.uniform(0.04, 0.12) * reflex)[..., None] * np.array([1.0, 0.8, 0.6])
    return scene


def _disc(scene: Array, eye: Eye, at: PixelGrid, rng: np.random.Generator) -> None:
    """Paint the rim, pink with nerve fibres, and the cup, pale with pores, with a gentle or steep slope."""
    down, across = at[0] - eye.centre[0], at[1] - eye.centre[1]
    # The nasal edge is blurrier, the temporal rim paler.
    aside = eye.temporal * np.clip(across / eye.radius, -1, 1)
    warm = rng.uniform(-1, 1)
    rim = rng.uniform(0.94, 1.06) * np.array([0.90, 0.58 + 0.05 * warm, 0.32 + 0.06 * warm])
    edge = painting.cover(eye.disc, 3 + rng.uniform(0, 2) - 1.2 * aside)
    painting.paint(scene, 0.92 * edge, rim)
    fibres = np.interp(np.arctan2(down, across), np.linspace(-np.pi, np.pi, 91), rng.normal(size=91))
    scene *= 1 + (edge * (0.03 * fibres + 0.05 * aside))[..., None] * np.array([0.4, 1.0, 1.2])
    cup = rng.uniform(0.96, 1.04) * np.array([0.97, 0.82 + 0.03 * warm, 0.60 + 0.06 * warm])
    slope = painting.cover(eye.cup, rng.uniform(3, 8))
    painting.paint(scene, rng.uniform(0.5, 0.9) * slope, cup)
    pores = painting.smooth_noise(rng, (SIZE, SIZE), (44, 44))
    scene *= 1 + (0.03 * slope * pores)[..., None]


def _texture(eye: Eye, at: PixelGrid, rng: np.random.Generator) -> Array:
    """Return patches of choroid, and nerve fibres that shine above and below the disc."""
    shape = (SIZE, SIZE)
    choroid = rng.uniform(0.02, 0.07) * painting.smooth_noise(rng, shape, (14, 14))
    grain = 0.02 * painting.smooth_noise(rng, shape, (50, 50))
    slow = 0.05 * painting.smooth_noise(rng, shape, (4, 4))
    down, across = at[0] - eye.centre[0], at[1] - eye.centre[1]
    far = np.hypot(down, across)
    angle = np.arctan2(down, across)
    streaks = np.interp(angle, np.linspace(-np.pi, np.pi, 181), rng.normal(size=181))
    poles = (down / (far + 1e-9)) ** 2 * np.exp(-0.5 * ((far - 1.3 * eye.radius) / (0.8 * eye.radius)) ** 2)
    return choroid + grain + slow + poles * (0.1 + 0.035 * streaks)


def _photograph(scene: Array, camera: Camera, rng: np.random.Generator) -> Array:
    """Apply a camera to a scene: light, colours, glare, focus, haze, contrast, noise."""
    at = painting.pixel_grid(SIZE)
    light = rng.uniform(*camera.light) * painting.tilt(at, rng.uniform(0, 2 * np.pi), rng.uniform(*camera.tilt))
    middle = SIZE / 2 + rng.uniform(-20, 20, size=2)
    light = light * painting.vignette(at, (middle[0], middle[1]), rng.uniform(*camera.vignette))
    image = scene * np.clip(light, 0.05, None)[..., None]
    image *= rng.uniform(*camera.colour)
    image += _glare(at, rng.uniform(*camera.glare), rng)[..., None] * np.array([0.85, 0.95, 1.0])
    haze = rng.uniform(*camera.haze)
    image = (1 - haze) * painting.blur(image, rng.uniform(*camera.blur)) + haze * np.array([0.8, 0.85, 0.9])
    image = np.clip(image, 0, 1) ** rng.uniform(*camera.gamma)
    mean = image.mean(axis=(0, 1))
    image = mean + rng.uniform(*camera.contrast) * (image - mean)
    # Sensor noise affects brightness more than colour.
    grain = rng.normal(size=(SIZE, SIZE, 4))
    return np.asarray(image + rng.uniform(*camera.noise) * (0.8 * grain[..., 3:] + 0.6 * grain[..., :3]))


def _glare(at: PixelGrid, strength: float, rng: np.random.Generator) -> Array:
    """Return stray light of the lens edge: a soft crescent from one side."""
    angle = rng.uniform(0, 2 * np.pi)
    centre = SIZE / 2 + rng.uniform(75, 100) * np.sin(angle), SIZE / 2 + rng.uniform(75, 100) * np.cos(angle)
    far = np.hypot(at[0] - centre[0], at[1] - centre[1])
    return np.asarray(strength * np.exp(-0.5 * (far / rng.uniform(22, 40)) ** 2))
