"""Masks for a folder: they lie on their images, equal those of a plain loop, and no stop leaves a trace in them."""

import json
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import trueup
from trueup.core import files
from trueup.data.volumes import read_volume
from trueup.deploy import Setup, Summary, images, journal, online, segment
from trueup.source.nets import build

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
    return build("small-unet", classes).eval()


def learner(**values: Any) -> Setup:
    return Setup(**{"model": unet(), "size": SIZE, "batch": 2, "hyper": TSD, **values})


def watcher(*thresholds: float, **values: Any) -> Setup:
    """Looks through Bright's eyes, and learns nothing."""
    model = Bright(*(thresholds or (0.0,)), background=not values.get("multilabel", False))
    return Setup(**{"model": model, "size": SIZE, "normalize": "half", "method": "source", **values})


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


# Masks on their images


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_a_mask_lies_on_its_nifti_image(ending: str, tmp_path: Path) -> None:
    values = np.where(noise(SIZE, SIZE, 4) > 500, 1000, 0).astype(np.int16)
    path = save_nifti(tmp_path / "in" / f"a{ending}", values, oblique((1.0, 1.0, 6.0)))
    summary = segment(watcher(), tmp_path / "in", tmp_path / "out")
    mask = nibabel.load(tmp_path / "out" / f"a{ending}")
    assert np.array_equal(np.asarray(mask.dataobj), values > 0)
    assert np.array_equal(mask.affine, nibabel.load(path).affine)
    assert mask.get_data_dtype() == np.uint8
    assert summary == Summary((f"a{ending}",), (), {}, (), 1, 0)


@pytest.mark.parametrize(("ending", "other"), [(".mha", ".mha"), (".mhd", ".mha"), (".nrrd", ".nrrd")])
def test_a_mask_lies_on_its_itk_image(ending: str, other: str, tmp_path: Path) -> None:
    values = np.where(noise(3, SIZE, SIZE) > 500, 1000, 0).astype(np.int16)
    image = sitk.GetImageFromArray(values)
    image.SetSpacing((1.0, 1.0, 6.0))
    image.SetOrigin((3.0, -8.0, 20.5))
    image.SetDirection((0.8, -0.6, 0, 0.6, 0.8, 0, 0, 0, 1))
    (tmp_path / "in").mkdir()
    sitk.WriteImage(image, str(tmp_path / "in" / f"a{ending}"))
    assert segment(watcher(), tmp_path / "in", tmp_path / "out").others == ()
    mask = sitk.ReadImage(str(tmp_path / "out" / f"a{other}"))
    assert np.array_equal(sitk.GetArrayFromImage(mask), values > 0)
    for part in ("GetSpacing", "GetOrigin", "GetDirection"):
        assert np.allclose(getattr(mask, part)(), getattr(image, part)())


def test_pictures_of_several_sizes_and_kinds(tmp_path: Path) -> None:
    bright = {}
    for name, shape in {"a.png": (SIZE, 20), "b.TIF": (SIZE, SIZE), "sub/c.bmp": (12, SIZE)}.items():
        values = np.where(noise(*shape) > 500, 250, 10).astype(np.uint8)
        save_picture(tmp_path / "in" / name, values if name == "b.TIF" else np.repeat(values[..., None], 3, axis=2))
        bright[Path(name).with_suffix(".png").as_posix()] = values > 100
    segment(watcher(), tmp_path / "in", tmp_path / "out")
    assert written(tmp_path / "out").keys() == bright.keys()
    for name, expected in bright.items():
        mask = Image.open(tmp_path / "out" / name)
        assert mask.mode == "P"
        assert np.array_equal(np.asarray(mask), expected)
        colours = mask.convert("RGB").getcolors()
        assert colours is not None
        assert len(colours) == 2, "viewers show classes in colours"


def test_classes_have_their_numbers(tmp_path: Path) -> None:
    grey = np.repeat(np.array([[0, 100, 200, 250]], dtype=np.uint8), SIZE, axis=0).repeat(SIZE // 4, axis=1)
    save_picture(tmp_path / "in" / "a.png", grey)
    segment(watcher(-0.5, 0.3, 0.8), tmp_path / "in", tmp_path / "out")
    assert np.array_equal(numbers(tmp_path / "out" / "a.png")[0, :: SIZE // 4], [0, 1, 2, 3])


def test_nothing_is_seen_beyond_the_field(tmp_path: Path) -> None:
    rows, columns = 40, 48
    values = np.full((columns, rows, 2), 900, dtype=np.int16)
    values[:, :4] = 0  # beyond the field
    save_nifti(tmp_path / "in" / "a.nii", values, np.diag([1.0, 2.0, 8.0, 1.0]))
    save_picture(tmp_path / "in" / "b.png", np.full((rows, columns), 255))
    segment(watcher(field=20.0), tmp_path / "in", tmp_path / "out")
    mask = numbers(tmp_path / "out" / "a.nii")
    expected = np.zeros_like(mask)
    expected[14:34, 15:25] = 1  # 20 columns of 1 mm, 10 rows of 2 mm
    assert np.array_equal(mask, expected)
    assert numbers(tmp_path / "out" / "b.png")[2:-2].all(), "pictures are not measured in millimetres"


def test_a_field_that_makes_no_sense_is_the_images_fault(tmp_path: Path) -> None:
    save_nifti(tmp_path / "in" / "a.nii", noise(20, 20, 2), np.diag([0.001, 0.001, 0.006, 1.0]))
    save_nifti(tmp_path / "in" / "b.nii", noise(20, 20, 2), np.diag([900.0, 900.0, 6000.0, 1.0]))
    save_nifti(tmp_path / "in" / "c.nii", noise(20, 20, 2))
    summary = segment(watcher(field=350.0), tmp_path / "in", tmp_path / "out")
    assert summary.done == ("c.nii",)
    assert "350000×350000 pixels" in summary.broken["a.nii"]
    assert "0×0 pixels" in summary.broken["b.nii"]


@pytest.mark.parametrize("labels", [(), ("disc", "cup")])
def test_each_label_has_a_mask_of_its_own(labels: tuple[str, ...], tmp_path: Path) -> None:
    grey = np.repeat(np.array([[0, 100, 200, 250]], dtype=np.uint8), SIZE, axis=0).repeat(SIZE // 4, axis=1)
    save_picture(tmp_path / "in" / "a.jpg", grey)
    stored = np.stack([grey.T] * 2, axis=2).astype(np.int16)
    save_nifti(tmp_path / "in" / "b.nii.gz", stored, np.diag([1.0, 1.0, 6.0, 1.0]))
    setup = watcher(-0.5, 0.8, multilabel=True, labels=labels)
    summary = segment(setup, tmp_path / "in", tmp_path / "out")
    one, two = labels or ("1", "2")
    assert summary.masks == 4
    expected = {f"a-{one}.png", f"a-{two}.png", f"b-{one}.nii.gz", f"b-{two}.nii.gz"}
    assert set(written(tmp_path / "out")) == expected
    for label, threshold in ((one, 64), (two, 230)):
        assert np.array_equal(numbers(tmp_path / "out" / f"a-{label}.png"), grey > threshold)
        assert np.array_equal(numbers(tmp_path / "out" / f"b-{label}.nii.gz"), stored > threshold)


# The flow


Slice = tuple[str, Array, tuple[float, ...], float | None]
"""The name of its image, its pixels, millimetres between rows and columns, millimetres that are seen."""


def plain_loop(folder: Path, groups: list[list[str]], setup: Setup) -> dict[str, Array]:
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
    summary = segment(setup, folder, out)
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
    segment(learner(), folder, tmp_path / "tsd")
    segment(learner(method="bn", hyper={}), folder, tmp_path / "bn")
    tsd, bn = written(tmp_path / "tsd"), written(tmp_path / "bn")
    assert tsd["eyes/4.png"] != bn["eyes/4.png"]
    assert tsd["b/heart.nii.gz"] != bn["b/heart.nii.gz"]


def test_one_volume_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(4):
        save_nifti(tmp_path / "in" / f"{n}.nii", noise(20, 20, 3, seed=n))
    alive: list[weakref.ref[Any]] = []
    read = images.read_image

    def watched(path: Path) -> Any:
        assert [ref() for ref in alive if ref() is not None] == []
        result = read(path)
        alive.append(weakref.ref(result[0]))
        return result

    monkeypatch.setattr(images, "read_image", watched)
    assert len(segment(watcher(), tmp_path / "in", tmp_path / "out").done) == 4


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(32, 32) // 5)
    setup = learner()
    before = files.digest(setup.model.state_dict())
    segment(setup, tmp_path / "in", tmp_path / "out")
    assert files.digest(setup.model.state_dict()) == before


# Stops


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, bytes]]]:
    """The clinic, and its masks when nothing stops the work."""
    folder = clinic(tmp_path_factory.mktemp("clinic"))
    known: dict[str, dict[str, bytes]] = {}

    def masks(method: str) -> tuple[Path, dict[str, bytes]]:
        if method not in known:
            out = tmp_path_factory.mktemp(method) / "out"
            segment(learner(method=method, hyper=TSD if method == "tsd" else {}), folder, out)
            known[method] = written(out)
        return folder, known[method]

    return masks


@pytest.mark.parametrize(("method", "keep"), [("tsd", 0.0), ("tsd", 1e9), ("bn", 0.0), ("source", 0.0)])
def test_stops_leave_no_trace(method: str, keep: float, whole: Any, tmp_path: Path) -> None:
    folder, expected = whole(method)
    setup = learner(method=method, hyper=TSD if method == "tsd" else {})
    stops, done, random = 0, [], np.random.default_rng(0)
    for calls in range(1, 60):
        try:
            # What stops after few calls gets nowhere if it keeps nothing; so the patience grows.
            wait = 3 * calls if keep else int(random.integers(0, 8))
            summary = segment(setup, folder, tmp_path, keep_every=keep, progress=stop_after(wait))
        except StopError:
            stops += 1
            assert {name: blob for name, blob in written(tmp_path).items() if expected[name] != blob} == {}
            done.append(len(json.loads((tmp_path / ".trueup" / "journal.json").read_text())["done"]))
        else:
            break
    assert written(tmp_path) == expected
    assert stops > 3
    assert done == sorted(done)
    assert len(set(done)) > 2 if keep == 0 else set(done) == {0}
    assert summary.updates == (UPDATES if method == "tsd" else 0)
    assert sorted(path.name for path in (tmp_path / ".trueup").iterdir())[0] == "journal.json"
    assert len(list((tmp_path / ".trueup").iterdir())) == 2, "old states are gone"


@pytest.mark.parametrize("when", ["state", "journal", "mask"])
def test_a_failure_of_any_write_leaves_no_trace(
    when: str, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whole("tsd")
    count = 0

    def fail_at(number: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                raise OSError("the disk is full")
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        if when == "state":
            patch.setattr(files, "write", fail_at(3, files.write))
        elif when == "journal":
            patch.setattr(journal, "put", fail_at(3, journal.put))
        else:
            patch.setattr(images, "put", fail_at(3, images.put))
        with pytest.raises(OSError, match="full"):
            segment(learner(), folder, tmp_path, keep_every=0)
    assert 0 < len(written(tmp_path)) < len(expected)
    segment(learner(), folder, tmp_path)
    assert written(tmp_path) == expected


def test_a_write_that_fails_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(32, 32) // 5)
    real = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target.name == "a.png":
            assert path.parent == target.parent
            raise OSError("the disk is full")
        return real(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="full"):
        segment(watcher(), tmp_path / "in", tmp_path / "out")
    assert written(tmp_path / "out") == {}


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import test_deploy
from trueup.deploy import segment
segment(test_deploy.learner(), sys.argv[1], sys.argv[2], keep_every=0.1, progress=lambda done, of: time.sleep(0.05))
"""


@pytest.mark.slow
def test_a_kill_leaves_no_trace(whole: Any, tmp_path: Path) -> None:
    folder, expected = whole("tsd")
    code = SCRIPT.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen([sys.executable, "-c", code, str(folder), str(tmp_path)])
    kept = tmp_path / ".trueup" / "journal.json"
    while process.poll() is None and not (kept.exists() and len(json.loads(kept.read_text())["done"]) > 1):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9, "it was too fast to be killed"
    (tmp_path / "eyes").mkdir(exist_ok=True)
    (tmp_path / "eyes" / ".0.png.123.partial").write_bytes(b"half a mask")
    summary = segment(learner(), folder, tmp_path)
    assert len(summary.skipped) >= 2
    assert written(tmp_path) == expected


def test_two_at_a_time_are_one_too_many(tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(32, 32) // 5)
    (tmp_path / "out").mkdir()
    with journal.alone(tmp_path / "out"), pytest.raises(ValueError, match="another process is writing"):
        segment(watcher(), tmp_path / "in", tmp_path / "out")
    assert segment(watcher(), tmp_path / "in", tmp_path / "out").masks == 1


# Later calls


def test_later_images_are_done_with_what_was_learnt(whole: Any, tmp_path: Path) -> None:
    folder, expected = whole("tsd")
    now, out = tmp_path / "now", tmp_path / "out"
    now.mkdir()
    (now / "a.nii").write_bytes((folder / "a.nii").read_bytes())
    assert segment(learner(), now, out).done == ("a.nii",)
    (now / "a1.png").write_bytes((folder / "a1.png").read_bytes())
    stamp = (out / "a.nii").stat().st_mtime_ns
    summary = segment(learner(), now, out)
    assert (summary.done, summary.skipped) == (("a1.png",), ("a.nii",))
    assert (out / "a.nii").stat().st_mtime_ns == stamp
    assert written(out) == {name: expected[name] for name in ("a.nii", "a1.png")}
    before = (out / ".trueup" / "journal.json").read_bytes()
    assert segment(learner(), now, out).done == ()
    assert (out / ".trueup" / "journal.json").read_bytes() == before


def test_what_has_changed_is_done_again(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        save_picture(tmp_path / "in" / name, noise(SIZE, SIZE) // 5)
    segment(watcher(), tmp_path / "in", tmp_path / "out")
    bright = np.full((SIZE, SIZE), 255)
    save_picture(tmp_path / "in" / "b.png", bright)
    (tmp_path / "out" / "c.png").unlink()
    assert segment(watcher(), tmp_path / "in", tmp_path / "out").done == ("b.png", "c.png")
    assert numbers(tmp_path / "out" / "b.png").all()


def test_a_repaired_image_is_done(tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(SIZE, SIZE) // 5)
    (tmp_path / "in" / "b.nii.gz").write_bytes(b"\x1f\x8bcut off")
    assert list(segment(watcher(), tmp_path / "in", tmp_path / "out").broken) == ["b.nii.gz"]
    save_nifti(tmp_path / "in" / "b.nii.gz", noise(20, 20, 2))
    summary = segment(watcher(), tmp_path / "in", tmp_path / "out")
    assert (summary.done, summary.broken) == (("b.nii.gz",), {})


def test_masks_are_no_images(tmp_path: Path) -> None:
    save_picture(tmp_path / "a.png", noise(SIZE, SIZE) // 5)
    assert segment(watcher(), tmp_path, tmp_path / "masks").done == ("a.png",)
    assert segment(watcher(), tmp_path, tmp_path / "masks").done == ()
    assert segment(watcher(), tmp_path, tmp_path / "deep" / "more").done == ("a.png",), "nor are those of another call"


def test_fresh_starts_over(whole: Any, tmp_path: Path) -> None:
    folder, expected = whole("tsd")
    segment(learner(seed=7), folder, tmp_path)
    assert written(tmp_path) != expected
    with pytest.raises(StopError):
        segment(learner(), folder, tmp_path, fresh=True, progress=stop_after(0))
    assert written(tmp_path).keys() == expected.keys(), "masks stay until they are replaced"
    assert segment(learner(), folder, tmp_path).skipped == ()
    assert written(tmp_path) == expected


# Refusals


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": 3}, "batch was 2 and is 3"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"hyper": {**TSD, "lr": 0.5}}, "tsd.lr was 0.01 and is 0.5"),
        ({"method": "bn", "hyper": {}}, "method was 'tsd' and is 'bn'"),
        ({"field": 90.0}, "field was None and is 90.0"),
        ({"size": 40}, "size was 32 and is 40"),
        ({"normalize": "half"}, "normalize was 'imagenet' and is 'half'"),
        ({"model": unet(seed=1)}, "model was '"),
    ],
)
def test_other_settings_go_elsewhere(change: dict[str, Any], says: str, whole: Any, tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(SIZE, SIZE) // 5)
    segment(learner(), tmp_path / "in", tmp_path / "out")
    before = written(tmp_path / "out")
    with pytest.raises(ValueError, match="other settings") as caught:
        segment(learner(**change), tmp_path / "in", tmp_path / "out")
    assert says in str(caught.value)
    assert str(caught.value).count(" was ") == 2, "only what differs is named"
    assert "--out" in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert written(tmp_path / "out") == before
    segment(learner(**change), tmp_path / "in", tmp_path / "out", fresh=True)


class Unsure(nn.Module):
    """Has no answer to bright images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits / (x.mean() < 0.9)


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        (lambda: learner(size=0), "size=0"),
        (lambda: learner(batch=0), "batch=0"),
        (lambda: learner(normalize="none"), "normalize='none'"),
        (lambda: learner(field=0.0), "field=0.0"),
        (lambda: learner(field=float("nan")), "field=nan"),
        (lambda: learner(labels=("disc",)), "for multilabel"),
        (lambda: learner(multilabel=True, labels=("a", "b", "a")), "must differ"),
        (lambda: learner(multilabel=True, labels=("a", "b", "c/d")), "names of files"),
        (lambda: learner(multilabel=True, labels=("a", "b")), "3 labels, not 2: a, b"),
        (lambda: learner(method="tds"), "did you mean 'tsd'"),
        (lambda: learner(method="lame", hyper={}), "not for segmentation"),
        (lambda: learner(device="nowhere"), "device 'nowhere'"),
        (lambda: learner(model=unet(1)), "multilabel=True"),
        (lambda: learner(model=build("digits-net", 3), method="source", hyper={}), "no masks"),
        (lambda: learner(model=nn.Conv2d(1, 2, 1)), "cannot take images of shape (3, 32, 32)"),
        (lambda: watcher(model=Unsure()), "a.png: the model's answer to this batch is not finite"),
    ],
)
def test_what_cannot_be_done_is_said(setup: Callable[[], Setup], says: str, tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", np.full((SIZE, SIZE), 255))
    with pytest.raises(ValueError, match=re.escape(says)):
        segment(setup(), tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists() or (written(tmp_path / "out") == {} and "finite" in says)


def test_folders_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    with pytest.raises(ValueError, match="is not a folder"):
        segment(watcher(), folder, tmp_path / "out")
    (folder / "deep").mkdir(parents=True)
    (folder / "notes.txt").touch()
    with pytest.raises(ValueError, match="holds no image"):
        segment(watcher(), folder, tmp_path / "out")
    save_picture(folder / "a.png", noise(SIZE, SIZE) // 5)
    for out in (folder, tmp_path, folder / "deep" / ".."):
        with pytest.raises(ValueError, match="the images are there"):
            segment(watcher(), folder, out)
    save_picture(folder / "a.jpg", noise(SIZE, SIZE) // 5)
    with pytest.raises(ValueError, match=r"a\.jpg and a\.png would write to one file"):
        segment(watcher(), folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_masks_drawn_by_hand_are_safe(tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(SIZE, SIZE) // 5)
    save_picture(tmp_path / "masks" / "a.png", np.ones((SIZE, SIZE)))
    before = written(tmp_path)
    with pytest.raises(ValueError, match=r"a\.png is there already"):
        segment(watcher(), tmp_path / "in", tmp_path / "masks")
    assert written(tmp_path) == before
    assert not (tmp_path / "masks" / ".trueup").exists()


@pytest.mark.parametrize("damage", ["journal", "format", "state", "no state"])
def test_a_damaged_journal_is_refused(damage: str, tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(SIZE, SIZE) // 5)
    segment(learner(), tmp_path / "in", tmp_path / "out")
    kept = tmp_path / "out" / ".trueup" / "journal.json"
    (state,) = kept.parent.glob("state-*")
    if damage == "journal":
        kept.write_bytes(kept.read_bytes()[:-10])
    elif damage == "format":
        kept.write_text(kept.read_text().replace("segment-1", "segment-9"))
    elif damage == "state":
        state.write_bytes(state.read_bytes()[:-10])
    else:
        state.unlink()
    with pytest.raises(ValueError, match=r"--fresh|--out"):
        segment(learner(), tmp_path / "in", tmp_path / "out")
    assert segment(learner(), tmp_path / "in", tmp_path / "out", fresh=True).masks == 1


def test_settings_are_all_in_the_journal() -> None:
    names = {"size", "normalize", "multilabel", "labels", "method", "field", "batch", "seed", "device", "model"}
    settings = learner(hyper={"params": lambda name: "up" in name}).settings()
    assert names | {"tsd.lr", "tsd.params", "tsd.norm"} <= settings.keys()
    assert settings["tsd.params"] == "a function"
    assert settings["model"] == online.files.digest(unet().state_dict())[:16]


def test_links_back_up_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "in/a.png")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    found, _ = images.find(tmp_path / "in", tmp_path / "out", ("",))
    assert [image.name for image in found] == ["a.png"]


def test_several_volumes_in_a_file_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in").mkdir()
    nibabel.save(nibabel.Nifti1Image(np.zeros((8, 8, 2, 3), dtype=np.int16), np.eye(4)), tmp_path / "in/cine.nii.gz")
    (image,), _ = images.find(tmp_path / "in", tmp_path / "out", ("",))
    image.read(None)
    assert "cine.nii.gz holds 3 volumes; the first is segmented" in caplog.text
