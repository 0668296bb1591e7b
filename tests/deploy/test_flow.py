"""Masks of a folder equal those of a plain loop over its images."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clinic import (
    FAST,
    GROUPS,
    SIZE,
    TSD,
    UPDATES,
    Array,
    clinic,
    learner,
    noise,
    numbers,
    save_nifti,
    save_picture,
    unet,
    watcher,
    written,
)
from PIL import Image
from torch import Tensor

import trueup
from trueup.core import files
from trueup.data.volumes import read_volume
from trueup.deploy import SegmentConfig, folder_images, segment_folder

Slice = tuple[str, Array, tuple[float, ...], float | None]
"""The name of its image, its pixels, millimetres between rows and columns, millimetres that are seen."""


def plain_loop(folder: Path, groups: list[list[str]], setup: SegmentConfig) -> dict[str, Array]:
    """The masks (Z, H, W) of images that are shown group by group, worked out with Pillow and numpy."""
    adapter = trueup.adapt(unet(), setup.method, seed=setup.seed, **setup.hyper)
    masks: dict[str, list[Array]] = {}
    for group in groups:
        slices: list[Slice] = []
        for name in group:
            if name.endswith(".png"):
                slices.append((name, np.asarray(Image.open(folder / name).convert("RGB")), (1.0, 1.0), None))
                continue
            scan = read_volume(folder / name)
            values = scan.values.astype(np.float32)
            low, high = np.percentile(values, [1, 99]).tolist()
            grey = (255 * ((values - low) / (high - low)) + 0.5).clip(0, 255).astype(np.uint8)
            slices += [(name, np.repeat(plane[..., None], 3, axis=2), scan.spacing[1:], setup.field) for plane in grey]
        for start in range(0, len(slices), setup.batch):
            part = slices[start : start + setup.batch]
            batch = torch.from_numpy(np.stack([np.asarray(seen(*each[1:])[0]) for each in part]))
            x = (batch - 255 * torch.tensor([0.485, 0.456, 0.406])) / (255 * torch.tensor([0.229, 0.224, 0.225]))
            logits = adapter(x.permute(0, 3, 1, 2))
            for each, answer in zip(part, logits, strict=True):
                masks.setdefault(each[0], []).append(put_back(answer, *each[1:]))
    return {name: np.stack(planes) for name, planes in masks.items()}


def seen(pixels: Array, spacing: tuple[float, ...], field: float | None) -> tuple[Image.Image, tuple[int, ...]]:
    """A square of the image, resized, and where it lies: left, top, right, bottom."""
    height, width = pixels.shape[:2]
    side = field or max(height * spacing[0], width * spacing[1])
    tall, wide = round(side / spacing[0]), round(side / spacing[1])
    top, left = (height - tall) // 2, (width - wide) // 2
    box = (left, top, left + wide, top + tall)
    return Image.fromarray(pixels).crop(box).resize((SIZE, SIZE), Image.Resampling.BILINEAR), box


def put_back(answer: Tensor, pixels: Array, spacing: tuple[float, ...], field: float | None) -> Array:
    left, top, right, bottom = seen(pixels, spacing, field)[1]
    scores = []
    for k, channel in enumerate(torch.softmax(answer, dim=0).numpy()):
        whole = Image.fromarray(channel).resize((right - left, bottom - top), Image.Resampling.BILINEAR)
        canvas = Image.new("F", (pixels.shape[1], pixels.shape[0]), 1.0 if k == 0 else 0.0)
        canvas.paste(whole, (left, top))
        scores.append(np.asarray(canvas))
    return np.stack(scores).argmax(axis=0)


@pytest.mark.parametrize(("method", "hyper", "field"), [("tsd", TSD, None), ("bn", {}, 30.0), ("tent", FAST, None)])
def test_masks_are_those_of_a_plain_loop(method: str, hyper: Any, field: float | None, tmp_path: Path) -> None:
    folder, out = clinic(tmp_path / "in"), tmp_path / "out"
    setup = learner(method=method, hyper=hyper, field=field, seed=3)
    summary = segment_folder(setup, folder, out)
    assert summary.done == tuple(name for group in GROUPS for name in group)
    assert set(written(out)) == {name.replace(".mhd", ".mha") for name in summary.done}
    assert list(summary.broken) == ["b/cut.nii.gz", "eyes/1.png"]
    assert summary.others == ("notes.txt",)
    assert summary.updates == (0 if method == "bn" else UPDATES)
    for name, expected in plain_loop(folder, GROUPS, setup).items():
        path = out / name.replace(".mhd", ".mha")
        mask = numbers(path)[None] if path.suffix == ".png" else read_volume(path).values
        assert np.array_equal(mask, expected), f"{np.count_nonzero(mask != expected)} pixels of {name} differ"
        assert len(np.unique(mask)) > 1, "the network says the same everywhere"


def test_adaptation_is_no_decoration(tmp_path: Path) -> None:
    folder = clinic(tmp_path / "in")
    segment_folder(learner(), folder, tmp_path / "tsd")
    segment_folder(learner(method="bn", hyper={}), folder, tmp_path / "bn")
    tsd, bn = written(tmp_path / "tsd"), written(tmp_path / "bn")
    assert tsd["eyes/4.png"] != bn["eyes/4.png"]
    assert tsd["b/heart.nii.gz"] != bn["b/heart.nii.gz"]


def test_one_volume_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(4):
        save_nifti(tmp_path / "in" / f"{n}.nii", noise(20, 20, 3, seed=n))
    alive: list[weakref.ref[Any]] = []
    read = folder_images.read_image

    def watched(path: Path, *how: Any) -> Any:
        assert [ref() for ref in alive if ref() is not None] == []
        result = read(path, *how)
        alive.append(weakref.ref(result[0]))
        return result

    monkeypatch.setattr(folder_images, "read_image", watched)
    assert len(segment_folder(watcher(), tmp_path / "in", tmp_path / "out").done) == 4


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(32, 32) // 5)
    setup = learner()
    before = files.digest(setup.model.state_dict())
    segment_folder(setup, tmp_path / "in", tmp_path / "out")
    assert files.digest(setup.model.state_dict()) == before
