"""Drawing functions of the phantoms: outlines, smooth noise, uneven light, scanner noise.

An outline is an array of signed distances along the ray from its centre, positive inside. Sharp masks, soft edges and
walls all follow from it, without supersampling. Arrays are (H, W) or, for stacks, (Z, H, W); values that vary over
slices are (Z, 1, 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from trueup.data.slices import Mask, Volume, full_box, window_to_uint8

Random = np.random.Generator
Array = NDArray[np.float64]
PerSlice = float | Array
Point = tuple[PerSlice, PerSlice]  # down and across
PixelGrid = tuple[Array, Array]  # down and across
Curve = tuple[Array, Array]  # points (N, 2), down and across; widths (N,)
Ripples = NDArray[np.complex128]  # (4,): two to five waves
FAR = 1000.0  # pixels
FINER = 4  # supersampling of curves


def pixel_grid(size: int) -> PixelGrid:
    """Return the row and column of each pixel, (size, 1) and (1, size)."""
    axis = np.arange(size, dtype=np.float64)
    return axis[:, None], axis[None, :]


def ripples(rng: Random, strength: float) -> Ripples:
    """Draw a random deviation from an ellipse: amplitude and phase of two to five waves. Ripples can be added."""
    waves = np.arange(2, 6)
    sizes = strength * rng.normal(size=len(waves)) / (waves - 1)
    return np.asarray(sizes * np.exp(1j * rng.uniform(0, 2 * np.pi, size=len(waves))))


def ellipse(at: PixelGrid, centre: Point, radii: Point, turn: float = 0.0, wobble: Ripples | None = None) -> Array:
    """Return signed distances to an ellipse. Centre and radii are (down, across); below half a pixel it is empty."""
    down, across = at[0] - centre[0], at[1] - centre[1]
    v = (np.cos(turn) * down - np.sin(turn) * across) / radii[0]
    u = (np.sin(turn) * down + np.cos(turn) * across) / radii[1]
    ratio = np.hypot(u, v) + 1e-9
    edge: PerSlice = 1.0
    if wobble is not None:
        around = (u + 1j * v) / ratio
        waves = wobble[3] * around
        for size in wobble[2::-1]:
            waves += size
            waves *= around
        edge = 1 + (waves * around).real
    ray = np.hypot(down, across) / ratio
    return np.where(np.minimum(*radii) < 0.5, -FAR, ray * (edge - ratio))


def organ(
    rng: Random, at: PixelGrid, down: PerSlice, across: PerSlice, tall: PerSlice, wide: PerSlice, turn: float = 0.0,
    *, move: float, wobble: float,
) -> Array:  # fmt: skip
    """Draw an ellipse that is moved by up to `move` pixels and rippled."""
    moved = rng.uniform(-move, move, size=2)
    return ellipse(at, (down + moved[0], across + moved[1]), (tall, wide), turn, ripples(rng, wobble))


def cover(distance: Array, soft: PerSlice = 1.0) -> Array:
    """Return the share of each pixel inside, with an edge `soft` pixels wide."""
    ramp = np.clip(0.5 + distance / soft, 0, 1)
    return np.asarray(ramp * ramp * (3 - 2 * ramp))


def paint(canvas: Array, amount: Array, value: PerSlice | Sequence[float]) -> None:
    """Blend a value or colour into a canvas with opacity `amount`."""
    colour = np.asarray(value, dtype=np.float64)
    alpha = amount[..., None] if canvas.shape[-1] == 3 else amount
    canvas += alpha * (colour - canvas)


def smooth_noise(rng: Random, shape: tuple[int, ...], cells: tuple[int, ...]) -> Array:
    """Return smooth noise with mean 0 and std 1, with `cells` independent cells along each axis."""
    noise = rng.normal(size=cells)
    for size, count in zip(shape, cells, strict=True):
        # The axes rotate back into order. A matrix product would be faster but depend on the number of threads.
        noise = np.einsum("a...,sa->...s", noise, _spread(size, count))
    return np.asarray((noise - noise.mean()) / noise.std())


@cache
def _spread(size: int, count: int) -> Array:
    """Return the weight of each cell in each pixel, (size, count)."""
    cells = np.linspace(0, count - 1, size)[:, None] - np.arange(count)[None, :]
    weights = np.exp(-0.5 * (cells / 0.6) ** 2)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class Scanner:
    """The brightness of tissues, their relative spread between patients, and the effects of a scanner."""

    tissues: tuple[float, ...]
    spread: float
    bias: float
    blur: float
    noise: float
    coil: float = 0.0  # gain in brightness at a coil inside the body

    def draw_tissues(self, rng: Random) -> list[float]:
        """Draw the brightness of each tissue in a patient."""
        return [value * (1 + self.spread * rng.normal()) for value in self.tissues]

    def scan(self, rng: Random, signal: Array, mask: Mask, spacing: tuple[float, float, float]) -> Volume:
        """Blur a signal (Z, H, W), add noise, and window it."""
        image = rician(rng, blur(signal, self.blur * rng.uniform(0.8, 1.2)), self.noise * rng.uniform(0.7, 1.3))
        return Volume(window_to_uint8(image)[..., None], mask, spacing, full_box(*mask.shape[1:]))


def bias_field(rng: Random, shape: tuple[int, ...], strength: float) -> Array:
    """Return the smooth gain of a scanner's coils, about 1."""
    cells = (2, 3, 3)[-len(shape) :]
    return np.asarray(np.exp(strength * smooth_noise(rng, shape, cells)))


def rician(rng: Random, image: Array, strength: float) -> Array:
    """Add Rician noise: the magnitude of a complex signal with noise in both parts; black becomes grey."""
    noise = strength * rng.normal(size=(2, *image.shape))
    return np.asarray(np.hypot(image + noise[0], noise[1]))


def tilt(at: PixelGrid, angle: float, strength: float) -> Array:
    """Return light from one side: 1 - strength to 1 + strength over the image."""
    half = at[0].size / 2
    return np.asarray(1 + strength * (np.sin(angle) * (at[0] / half - 1) + np.cos(angle) * (at[1] / half - 1)))


def vignette(at: PixelGrid, centre: tuple[float, float], strength: float) -> Array:
    """Return light that fades from 1 at a centre to 1 - strength at half the image size."""
    far = ((at[0] - centre[0]) ** 2 + (at[1] - centre[1]) ** 2) / (at[0].size / 2) ** 2
    return np.asarray(1 / (1 + strength / (1 - strength) * far))


def blur(image: Array, sigma: float) -> Array:
    """Blur (H, W, 3) or (Z, H, W) in the plane."""
    sigmas = (sigma, sigma, 0.0) if image.shape[-1] == 3 else (0.0, sigma, sigma)
    return np.asarray(ndimage.gaussian_filter(image, sigmas, mode="nearest", truncate=3))


def bezier(corners: Array, count: int = 20) -> Array:
    """Return points (count, 2) of the cubic Bézier curve with these four control points."""
    t = np.linspace(0, 1, count)[:, None]
    s = 1 - t
    return np.asarray(s**3 * corners[0] + 3 * s**2 * t * corners[1] + 3 * s * t**2 * corners[2] + t**3 * corners[3])


def normals(points: Array) -> Array:
    """Return the unit normal of a curve at each point."""
    along = np.empty_like(points)
    along[1:-1] = points[2:] - points[:-2]
    along[0], along[-1] = points[1] - points[0], points[-1] - points[-2]
    across = along[:, ::-1] * np.array([-1.0, 1.0])
    return np.asarray(across / (np.hypot(along[:, :1], along[:, 1:]) + 1e-9))


def draw_curves(size: int, curves: Iterable[Curve]) -> Array:
    """Return the share of each pixel that the curves cover."""
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (FINER * size, FINER * size))
    pen = ImageDraw.Draw(canvas)
    for points, widths in curves:
        side = normals(points) * widths[:, None] / 2
        outline = np.concatenate([points + side, (points - side)[::-1]])[:, ::-1]
        pen.polygon(((outline + 0.5) * FINER).ravel().tolist(), fill=255)
    return np.asarray(canvas.reduce(FINER), dtype=np.float64) / 255


def to_uint8(image: Array) -> NDArray[np.uint8]:
    """Convert values from 0 to 1 to uint8."""
    return np.asarray(np.clip(255 * image + 0.5, 0, 255).astype(np.uint8))
