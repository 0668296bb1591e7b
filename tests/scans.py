"""Scans made up for tests. Red says the class of a pixel, green the patient, blue the slice: networks can be asked."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.data.datasets import Dataset
from trueup.data.domains import BrokenImageError
from trueup.data.slices import Box, LabelledCase, SliceDomain, Volume, full_box

SIDE = 32
STEP = 60  # of red from class to class; of green from patient to patient it is 10, of blue from slice to slice 20
CLASSES = ("background", "rim", "core")
STRUCTURES = {"all": (1, 2), "core": (2,)}
DOMAINS = ("amber", "blue", "coral")


def drawn(rng: np.random.Generator, side: int = SIDE) -> NDArray[np.uint8]:
    """The mask of a slice: a block with another one in it, off the middle."""
    mask = np.zeros((side, side), dtype=np.uint8)
    top, left = rng.integers(2, side // 3, size=2)
    tall, wide = rng.integers(side // 3, side // 2, size=2)
    mask[top : top + tall, left : left + wide] = 1
    mask[top + 2 : top + tall // 2 + 2, left + 3 : left + wide // 2 + 3] = 2
    return mask


def volume(patient: int, slices: int = 2, *, seed: int = 0, level: int = 0, box: Box | None = None) -> Volume:
    """A case in colours; `level` is added to red, as another scanner would."""
    masks = np.stack([drawn(np.random.default_rng([seed, patient, z])) for z in range(slices)])
    image = np.zeros((slices, SIDE, SIDE, 3), dtype=np.uint8)
    image[..., 0] = STEP * masks + level
    image[..., 1] = 10 * patient
    image[..., 2] = 20 * np.arange(slices)[:, None, None]
    return Volume(image, masks, (3.0, 1.0, 0.5), box or full_box(SIDE, SIDE))


def broken() -> Volume:
    raise BrokenImageError("cut short")


def domain(
    name: str, patients: int = 5, *, scans: int = 1, slices: int = 2, level: int = 0, lost: tuple[int, ...] = ()
) -> SliceDomain:
    """Each patient has so many cases with so many slices; the cases of `lost` cannot be read."""
    seed, cases = DOMAINS.index(name), []
    for number in range(patients * scans):
        patient = number // scans
        made = volume(patient, slices, seed=100 * seed + number % scans, level=level)
        read = broken if number in lost else lambda made=made: made
        cases.append(LabelledCase(f"{name}-{number}", slices, read, patient=f"patient {patient}" if scans > 1 else ""))
    return SliceDomain(name, cases)


def dataset(patients: int = 5, *, name: str = "scans", lost: tuple[int, ...] = ()) -> Dataset:
    """Three domains of rising level."""
    domains = {n: domain(n, patients, level=25 * i, lost=lost) for i, n in enumerate(DOMAINS)}
    return Dataset(name, CLASSES, DOMAINS, domains.__getitem__, structures=STRUCTURES)


def tensor(images: NDArray[np.uint8]) -> Tensor:
    """What a loader makes of images (N, H, W, 3), written out: values from -1 to 1."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float().sub(127.5).div(127.5)


def decode(x: Tensor, level: int = 0) -> tuple[Tensor, list[tuple[int, int]]]:
    """The masks of a batch, and patient and slice of each image, from its colours alone."""
    values = (x * 127.5 + 127.5).round().long()
    return (values[:, 0] - level) // STEP, [(int(v[1, 0, 0]) // 10, int(v[2, 0, 0]) // 20) for v in values]


def dice(found: NDArray[np.bool_], truth: NDArray[np.bool_]) -> float | None:
    """Pixel by pixel; None where there is nothing in either."""
    both = either = 0
    for a, b in zip(found.ravel().tolist(), truth.ravel().tolist(), strict=True):
        both, either = both + (a and b), either + a + b
    return 2 * both / either if either else None
