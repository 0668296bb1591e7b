"""Masks of a folder lie on their images, voxel by voxel."""

from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from clinic import SIZE, noise, numbers, oblique, save_nifti, save_picture, watcher, written
from PIL import Image

from trueup.deploy import SegmentSummary, segment_folder


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_a_mask_lies_on_its_nifti_image(ending: str, tmp_path: Path) -> None:
    values = np.where(noise(SIZE, SIZE, 4) > 500, 1000, 0).astype(np.int16)
    path = save_nifti(tmp_path / "in" / f"a{ending}", values, oblique((1.0, 1.0, 6.0)))
    summary = segment_folder(watcher(), tmp_path / "in", tmp_path / "out")
    mask = nibabel.load(tmp_path / "out" / f"a{ending}")
    assert np.array_equal(np.asarray(mask.dataobj), values > 0)
    assert np.array_equal(mask.affine, nibabel.load(path).affine)
    assert mask.get_data_dtype() == np.uint8
    assert summary == SegmentSummary((f"a{ending}",), (), {}, (), 1, 0)


@pytest.mark.parametrize(("ending", "other"), [(".mha", ".mha"), (".mhd", ".mha"), (".nrrd", ".nrrd")])
def test_a_mask_lies_on_its_itk_image(ending: str, other: str, tmp_path: Path) -> None:
    values = np.where(noise(3, SIZE, SIZE) > 500, 1000, 0).astype(np.int16)
    image = sitk.GetImageFromArray(values)
    image.SetSpacing((1.0, 1.0, 6.0))
    image.SetOrigin((3.0, -8.0, 20.5))
    image.SetDirection((0.8, -0.6, 0, 0.6, 0.8, 0, 0, 0, 1))
    (tmp_path / "in").mkdir()
    sitk.WriteImage(image, str(tmp_path / "in" / f"a{ending}"))
    assert segment_folder(watcher(), tmp_path / "in", tmp_path / "out").others == ()
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
    segment_folder(watcher(), tmp_path / "in", tmp_path / "out")
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
    segment_folder(watcher(-0.5, 0.3, 0.8), tmp_path / "in", tmp_path / "out")
    assert np.array_equal(numbers(tmp_path / "out" / "a.png")[0, :: SIZE // 4], [0, 1, 2, 3])


def test_nothing_is_seen_beyond_the_field(tmp_path: Path) -> None:
    rows, columns = 40, 48
    values = np.full((columns, rows, 2), 900, dtype=np.int16)
    values[:, :4] = 0  # beyond the field
    save_nifti(tmp_path / "in" / "a.nii", values, np.diag([1.0, 2.0, 8.0, 1.0]))
    save_picture(tmp_path / "in" / "b.png", np.full((rows, columns), 255))
    segment_folder(watcher(field=20.0), tmp_path / "in", tmp_path / "out")
    mask = numbers(tmp_path / "out" / "a.nii")
    expected = np.zeros_like(mask)
    expected[14:34, 15:25] = 1  # 20 columns of 1 mm, 10 rows of 2 mm
    assert np.array_equal(mask, expected)
    assert numbers(tmp_path / "out" / "b.png")[2:-2].all(), "pictures are not measured in millimetres"


def test_a_field_that_makes_no_sense_is_the_images_fault(tmp_path: Path) -> None:
    save_nifti(tmp_path / "in" / "a.nii", noise(20, 20, 2), np.diag([0.001, 0.001, 0.006, 1.0]))
    save_nifti(tmp_path / "in" / "b.nii", noise(20, 20, 2), np.diag([900.0, 900.0, 6000.0, 1.0]))
    save_nifti(tmp_path / "in" / "c.nii", noise(20, 20, 2))
    summary = segment_folder(watcher(field=350.0), tmp_path / "in", tmp_path / "out")
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
    summary = segment_folder(setup, tmp_path / "in", tmp_path / "out")
    one, two = labels or ("1", "2")
    assert summary.masks == 4
    expected = {f"a-{one}.png", f"a-{two}.png", f"b-{one}.nii.gz", f"b-{two}.nii.gz"}
    assert set(written(tmp_path / "out")) == expected
    for label, threshold in ((one, 64), (two, 230)):
        assert np.array_equal(numbers(tmp_path / "out" / f"a-{label}.png"), grey > threshold)
        assert np.array_equal(numbers(tmp_path / "out" / f"b-{label}.nii.gz"), stored > threshold)
