"""A clinic's folder of volumes and pictures, and segmenters for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import SimpleITK as sitk  # noqa: N813
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from trueup.deploy import SegmentConfig
from trueup.source.networks import build_network

Array = NDArray[Any]
SIZE = 32
FAST = {"lr": 1e-2}  # so that every update shows in the masks
TSD = {**FAST, "queries": 64, "neighbors": 8}


class Bright(nn.Module):
    """Class or label k + 1 where a normalised pixel is brighter than threshold k; what it sees is what it says."""

    def __init__(self, *thresholds: float, background: bool = True) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, len(thresholds) + background, 1)
        with torch.no_grad():
            self.head.weight.fill_(0)
            self.head.bias.fill_(0)
            for k, threshold in enumerate(thresholds):
                self.head.weight[k + background] = (k + 1) * 100 / 3
                self.head.bias[k + background] = -100 * sum(thresholds[: k + 1] if background else [threshold])
            if not background:
                self.head.weight.fill_(100 / 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


def unet(classes: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_network("small-unet", classes).eval()


def learner(**values: Any) -> SegmentConfig:
    return SegmentConfig(**{"model": unet(), "size": SIZE, "batch": 2, "hyper": TSD, **values})


def watcher(*thresholds: float, **values: Any) -> SegmentConfig:
    """Looks through Bright's eyes, and learns nothing."""
    model = Bright(*(thresholds or (0.0,)), background=not values.get("multilabel", False))
    return SegmentConfig(**{"model": model, "size": SIZE, "normalize": "half", "method": "source", **values})


def oblique(zooms: tuple[float, ...] = (1.5, 1.25, 5.0)) -> Array:
    """Axes that are turned a little, and run against those of the patient."""
    c, s = np.cos(0.2), np.sin(0.2)
    matrix = np.eye(4)
    matrix[:3, :3] = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ np.diag(zooms) @ np.diag([1.0, 1.0, -1.0])
    matrix[:3, 3] = -31.5, 12.25, 7
    return matrix


def noise(*shape: int, seed: int = 0) -> Array:
    """Blobs rather than noise, so that a network has something to tell apart."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 1000, [max(1, n // 8) if n > 8 else n for n in shape]).astype(np.int16)
    for axis, n in enumerate(shape):
        coarse = np.repeat(coarse, -(-n // coarse.shape[axis]), axis=axis).take(range(n), axis=axis)
    return coarse + rng.integers(0, 100, shape).astype(np.int16)


def save_nifti(path: Path, values: Array, affine: Array | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, oblique() if affine is None else affine), path)
    return path


def save_picture(path: Path, pixels: Array) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def clinic(folder: Path) -> Path:
    """Volumes and pictures of several sizes, in folders, and files that are neither."""
    save_nifti(folder / "b" / "heart.nii.gz", noise(30, 36, 5, seed=1))
    save_nifti(folder / "a.nii", noise(24, 40, 3, seed=2))
    itk = sitk.GetImageFromArray(noise(3, 28, 32, seed=3))
    itk.SetSpacing((1.5, 1.25, 6.0))
    sitk.WriteImage(itk, str(folder / "b" / "raw.mhd"))
    for n, (height, width) in enumerate([(40, 40), (32, 48), (50, 30), (32, 32), (33, 47)]):
        save_picture(folder / "eyes" / f"{n}.png", noise(height, width, 3, seed=10 + n) // 5)
    save_picture(folder / "a1.png", noise(32, 40, seed=4) // 5)
    (folder / "eyes" / "1.png").write_bytes(b"no picture at all")
    (folder / "b" / "cut.nii.gz").write_bytes((folder / "b" / "heart.nii.gz").read_bytes()[:-100])
    (folder / "notes.txt").write_text("no image")
    for hidden in (".hidden.png", "._a.nii", "__MACOSX/a.nii", ".DS_Store", ".git/x.png"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        (folder / hidden).write_bytes(b"")
    return folder


GROUPS = [
    ["a.nii"],
    ["a1.png"],
    ["b/heart.nii.gz"],
    ["b/raw.mhd"],
    ["eyes/0.png", "eyes/2.png"],
    ["eyes/3.png", "eyes/4.png"],
]
"""What is shown together, in batches of two."""
UPDATES = 10


def written(out: Path) -> dict[str, bytes]:
    """All files but those in .trueup."""
    paths = [p for p in out.rglob("*") if p.is_file() and p.parent.name != ".trueup"]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in paths}


def numbers(path: Path) -> Array:
    """The class numbers of a mask, as other libraries read them."""
    if path.suffix == ".png":
        return np.asarray(Image.open(path))
    if path.suffix == ".mha":
        return sitk.GetArrayFromImage(sitk.ReadImage(str(path)))
    return np.asarray(nibabel.load(path).dataobj)


class StopError(Exception):
    """Somebody pulls the plug."""


def stop_after(calls: int) -> Callable[[int, int], None]:
    left = [calls]

    def progress(done: int, of: int) -> None:
        assert 0 <= done <= of
        left[0] -= 1
        if left[0] < 0:
            raise StopError

    return progress
