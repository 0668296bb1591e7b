"""3-D networks over whole volumes: masks equal those that MONAI's own call gives, and lie where their volumes do."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
import torch
from clinic import Array, StopError, noise, numbers, oblique, save_nifti, save_picture, stop_after, written
from torch import Tensor, nn

import trueup
from trueup.deploy import SegmentConfig, segment_folder

WINDOW = (8, 6, 4)
LIMITS = (100.0, 900.0)
TENT = {"lr": 1e-2}


class Net(nn.Module):
    """A 3-D network whose axes are not alike, so that turned volumes have other masks."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU())
        self.head = nn.Conv3d(4, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def net(classes: int = 3) -> nn.Module:
    torch.manual_seed(5)
    model = Net(classes)
    nn.init.normal_(model.head.weight)
    return model.eval()


def setup(**values: Any) -> SegmentConfig:
    return SegmentConfig(
        **{"model": net(), "window": WINDOW, "batch": 1, "range": LIMITS, "method": "source", **values}
    )


@pytest.fixture(scope="module")
def inferers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import monai.inferers
    return monai.inferers


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Volumes of several sizes and directions, one smaller than the window."""
    folder = tmp_path / "scans"
    save_nifti(folder / "a.nii.gz", noise(13, 17, 9, seed=1))
    turned = np.zeros((4, 4))
    turned[[2, 0, 1, 3], [0, 1, 2, 3]] = -2.0, 1.5, 1.0, 1.0  # stored: down, right, front
    turned[:3, 3] = 5, 6, 7
    save_nifti(folder / "b" / "turned.nii", noise(7, 20, 11, seed=2), turned)
    save_nifti(folder / "c.nii", noise(10, 3, 2, seed=3), oblique((1.0, 1.0, 1.0)))
    return folder


def as_seen(path: Path) -> Array:
    """A volume with axes towards right, front and head, scaled, by nibabel."""
    canonical = nibabel.as_closest_canonical(nibabel.load(path))
    low, high = LIMITS
    return ((canonical.get_fdata(dtype=np.float32) - low) / (high - low)).clip(0, 1)


def logits_of(inferers: ModuleType, values: Array, predict: Callable[[Tensor], Tensor], **how: Any) -> Tensor:
    x = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))[None, None]
    with torch.no_grad():
        said: Tensor = inferers.sliding_window_inference(x, WINDOW, how.pop("batch", 1), predict, **how)[0]
    return said


@pytest.mark.parametrize("how", [{}, {"overlap": 0.5, "batch": 3}])
def test_masks_of_a_frozen_network_are_those_of_monai(
    scans: Path, tmp_path: Path, inferers: ModuleType, how: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    summary = segment_folder(setup(**how), scans, out)
    assert summary.done == ("a.nii.gz", "b/turned.nii", "c.nii")
    assert summary.updates == 0
    for name in summary.done:
        image, mask = nibabel.load(scans / name), nibabel.load(out / name)
        assert np.array_equal(mask.affine, image.affine)
        assert mask.shape == image.shape
        assert mask.get_data_dtype() == np.uint8
        expected = logits_of(inferers, as_seen(scans / name), net(), **how).argmax(dim=0)
        found = nibabel.as_closest_canonical(mask).get_fdata()
        assert np.array_equal(found, expected.numpy())
        assert len(np.unique(found)) > 1


def test_masks_of_an_adapting_network_are_those_of_a_plain_loop(
    scans: Path, tmp_path: Path, inferers: ModuleType
) -> None:
    summary = segment_folder(setup(method="tent", hyper=TENT, batch=2), scans, tmp_path / "out")
    adapter = trueup.adapt(net(), "tent", **TENT)
    for name in summary.done:
        expected = logits_of(inferers, as_seen(scans / name), adapter, batch=2).argmax(dim=0)
        found = nibabel.as_closest_canonical(nibabel.load(tmp_path / "out" / name)).get_fdata()
        assert np.array_equal(found, expected.numpy())
    assert summary.updates == adapter.updates > 3
    segment_folder(setup(), scans, tmp_path / "frozen")
    assert written(tmp_path / "frozen") != written(tmp_path / "out")


def test_values_are_normalised_after_they_are_scaled(scans: Path, tmp_path: Path, inferers: ModuleType) -> None:
    usual = setup(range=None, normalize=((0.5,), (0.25,)))
    segment_folder(usual, scans / "b", tmp_path / "out")
    values = nibabel.as_closest_canonical(nibabel.load(scans / "b" / "turned.nii")).get_fdata(dtype=np.float32)
    low, high = np.percentile(values, [1, 99])
    scaled = (((values - low) / (high - low)).clip(0, 1) - 0.5) / 0.25
    expected = logits_of(inferers, scaled, net()).argmax(dim=0)
    found = nibabel.as_closest_canonical(nibabel.load(tmp_path / "out" / "turned.nii")).get_fdata()
    assert np.mean(found != expected.numpy()) < 0.002  # float32 and float64 round a few voxels differently
    segment_folder(setup(range=None), scans / "b", tmp_path / "plain")
    assert written(tmp_path / "plain") != written(tmp_path / "out")


def test_each_label_has_a_mask(scans: Path, tmp_path: Path, inferers: ModuleType) -> None:
    summary = segment_folder(setup(model=net(2), multilabel=True, labels=("liver", "tumour")), scans, tmp_path / "out")
    assert summary.masks == 6
    expected = logits_of(inferers, as_seen(scans / "c.nii"), net(2)) > 0
    for label, mask in zip(("liver", "tumour"), expected.numpy(), strict=True):
        found = nibabel.as_closest_canonical(nibabel.load(tmp_path / "out" / f"c-{label}.nii"))
        assert np.array_equal(found.get_fdata(), mask)


def test_formats_agree(tmp_path: Path) -> None:
    image = sitk.GetImageFromArray(noise(9, 12, 10))
    image.SetSpacing((1.5, 1.25, 2.0))
    image.SetDirection((0, 1, 0, 0, 0, -1, -1, 0, 0))
    (tmp_path / "in").mkdir()
    for ending in (".nii", ".mha"):
        sitk.WriteImage(image, str(tmp_path / "in" / f"scan{ending}"))
    segment_folder(setup(), tmp_path / "in", tmp_path / "out")
    first, second = (sitk.ReadImage(str(tmp_path / "out" / f"scan{ending}")) for ending in (".nii", ".mha"))
    assert np.array_equal(sitk.GetArrayFromImage(first), sitk.GetArrayFromImage(second))
    assert second.GetDirection() == image.GetDirection()
    assert len(np.unique(sitk.GetArrayFromImage(second))) > 1


@pytest.mark.parametrize("stop", [1, 30])
def test_work_that_was_stopped_goes_on_to_the_same_masks(scans: Path, tmp_path: Path, stop: int) -> None:
    segment_folder(setup(method="tent", hyper=TENT), scans, tmp_path / "whole")
    out = tmp_path / "out"
    with pytest.raises(StopError):
        segment_folder(setup(method="tent", hyper=TENT), scans, out, keep_every=0, progress=stop_after(stop))
    segment_folder(setup(method="tent", hyper=TENT), scans, out)
    assert written(out) == written(tmp_path / "whole")
    again = segment_folder(setup(method="tent", hyper=TENT), scans, out)
    assert (again.done, len(again.skipped)) == ((), 3)


def test_what_is_no_volume_is_left_out(scans: Path, tmp_path: Path) -> None:
    save_picture(scans / "eye.png", noise(20, 20, 3))
    (scans / "cut.nii").write_bytes(b"no volume")
    summary = segment_folder(setup(), scans, tmp_path / "out")
    assert summary.others == ("eye.png",)
    assert list(summary.broken) == ["cut.nii"]
    assert summary.masks == 3


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"window": (8, 8)}, "window=(8, 8) must be three"),
        ({"window": (8, 8, 0)}, "window=0"),
        ({"overlap": 1.0}, "overlap=1.0 must be from 0 to less than 1"),
        ({"field": 100.0}, "field=100.0 is for slices"),
        ({"resize": "crop"}, "resize='crop' is for slices"),
        ({"normalize": ((0.1, 0.2, 0.3), (1.0,))}, "are of 3 channels, and a grey network has one"),
    ],
)
def test_settings_that_mean_nothing_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        setup(**values)


def test_networks_that_are_not_for_windows_are_refused_before_anything_is_written(scans: Path, tmp_path: Path) -> None:
    flat = nn.Sequential(nn.Conv2d(3, 3, 1))
    with pytest.raises(ValueError, match=r"a 3-D network sees windows \(N, 1, 8, 6, 4\)"):
        segment_folder(setup(model=flat), scans, tmp_path / "out")
    with pytest.raises(ValueError, match=r"the network is 2-D, .*: leave --volumes out, and it sees slices") as refused:
        segment_folder(setup(model=flat), scans, tmp_path / "out")
    assert "--window" not in str(refused.value)
    with pytest.raises(ValueError, match="choose another --window"):
        segment_folder(setup(model=nn.Conv3d(1, 3, 9)), scans, tmp_path / "out")
    with pytest.raises(ValueError, match=r"windows of \(8, 6, 4\) voxels with \(4, 3, 2\)"):
        segment_folder(setup(model=nn.Conv3d(1, 2, 2, stride=2)), scans, tmp_path / "out")
    with pytest.raises(ValueError, match="--volumes if it is 3-D"):
        segment_folder(SegmentConfig(net(), size=16), scans, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_monai_an_error_says_what_to_install(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "monai.inferers", None)
    with pytest.raises(ImportError, match="pip install monai"):
        segment_folder(setup(), scans, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_windows_are_other_settings(scans: Path, tmp_path: Path) -> None:
    segment_folder(setup(), scans, tmp_path / "out")
    for values, says in (({"window": (8, 8, 4)}, "window was"), ({"overlap": 0.5}, "overlap was 0.25 and is 0.5")):
        with pytest.raises(ValueError, match=says):
            segment_folder(setup(**values), scans, tmp_path / "out")
    assert numbers(tmp_path / "out" / "c.nii").shape == (10, 3, 2)
