"""The 15 common corruptions of ImageNet-C (Hendrycks & Dietterich, 2019) at 5 severities, computed on the fly.

The constants are the published ones, made for 224 px; lengths scale with the short side. `Differs:` marks each
departure from the published code.
"""

import difflib
import io
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import fft, ndimage, spatial

Array = NDArray[np.float64]
Level = TypeVar("Level")
Corruption = Callable[[Array, Level, np.random.Generator], Array]

_TABLE: dict[str, tuple[Corruption[Any], tuple[Any, ...]]] = {}


def _at(*levels: Level) -> Callable[[Corruption[Level]], Corruption[Level]]:
    """Register `_name(x, level, rng)` with its constants for severities 1 to 5."""

    def enter(function: Corruption[Level]) -> Corruption[Level]:
        _TABLE[function.__name__[1:]] = (function, levels)
        return function

    return enter


def corrupt(image: np.ndarray, name: str, severity: int, *, seed: int = 0, index: int = 0) -> np.ndarray:
    """Return a corrupted copy of a uint8 image (H, W, 3); severity 0 leaves it unchanged.

    The random stream depends on seed, index and name but not on severity: severities share their draws.
    """
    if name not in _TABLE:
        near = difflib.get_close_matches(str(name), CORRUPTIONS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"no corruption is called {name!r}{hint} There are: {', '.join(CORRUPTIONS)}")
    if severity not in range(6):
        raise ValueError(f"severity is {severity!r}; give 0 (unchanged) to 5")
    if image.dtype != np.uint8:
        raise ValueError(f"the image has dtype {image.dtype}; give uint8 with values 0 to 255")
    if image.ndim != 3 or image.shape[2] != 3 or min(image.shape[:2]) < 8:
        raise ValueError(f"the image has shape {image.shape}; give (H, W, 3), at least 8 px high and wide")
    if severity == 0:
        return image.copy()
    function, levels = _TABLE[name]
    rng = np.random.default_rng((seed, index, CORRUPTIONS.index(name)))
    return _bytes(function(image / 255, levels[int(severity) - 1], rng))


def _bytes(x: Array) -> NDArray[np.uint8]:
    # Differs: rounds once at the end, where the published code truncates: unaffected pixels keep their value.
    return np.rint(np.clip(x, 0, 1) * 255).astype(np.uint8)


def _unit(x: Array) -> float:
    """Return the length that corresponds to one pixel at 224 px."""
    return float(min(x.shape[:2])) / 224


def _grain(x: Array) -> float:
    """Return the size that corresponds to a grain of one pixel at 224 px."""
    # Differs: below 224 px grains shrink more slowly than the side; grains below a pixel would average out.
    return float(max(_unit(x), _unit(x) ** (2 / 3)))


def _gaussian(x: Array, sigma: float) -> Array:
    """Blur the first two axes with mirrored borders, as a product in the cosine domain."""
    # Differs: exp(σ²(cos ω - 1)) is the discrete Gaussian, not truncated; its variance is σ² even below a pixel.
    spectrum = fft.dctn(x, axes=(0, 1))
    for axis in (0, 1):
        n = x.shape[axis]
        response = np.exp(sigma**2 * (np.cos(np.pi * np.arange(n) / n) - 1))
        spectrum *= response.reshape([n if a == axis else 1 for a in range(x.ndim)])
    return np.asarray(fft.idctn(spectrum, axes=(0, 1)))


def _smear(x: Array, points: Array, weights: Array) -> Array:
    """Return the weighted mean of copies of x shifted by points (2, N), in pixels."""
    # Differs: points between pixels are split bilinearly, so blurs below a pixel act and grow smoothly.
    # Differs: all borders are mirrored with the edge pixel repeated, which keeps the mean of the image.
    radius = int(np.abs(points).max()) + 1
    kernel = np.zeros((2 * radius + 1, 2 * radius + 1))
    low = np.floor(points).astype(int)
    part = points - low
    for dy, wy in ((0, 1 - part[0]), (1, part[0])):
        for dx, wx in ((0, 1 - part[1]), (1, part[1])):
            np.add.at(kernel, (low[0] + dy + radius, low[1] + dx + radius), wy * wx * weights)
    kernel /= kernel.sum()
    edges = [(radius, radius)] * 2 + [(0, 0)] * (x.ndim - 2)
    padded = np.pad(x, edges, mode="symmetric")
    kernel = kernel.reshape(kernel.shape + (1,) * (x.ndim - 2))
    from scipy import signal  # takes half a second to import

    return np.asarray(signal.fftconvolve(padded, kernel, mode="valid", axes=(0, 1)))


def _trail(x: Array, radius: float, sigma: float, degrees: float) -> Array:
    """Blur along a direction: a half Gaussian from the pixel on, cut at twice the radius as in ImageMagick."""
    length = np.linspace(0, 2 * radius, 33 + 4 * int(radius))
    direction = np.array([[np.sin(np.deg2rad(degrees))], [np.cos(np.deg2rad(degrees))]])
    return _smear(x, direction * length, np.exp(-((length / sigma) ** 2) / 2))


def _zoom(x: Array, factor: float) -> Array:
    """Enlarge x about its centre, bilinearly."""
    # Differs: the crop may end between pixels; the published code rounds to whole pixels.
    for axis in (0, 1):
        n = x.shape[axis]
        at = (n - 1) / 2 + (np.arange(n) - (n - 1) / 2) / factor
        low = np.minimum(at.astype(int), n - 2)
        part = (at - low).reshape([n if a == axis else 1 for a in range(x.ndim)])
        below, above = x.take(low, axis=axis), x.take(low + 1, axis=axis)
        x = below + part * (above - below)
    return x


def _sample(x: Array, rows: Array, columns: Array) -> Array:
    """Sample x bilinearly at these positions, mirrored outside."""
    channels = [ndimage.map_coordinates(x[..., k], (rows, columns), order=1, mode="reflect") for k in range(x.shape[2])]
    return np.stack(channels, axis=2)


def _plasma(shape: tuple[int, ...], decay: float, rng: np.random.Generator) -> Array:
    """Return a diamond-square fractal in [0, 1] on a torus; the amplitude falls by decay² per scale."""
    # Differs: the map is the power of two that covers the image, not always 256.
    size = 1 << (max(shape) - 1).bit_length()
    field = np.zeros((1, 1))
    amplitude = 1.0
    while len(field) < size:
        n = len(field)
        noise = rng.uniform(-1, 1, (3, n, n)) * amplitude
        finer = np.zeros((2 * n, 2 * n))
        right, down = np.roll(field, -1, axis=1), np.roll(field, -1, axis=0)
        centre = (field + right + down + np.roll(right, -1, axis=0)) / 4 + noise[0]
        finer[::2, ::2], finer[1::2, 1::2] = field, centre
        finer[::2, 1::2] = (field + right + centre + np.roll(centre, 1, axis=0)) / 4 + noise[1]
        finer[1::2, ::2] = (field + down + centre + np.roll(centre, 1, axis=1)) / 4 + noise[2]
        field, amplitude = finer, amplitude / decay**2
    low, high = float(field.min()), float(field.max())
    return ((field - low) / (high - low))[: shape[0], : shape[1]]


@_at(0.08, 0.12, 0.18, 0.26, 0.38)
def _gaussian_noise(x: Array, sigma: float, rng: np.random.Generator) -> Array:
    return x + sigma * rng.standard_normal(x.shape)


@_at(60, 25, 12, 5, 3)
def _shot_noise(x: Array, photons: float, rng: np.random.Generator) -> Array:
    return rng.poisson(x * photons) / photons


@_at(0.03, 0.06, 0.09, 0.17, 0.27)
def _impulse_noise(x: Array, amount: float, rng: np.random.Generator) -> Array:
    hit, salt = rng.random((2, *x.shape))
    return np.where(hit < amount, salt < 0.5, x)


@_at((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))
def _defocus_blur(x: Array, c: tuple[float, float], rng: np.random.Generator) -> Array:
    radius, sigma = c[0] * _unit(x), c[1] * _unit(x)
    side = np.linspace(-1, 1, 33 + 4 * int(radius))
    points = np.stack(np.meshgrid(side, side)).reshape(2, -1)
    points = points[:, (points**2).sum(axis=0) <= 1] * radius
    return _gaussian(_smear(x, points, np.ones(points.shape[1])), sigma)


@_at((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
def _glass_blur(x: Array, c: tuple[float, float, int], rng: np.random.Generator) -> Array:
    sigma, shift, times = c[0] * _unit(x), c[1] * _grain(x), c[2]
    rows, columns = np.mgrid[: x.shape[0], : x.shape[1]]
    x = _gaussian(x, sigma)
    for _ in range(times):
        # Differs: shifts are real numbers and all pixels move at once, not one by one by whole pixels.
        down, right = shift * rng.uniform(-1, 1, (2, *rows.shape))
        x = _sample(x, rows + down, columns + right)
    return _gaussian(x, sigma)


@_at((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
def _motion_blur(x: Array, c: tuple[float, float], rng: np.random.Generator) -> Array:
    radius, sigma = c[0] * _unit(x), c[1] * _unit(x)
    return _trail(x, radius, sigma, rng.uniform(-45, 45))


@_at((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))
def _zoom_blur(x: Array, c: tuple[float, float], rng: np.random.Generator) -> Array:
    zooms = np.arange(1, c[0], c[1])
    total = x.copy()
    for factor in zooms:
        total += _zoom(x, float(factor))
    return total / (len(zooms) + 1)


@_at(
    (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
    (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
    (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
    (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
    (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
)
def _snow(x: Array, c: tuple[float, ...], rng: np.random.Generator) -> Array:
    mean, std, zoom, threshold, radius, sigma, mix = c
    angle, (height, width) = rng.uniform(-135, -45), x.shape[:2]
    # Differs: flakes are made as at 224 px, on a finer grid that is averaged or a crop that is enlarged.
    finer = max(1, round(1 / _grain(x)))
    flakes = _zoom(mean + std * rng.standard_normal((height * finer, width * finer)), zoom)
    flakes = np.where(flakes < threshold, 0, np.minimum(flakes, 1)).reshape(height, finer, width, finer)
    flakes = _zoom(flakes.mean(axis=(1, 3)), max(1, _unit(x)))
    flakes = _trail(flakes, radius * _unit(x), sigma * _unit(x), angle)
    grey: Array = x @ np.array([0.299, 0.587, 0.114])
    pale: Array = np.maximum(x, (1.5 * grey + 0.5)[..., None])
    return mix * x + (1 - mix) * pale + (flakes + np.rot90(flakes, k=2))[..., None]


def _ice(x: Array, rng: np.random.Generator) -> Array:
    """Return ice flowers in [0, 1], as large as x: needles of stretched noise along two axes per crystal."""
    shape, grain = x.shape[:2], _grain(x)
    patches = _plasma(shape, 1.5, rng)
    noise = fft.rfft2(rng.standard_normal(shape))
    fy, fx = 2 * np.pi * fft.fftfreq(shape[0])[:, None], 2 * np.pi * fft.rfftfreq(shape[1])
    needles = np.empty((6, *shape))
    for k, angle in enumerate(np.pi * np.arange(6) / 6):
        along, across = fx * np.cos(angle) + fy * np.sin(angle), fy * np.cos(angle) - fx * np.sin(angle)
        low_pass = np.exp(-((9 * grain * along) ** 2 + (0.9 * grain * across) ** 2) / 2)
        stretched = fft.irfft2(noise * low_pass, s=shape)
        needles[k] = np.exp(-((2 * stretched / stretched.std()) ** 2))  # a ridge along each line of zeros
    count = round(60 * shape[0] * shape[1] / min(shape) ** 2)
    seeds, axes = rng.uniform(0, 1, (count, 2)) * shape, rng.integers(6, size=count)
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    axis = axes[spatial.cKDTree(seeds).query(np.stack((rows, columns), axis=-1))[1]]
    ridges: Array = np.maximum(needles[axis, rows, columns], needles[(axis + 2) % 6, rows, columns])
    dense: Array = np.clip(4 * (patches - np.quantile(patches, 0.3)), 0, 1)
    return dense * (0.25 + 0.75 * ridges)


@_at((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
def _frost(x: Array, c: tuple[float, float], rng: np.random.Generator) -> Array:
    # Differs: the ice is drawn at random; the published code pastes crops of five photographs.
    bluish: Array = np.array([0.9, 0.96, 1])
    return c[0] * x + c[1] * _ice(x, rng)[..., None] * bluish


@_at((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))
def _fog(x: Array, c: tuple[float, float], rng: np.random.Generator) -> Array:
    (amount, decay), most = c, float(x.max())
    return (x + amount * _plasma(x.shape[:2], decay, rng)[..., None]) * most / (most + amount)


@_at(0.1, 0.2, 0.3, 0.4, 0.5)
def _brightness(x: Array, more: float, rng: np.random.Generator) -> Array:
    value: Array = x.max(axis=2, keepdims=True)
    brighter: Array = np.minimum(value + more, 1)
    # Hue and saturation are ratios of the channels: in HSV a new value is a common factor.
    return np.where(value > 0, x / np.maximum(value, 1e-6) * brighter, brighter)


@_at(0.4, 0.3, 0.2, 0.1, 0.05)
def _contrast(x: Array, factor: float, rng: np.random.Generator) -> Array:
    mean: Array = x.mean(axis=(0, 1))
    return (x - mean) * factor + mean


@_at((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
def _elastic_transform(x: Array, c: tuple[float, float, float], rng: np.random.Generator) -> Array:
    unit, size = _unit(x), np.array(x.shape[:2])
    alpha, sigma, jitter = (244 * v for v in c)
    corners = size // 2 + size.min() // 3 * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = corners + jitter * unit * rng.uniform(-1, 1, (3, 2))
    affine = np.linalg.solve(np.c_[moved, np.ones(3)], corners)
    # Differs: unit² for alpha, because smoothed white noise shrinks with the number of pixels it spans.
    noise = rng.uniform(-1, 1, (*size, 2))
    to = np.moveaxis(np.mgrid[: size[0], : size[1]], 0, -1) + alpha * unit**2 * _gaussian(noise, sigma * unit)
    # Differs: both maps are composed and the image is interpolated once, not twice.
    source = to @ affine[:2] + affine[2]
    return _sample(x, source[..., 0], source[..., 1])


@_at(0.6, 0.5, 0.4, 0.3, 0.25)
def _pixelate(x: Array, scale: float, rng: np.random.Generator) -> Array:
    height, width = x.shape[:2]
    small = Image.fromarray(_bytes(x)).resize((int(width * scale), int(height * scale)), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX)) / 255


@_at(25, 18, 15, 10, 7)
def _jpeg_compression(x: Array, quality: int, rng: np.random.Generator) -> Array:
    file = io.BytesIO()
    Image.fromarray(_bytes(x)).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file)) / 255


CORRUPTIONS: tuple[str, ...] = tuple(_TABLE)
