"""Prostates in the layouts of the Medical Segmentation Decathlon and of PROMISE12, written as those are."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813

from trueup.data.datasets import prostate
from trueup.data.domains import BrokenImageError
from trueup.data.slices import SliceDomain

SHAPE = (24, 20, 5)


def values(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, shape).astype(np.int16)


def save_nifti(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.diag([0.5, 0.625, 4.0, 1.0])), path)  # towards the right and the front


def msd_case(root: Path, number: int) -> None:
    save_nifti(root / f"imagesTr/prostate_{number:02d}.nii.gz", values(number, (*SHAPE, 2)))
    zones = (values(number, (*SHAPE, 2))[..., 0] % 3).astype(np.uint8)
    save_nifti(root / f"labelsTr/prostate_{number:02d}.nii.gz", zones)


def save_meta(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = sitk.GetImageFromArray(np.ascontiguousarray(array.T))
    image.SetSpacing((0.5, 0.625, 4.0))
    image.SetOrigin((-60.25, -48.0, 11.5))
    sitk.WriteImage(image, str(path))


def promise_case(folder: Path, number: int, ending: str = "mhd") -> None:
    save_meta(folder / f"Case{number:02d}.{ending}", values(number))
    save_meta(folder / f"Case{number:02d}_segmentation.{ending}", (values(number) % 2).astype(np.int8))


def test_classes_and_structures() -> None:
    assert prostate.DOMAINS == ("msd05", "promise12")
    assert prostate.CLASSES[prostate.STRUCTURES["prostate"][0]] == "prostate"
    assert prostate.FIELD / 256 == 0.625


# Task05 of the Decathlon


def test_msd_pairs_images_and_labels_and_leaves_the_test_out(tmp_path: Path) -> None:
    root = tmp_path / "Task05_Prostate"
    for number in range(0, 20, 2):
        msd_case(root, number)
    save_nifti(root / "imagesTs/prostate_01.nii.gz", values(1, (*SHAPE, 2)))
    (root / "imagesTr/._prostate_00.nii.gz").write_bytes(b"of a mac")
    (root / "dataset.json").write_text("{}")
    (root / "notes.txt").write_text("mine")
    found = prostate.find_prostate_cases(tmp_path, "msd05")
    assert sorted(case.name for case in found.cases) == [f"prostate_{n:02d}" for n in range(0, 20, 2)]
    assert (len(found.parts["train"]), len(found.parts["test"])) == (8, 2)
    assert {case.slices for case in found.cases} == {5}
    assert found.missing == []
    assert found.others == ["Task05_Prostate/notes.txt"]
    assert [c.name for c in prostate.find_prostate_cases(root, "msd05").cases] == [c.name for c in found.cases]


def test_an_msd_case_by_hand(tmp_path: Path) -> None:
    msd_case(tmp_path, 16)
    (case,) = prostate.find_prostate_cases(tmp_path, "msd05").cases
    assert case.name == "prostate_16"
    volume = case.read()
    shown = values(16, (*SHAPE, 2))[..., 0].transpose(2, 1, 0)[:, ::-1, ::-1]  # T2, from the front, from the right
    low, high = np.percentile(shown, [1, 99])
    assert np.allclose(volume.image[..., 0], np.clip(255 * (shown - low) / (high - low), 0, 255), atol=1)
    assert volume.image.shape == (5, 20, 24, 1)
    assert volume.mask is not None
    assert np.array_equal(volume.mask, shown % 3 > 0)  # both zones are prostate
    assert volume.mask.dtype == np.uint8
    assert volume.spacing == (4.0, 0.625, 0.5)
    assert volume.box == (-118, -148, 256, 320)  # 160 mm around 20 rows of 0.625 and 24 columns of 0.5
    assert SliceDomain("msd05", [case]).mask(2, 32).shape == (32, 32)


def test_what_msd_lacks_is_listed(tmp_path: Path) -> None:
    for number in (0, 1, 2):
        msd_case(tmp_path, number)
    (tmp_path / "labelsTr/prostate_00.nii.gz").unlink()
    (tmp_path / "imagesTr/prostate_02.nii.gz").unlink()
    found = prostate.find_prostate_cases(tmp_path, "msd05")
    assert found.missing == ["imagesTr/prostate_00.nii.gz has no mask", "labelsTr/prostate_02.nii.gz has no image"]
    assert [case.name for case in found.cases] == ["prostate_01"]


def test_other_tasks_of_the_decathlon_do_not_matter(tmp_path: Path) -> None:
    msd_case(tmp_path / "Task05_Prostate", 3)
    save_nifti(tmp_path / "Task04_Hippocampus/imagesTr/hippocampus_003.nii.gz", values(0))
    assert [case.name for case in prostate.find_prostate_cases(tmp_path, "msd05").cases] == ["prostate_03"]


# PROMISE12


def test_promise12_in_three_parts_and_flat(tmp_path: Path) -> None:
    for number in range(10):
        promise_case(tmp_path / "parts" / f"TrainingData_Part{1 + number // 4}", number)
        promise_case(tmp_path / "flat", number)
    save_meta(tmp_path / "parts/TestData/Case03.mhd", values(99))  # another patient of the same name
    found = prostate.find_prostate_cases(tmp_path / "parts", "promise12")
    assert sorted(case.name for case in found.cases) == [f"Case{n:02d}" for n in range(10)]
    assert (len(found.parts["train"]), len(found.parts["test"])) == (8, 2)
    assert (found.missing, found.others) == ([], [])
    flat = prostate.find_prostate_cases(tmp_path / "flat", "promise12")
    assert [case.name for case in flat.parts["test"]] == [case.name for case in found.parts["test"]]
    three = next(case for case in found.cases if case.name == "Case03").read()
    assert three.mask is not None
    assert np.array_equal(three.mask, values(3).transpose(2, 1, 0) % 2)
    assert three.spacing == (4.0, 0.625, 0.5)
    assert three.box == (-118, -148, 256, 320)
    with pytest.raises(ValueError, match=r"the image of Case00 exists twice: .*flat.* and .*TrainingData_Part1"):
        prostate.find_prostate_cases(tmp_path, "promise12")


def test_promise12_as_compressed_single_files(tmp_path: Path) -> None:
    promise_case(tmp_path, 7, ending="mha")
    (case,) = prostate.find_prostate_cases(tmp_path, "promise12").cases
    assert (case.name, case.slices) == ("Case07", 5)
    assert case.read().image.max() == 255


def test_both_domains_show_the_same_patient_alike(tmp_path: Path) -> None:
    # Stored towards the right and the front in one, towards the left and the back in the other.
    first = values(7)
    save_nifti(tmp_path / "imagesTr/prostate_07.nii.gz", np.stack([first, values(8)], axis=3))
    save_nifti(tmp_path / "labelsTr/prostate_07.nii.gz", (first % 2).astype(np.uint8))
    save_meta(tmp_path / "Case07.mhd", first[::-1, ::-1])
    save_meta(tmp_path / "Case07_segmentation.mhd", (first[::-1, ::-1] % 2).astype(np.int8))
    one, other = (prostate.find_prostate_cases(tmp_path, domain).cases[0].read() for domain in prostate.DOMAINS)
    assert np.array_equal(one.image, other.image)
    assert one.mask is not None
    assert other.mask is not None
    assert np.array_equal(one.mask, other.mask)
    assert (one.spacing, one.box) == (other.spacing, other.box)


def test_what_promise12_lacks_is_listed_or_found_when_read(tmp_path: Path) -> None:
    for number in (0, 1, 2):
        promise_case(tmp_path, number)
    (tmp_path / "Case00_segmentation.mhd").unlink()
    (tmp_path / "Case01.mhd").unlink()
    (tmp_path / "Case02.raw").unlink()
    found = prostate.find_prostate_cases(tmp_path, "promise12")
    assert found.missing == ["Case00.mhd has no mask", "Case01_segmentation.mhd has no image"]
    assert found.others == []
    (case,) = found.cases
    with pytest.raises(BrokenImageError, match=r"Case02\.mhd: Case02\.raw, which holds its voxels, is missing"):
        case.read()


def test_zones_are_no_labels_of_promise12(tmp_path: Path) -> None:
    promise_case(tmp_path, 0)
    save_meta(tmp_path / "Case00_segmentation.mhd", (values(0) % 3).astype(np.int8))
    with pytest.raises(BrokenImageError, match=r"Case00_segmentation\.mhd: values 2 are not labels of PROMISE12"):
        prostate.find_prostate_cases(tmp_path, "promise12").cases[0].read()


def test_a_mask_of_another_shape(tmp_path: Path) -> None:
    msd_case(tmp_path, 0)
    save_nifti(tmp_path / "labelsTr/prostate_00.nii.gz", np.zeros((20, 24, 5), dtype=np.uint8))
    with pytest.raises(BrokenImageError, match=r"prostate_00\.nii\.gz has 20×24×5 voxels, its image 24×20×5"):
        prostate.find_prostate_cases(tmp_path, "msd05").cases[0].read()


@pytest.mark.parametrize(
    ("domain", "layout"), [("msd05", "labelsTr/prostate_00.nii.gz"), ("promise12", "Case00_segmentation.mhd")]
)
def test_nothing_there(tmp_path: Path, domain: str, layout: str) -> None:
    with pytest.raises(ValueError, match=rf"holds no image with a mask of '{domain}'; looked for .*{layout}"):
        prostate.find_prostate_cases(tmp_path, domain)


def test_both_below_one_folder(tmp_path: Path) -> None:
    msd_case(tmp_path, 0)
    promise_case(tmp_path, 7, ending="mha")
    for domain in prostate.DOMAINS:
        found = prostate.find_prostate_cases(tmp_path, domain)
        assert (len(found.cases), found.missing, found.others) == (1, [], [])


def test_another_domain(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prostate has no domain 'ukbb'; there are: msd05, promise12"):
        prostate.find_prostate_cases(tmp_path, "ukbb")
