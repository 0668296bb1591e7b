"""Drawing for the phantoms: outlines, smooth noise, light that falls unevenly, the noise of scanners.

An outline is given by the distance of each pixel to it along the ray from its middle, positive inside. Sharp masks,
soft edges and walls all follow from that one array, so nothing has to be drawn larger and reduced. Arrays may be (H, W)
or, for stacks, (Z, H, W), with whatever varies over slices as (Z, 1, 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Array = NDArray[np.float64]
Place = float | Array
Grid = tuple[Array, Array]  # down and across
Curve = tuple[Array, Array]  # (N, 2): down and across; (N,): how wide
Ripples = NDArray[np.complex128]  # (4,): of two to five waves
FAR = 1000.0  # pixels
FINER = 4  # how many times finer curves are drawn than pixels are


def grid(size: int) -> Grid:
    """Down and across of each pixel, (size, 1) and (1, size)."""
    axis = np.arange(size, dtype=np.float64)
    return axis[:, None], axis[None, :]


def ripples(rng: np.random.Generator, strength: float) -> Ripples:
    """A random departure from the ellipse: size and phase of two to five waves around it. Ripples may be added up."""
    waves = np.arange(2, 6)
    sizes = strength * rng.normal(size=len(waves)) / (waves - 1)
    return np.asarray(sizes * np.exp(1j * rng.uniform(0, 2 * np.pi, size=len(waves))))


def ellipse(
    at: Grid, centre: tuple[Place, Place], radii: tuple[Place, Place], turn: float = 0.0, wobble: Ripples | None = None
) -> Array:
    """How far inside an ellipse each pixel is. Centre and radii go down and across; one below half a pixel is none."""
    down, across = at[0] - centre[0], at[1] - centre[1]
    v = (np.cos(turn) * down - np.sin(turn) * across) / radii[0]
    u = (np.sin(turn) * down + np.cos(turn) * across) / radii[1]
    ratio = np.hypot(u, v) + 1e-9
    edge: Place = 1.0
    if wobble is not None:
        around = (u + 1j * v) / ratio
        waves = wobble[3] * around
        for size in wobble[2::-1]:
            waves += size
            waves *= around
        edge = 1 + (waves * around).real
    ray = np.hypot(down, across) / ratio
    return np.where(np.minimum(*radii) < 0.5, -FAR, ray * (edge - ratio))


def cover(distance: Array, soft: Place = 1.0) -> Array:
    """How much of each pixel lies inside, with an edge that is `soft` pixels wide."""
    ramp = np.clip(0.5 + distance / soft, 0, 1)
    return np.asarray(ramp * ramp * (3 - 2 * ramp))


def paint(canvas: Array, amount: Array, value: Place | Sequence[float]) -> None:
    """Lay a value, or a colour, over a canvas, as thick as `amount` says."""
    colour = np.asarray(value, dtype=np.float64)
    alpha = amount[..., None] if canvas.shape[-1] == 3 else amount
    canvas += alpha * (colour - canvas)


def smooth_noise(rng: np.random.Generator, shape: tuple[int, ...], cells: tuple[int, ...]) -> Array:
    """Clouds with mean 0 and spread 1: so many independent cells along each axis, and nothing sharp in between."""
    noise = rng.normal(size=cells)
    for size, count in zip(shape, cells, strict=True):
        # The axes take turns and end in order. A matrix product would be faster, and not the same for any thread count.
        noise = np.einsum("a...,sa->...s", noise, _spread(size, count))
    return np.asarray((noise - noise.mean()) / noise.std())


@cache
def _spread(size: int, count: int) -> Array:
    """(size, count): how much each pixel takes from each cell."""
    cells = np.linspace(0, count - 1, size)[:, None] - np.arange(count)[None, :]
    weights = np.exp(-0.5 * (cells / 0.6) ** 2)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def bias_field(rng: np.random.Generator, shape: tuple[int, ...], strength: float) -> Array:
    """What the coils of a scanner multiply an image with: smooth, about 1."""
    cells = (2, 3, 3)[-len(shape) :]
    return np.asarray(np.exp(strength * smooth_noise(rng, shape, cells)))


def rician(rng: np.random.Generator, image: Array, strength: float) -> Array:
    """The magnitude of a complex signal with noise in both parts: what is dark comes out grey."""
    noise = strength * rng.normal(size=(2, *image.shape))
    return np.asarray(np.hypot(image + noise[0], noise[1]))


def tilt(at: Grid, angle: float, strength: float) -> Array:
    """Light that falls from one side: from 1 - strength to 1 + strength over the image, about 1 in the middle."""
    half = at[0].size / 2
    return np.asarray(1 + strength * (np.sin(angle) * (at[0] / half - 1) + np.cos(angle) * (at[1] / half - 1)))


def vignette(at: Grid, centre: tuple[float, float], strength: float) -> Array:
    """Light that fades away from a centre: 1 there, 1 - strength at a distance of half the image."""
    far = ((at[0] - centre[0]) ** 2 + (at[1] - centre[1]) ** 2) / (at[0].size / 2) ** 2
    return np.asarray(1 / (1 + strength / (1 - strength) * far))


def blur(image: Array, sigma: float) -> Array:
    """Out of focus, in the plane; the last axis of (H, W, 3) holds colours, the first of (Z, H, W) slices."""
    sigmas = (sigma, sigma, 0.0) if image.shape[-1] == 3 else (0.0, sigma, sigma)
    return np.asarray(ndimage.gaussian_filter(image, sigmas, mode="nearest", truncate=3))


def bezier(corners: Array, count: int = 20) -> Array:
    """Points (count, 2) of the cubic curve with these four corners."""
    t = np.linspace(0, 1, count)[:, None]
    s = 1 - t
    return np.asarray(s**3 * corners[0] + 3 * s**2 * t * corners[1] + 3 * s * t**2 * corners[2] + t**3 * corners[3])


def normals(points: Array) -> Array:
    """The unit vector across a curve at each of its points."""
    along = np.empty_like(points)
    along[1:-1] = points[2:] - points[:-2]
    along[0], along[-1] = points[1] - points[0], points[-1] - points[-2]
    across = along[:, ::-1] * np.array([-1.0, 1.0])
    return np.asarray(across / (np.hypot(along[:, :1], along[:, 1:]) + 1e-9))


def draw(size: int, curves: Iterable[Curve]) -> Array:
    """How much of each pixel the curves cover."""
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (FINER * size, FINER * size))
    pen = ImageDraw.Draw(canvas)
    for points, widths in curves:
        side = normals(points) * widths[:, None] / 2
        outline = np.concatenate([points + side, (points - side)[::-1]])[:, ::-1]
        pen.polygon(((outline + 0.5) * FINER).ravel().tolist(), fill=255)
    return np.asarray(canvas.reduce(FINER), dtype=np.float64) / 255


def to_uint8(image: Array) -> NDArray[np.uint8]:
    """Values from 0 to 1 as bytes."""
    return np.asarray(np.clip(255 * image + 0.5, 0, 255).astype(np.uint8))
