"""Hearts in the layouts of ACDC and of MS-CMRSeg 2019, written as those are."""

import pickle
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from trueup.data.datasets import cardiac
from trueup.data.domains import BrokenImageError
from trueup.data.slices import SliceDomain

SHAPE = (24, 20, 5)


def values(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, SHAPE).astype(np.int16)


def save(path: Path, array: np.ndarray, zooms: tuple[float, ...] = (1.5, 1.25, 10.0)) -> Path:
    """With the headers of ACDC: only pixdim and the qform know the size of voxels."""
    header = nib.Nifti1Header()
    header.set_data_shape(array.shape)
    header.set_data_dtype(array.dtype)
    header.set_qform(np.diag([-zooms[0], -zooms[1], zooms[2], 1.0]), code=1)
    header.set_sform(np.diag([-1.0, -1.0, 1.0, 1.0]), code=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, header.get_best_affine(), header), path)
    return path


def acdc_patient(folder: Path, number: int, ends: tuple[int, int] = (1, 12), info: str | None = None) -> Path:
    """Info.cfg, the whole beat, and two frames with their masks."""
    name = f"patient{number:03d}"
    for i, frame in enumerate(ends):
        save(folder / name / f"{name}_frame{frame:02d}.nii.gz", values(10 * number + i))
        save(folder / name / f"{name}_frame{frame:02d}_gt.nii.gz", (values(10 * number + i) % 4).astype(np.uint8))
    (folder / name / f"{name}_4d.nii.gz").write_bytes(b"never opened")
    text = f"ED: {ends[0]}\nES: {ends[1]}\nGroup: DCM\nHeight: 184.0\nNbFrame: 30\nWeight: 95.0\n"
    (folder / name / "Info.cfg").write_bytes((text if info is None else info).encode())
    return folder / name


def lge_image(root: Path, number: int) -> Path:
    return save(root / "C0LET2_nii45_for_challenge19/c0t2lge" / f"patient{number}_LGE.nii.gz", values(number))


def lge_mask(root: Path, number: int, folder: str) -> Path:
    codes = np.array([0, 600, 200, 500])[values(number) % 4].astype(np.int16)  # right ventricle, myocardium, left
    return save(root / folder / f"patient{number}_LGE_manual.nii.gz", codes)


def test_the_names_of_classes_and_structures_agree() -> None:
    assert cardiac.DOMAINS == ("acdc", "lge")
    assert [cardiac.CLASSES[cardiac.STRUCTURES[name][0]] for name in ("RV", "MYO", "LV")] == [
        "right ventricle",
        "myocardium",
        "left ventricle",
    ]
    assert round(cardiac.FIELD / 256, 2) == 1.37


# ACDC


def test_acdc_gives_two_cases_of_each_patient_and_divides_by_patient(tmp_path: Path) -> None:
    for number in range(1, 11):
        acdc_patient(tmp_path / "training", number, (1, 5 + number))
    acdc_patient(tmp_path / "testing", 101)
    (tmp_path / "training/patient002/._patient002_frame01.nii.gz").write_bytes(b"of a mac")
    found = cardiac.find_cardiac_cases(tmp_path, "acdc")
    assert sorted(case.name for case in found.cases) == sorted(
        f"patient{n:03d}_frame{frame:02d}" for n in range(1, 11) for frame in (1, 5 + n)
    )
    assert all(case.patient == case.name[:10] for case in found.cases)
    assert {case.slices for case in found.cases} == {5}
    assert (len(found.parts["train"]), len(found.parts["test"])) == (16, 4)
    assert not {c.patient for c in found.parts["train"]} & {c.patient for c in found.parts["test"]}
    assert (found.missing, found.others) == ([], [])
    again = cardiac.find_cardiac_cases(tmp_path / "training", "acdc")  # the folder itself, and the same parts
    assert [c.name for c in again.parts["test"]] == [c.name for c in found.parts["test"]]


def test_an_acdc_case_by_hand(tmp_path: Path) -> None:
    acdc_patient(tmp_path / "training", 7)
    case = next(c for c in cardiac.find_cardiac_cases(tmp_path, "acdc").cases if c.name == "patient007_frame12")
    volume = case.read()
    stored = values(71).transpose(2, 1, 0)
    low, high = np.percentile(stored, [1, 99])
    assert np.allclose(volume.image[..., 0], np.clip(255 * (stored - low) / (high - low), 0, 255), atol=1)
    assert volume.image.dtype == np.uint8
    assert volume.mask is not None
    assert volume.mask.dtype == np.uint8
    assert np.array_equal(volume.mask, stored % 4)
    assert volume.spacing == (10.0, 1.25, 1.5)
    assert volume.box == (-130, -105, 280, 233)  # 350 mm around 20 rows of 1.25 and 24 columns of 1.5
    domain = SliceDomain("acdc", [case])
    assert domain.image(3, 64).shape == (64, 64, 3)


@pytest.mark.parametrize(
    "info",
    [
        "ED: 1\r\nES: 12\r\nGroup: DCM\r\n",
        "ED:1\nES:12",
        "\n  ES : 12  \n\n ed: 01\nGroup: NOR\n",
        "\ufeffED: 1\nES: 12\nGroup: é\n",
    ],
)
def test_ways_to_write_info(tmp_path: Path, info: str) -> None:
    folder = acdc_patient(tmp_path, 3, info=info)
    save(folder / "patient003_frame07.nii.gz", values())  # not one of the two
    found = cardiac.find_cardiac_cases(tmp_path, "acdc")
    assert [case.name for case in found.cases] == ["patient003_frame01", "patient003_frame12"]
    assert found.others == ["patient003/patient003_frame07.nii.gz"]


@pytest.mark.parametrize("info", ["", "ED: 1\n", "ED: one\nES: 12\n", "ES: 12\nED:\n"])
def test_an_info_that_names_no_frames(tmp_path: Path, info: str) -> None:
    acdc_patient(tmp_path, 3, info=info)
    with pytest.raises(ValueError, match=r"patient003/Info\.cfg does not name the frames .*`ED: 1` and `ES: 12`"):
        cardiac.find_cardiac_cases(tmp_path, "acdc")


def test_without_an_info_all_frames_are_taken(tmp_path: Path) -> None:
    (acdc_patient(tmp_path, 3) / "Info.cfg").unlink()
    assert [case.name for case in cardiac.find_cardiac_cases(tmp_path, "acdc").cases] == [
        "patient003_frame01",
        "patient003_frame12",
    ]


def test_what_acdc_lacks_is_listed(tmp_path: Path) -> None:
    one, two, three = (acdc_patient(tmp_path, n) for n in (1, 2, 3))
    (one / "patient001_frame12_gt.nii.gz").unlink()
    (two / "patient002_frame01.nii.gz").unlink()
    (three / "patient003_frame12.nii.gz").unlink()
    (three / "patient003_frame12_gt.nii.gz").unlink()
    found = cardiac.find_cardiac_cases(tmp_path, "acdc")
    assert found.missing == [
        "patient001/patient001_frame12.nii.gz has no mask",
        "patient002/patient002_frame01_gt.nii.gz has no image",
        "patient003/patient003_frame12.nii.gz does not exist",  # Info.cfg names it
    ]
    assert len(found.cases) == 3


def test_masks_that_do_not_fit(tmp_path: Path) -> None:
    folder = acdc_patient(tmp_path, 1)
    cases = {case.name: case for case in cardiac.find_cardiac_cases(tmp_path, "acdc").cases}
    save(folder / "patient001_frame01_gt.nii.gz", np.where(values() > 450, 7, 9).astype(np.uint8))
    with pytest.raises(BrokenImageError, match=r"patient001_frame01_gt\.nii\.gz: values 7, 9 are not labels of ACDC"):
        cases["patient001_frame01"].read()
    save(folder / "patient001_frame12_gt.nii.gz", np.zeros((24, 20, 4), dtype=np.uint8))
    with pytest.raises(BrokenImageError, match=r"frame12_gt\.nii\.gz has 24×20×4 voxels, its image 24×20×5"):
        cases["patient001_frame12"].read()


def test_scanning_reads_headers_alone_and_reading_finds_the_damage(tmp_path: Path) -> None:
    folder = acdc_patient(tmp_path, 1)
    path = folder / "patient001_frame01.nii.gz"
    path.write_bytes(path.read_bytes()[:-200])
    case = cardiac.find_cardiac_cases(tmp_path, "acdc").cases[0]
    assert (case.name, case.slices) == ("patient001_frame01", 5)
    with pytest.raises(BrokenImageError, match=r"patient001_frame01\.nii\.gz: \S"):
        case.read()
    path.write_bytes(b"")
    found = cardiac.find_cardiac_cases(tmp_path, "acdc")
    assert [case.name for case in found.cases] == ["patient001_frame01", "patient001_frame12"]
    (line,) = found.broken
    assert line.startswith("patient001_frame01.nii.gz: ")
    assert found.cases[0].slices == 1
    with pytest.raises(BrokenImageError) as error:
        pickle.loads(pickle.dumps(found.cases))[0].read()
    assert str(error.value) == line
    assert found.cases[1].read().image.shape == (5, 20, 24, 1)


def test_results_that_lie_below_the_same_folder_are_no_images(tmp_path: Path) -> None:
    acdc_patient(tmp_path / "training", 1)
    save(tmp_path / "results/patient001_frame01.nii.gz", np.zeros(SHAPE, dtype=np.uint8))
    found = cardiac.find_cardiac_cases(tmp_path, "acdc")
    assert found.others == ["results/patient001_frame01.nii.gz"]
    assert found.cases[0].read().image.max() == 255
    acdc_patient(tmp_path / "copy", 1)
    with pytest.raises(ValueError, match=r"the image of patient001_frame01 exists twice: .* keep one of them"):
        cardiac.find_cardiac_cases(tmp_path, "acdc")


# MS-CMRSeg


@pytest.mark.parametrize("later", ["C0LET2_gt_for_challenge19/LGE_manual_35_TestData", "lge_test_gt"])
def test_lge_finds_masks_in_both_places(tmp_path: Path, later: str) -> None:
    for number in range(1, 13):
        lge_image(tmp_path, number)
    for number in range(1, 6):
        lge_mask(tmp_path, number, "C0LET2_nii45_for_challenge19/lgegt")
    for number in range(6, 11):
        lge_mask(tmp_path, number, later)
    for other in ("c0t2lge/patient1_C0", "c0t2lge/patient1_T2", "c0gt/patient1_C0_manual"):
        save(tmp_path / "C0LET2_nii45_for_challenge19" / f"{other}.nii.gz", values())
    (tmp_path / "readme.txt").write_text("read me")
    found = cardiac.find_cardiac_cases(tmp_path, "lge")
    names = [case.name for case in found.cases]
    assert sorted(names, key=lambda n: int(n[7:-4])) == [f"patient{n}_LGE" for n in range(1, 11)]
    assert (len(found.parts["train"]), len(found.parts["test"])) == (8, 2)
    assert [c.patient for c in found.cases] == [name[:-4] for name in names]
    numbers = [int(c.patient[7:]) for c in found.parts["train"]]
    assert numbers == sorted(numbers)  # 9 before 10
    folder = "C0LET2_nii45_for_challenge19/c0t2lge"
    assert found.missing == [f"{folder}/patient{n}_LGE.nii.gz has no mask" for n in (11, 12)]
    assert found.others == ["readme.txt"]


def test_lge_is_coded_as_acdc_by_hand(tmp_path: Path) -> None:
    lge_image(tmp_path, 4)
    codes = np.zeros(SHAPE, dtype=np.int16)
    codes[0, 0, 0], codes[1, 0, 0], codes[2, 0, 0] = 600, 200, 500
    save(tmp_path / "lgegt/patient4_LGE_manual.nii.gz", codes)
    mask = cardiac.find_cardiac_cases(tmp_path, "lge").cases[0].read().mask
    assert mask is not None
    assert mask[0, 0, :4].tolist() == [1, 2, 3, 0]  # right ventricle, myocardium, left ventricle
    assert np.count_nonzero(mask) == 3


def test_a_mask_in_the_coding_of_acdc_is_none_of_lge(tmp_path: Path) -> None:
    lge_image(tmp_path, 4)
    save(tmp_path / "lgegt/patient4_LGE_manual.nii.gz", (values() % 4).astype(np.uint8))
    with pytest.raises(BrokenImageError, match=r"values 1, 2, 3 are not labels of MS-CMRSeg; expected 0, 600, 200"):
        cardiac.find_cardiac_cases(tmp_path, "lge").cases[0].read()


def test_a_second_mask_of_the_same_heart_is_not_chosen_by_chance(tmp_path: Path) -> None:
    lge_image(tmp_path, 4)
    lge_mask(tmp_path, 4, "lgegt")
    lge_mask(tmp_path, 4, "other")
    with pytest.raises(ValueError, match="the label of patient4_LGE exists twice"):
        cardiac.find_cardiac_cases(tmp_path, "lge")


@pytest.mark.parametrize(
    ("domain", "layout"), [("acdc", "patient001_frame01_gt.nii.gz"), ("lge", "patient1_LGE_manual.nii.gz")]
)
def test_nothing_there(tmp_path: Path, domain: str, layout: str) -> None:
    with pytest.raises(ValueError, match=rf"holds no image with a mask of '{domain}'; looked for .*{layout}"):
        cardiac.find_cardiac_cases(tmp_path, domain)
    lge_image(tmp_path, 4)  # an image alone is nothing either
    acdc_patient(tmp_path / "testing", 101)
    with pytest.raises(ValueError, match="looked for"):
        cardiac.find_cardiac_cases(tmp_path, domain)


def test_both_below_one_folder(tmp_path: Path) -> None:
    acdc_patient(tmp_path / "training", 1)
    acdc_patient(tmp_path / "testing", 101)
    lge_image(tmp_path, 4)
    lge_mask(tmp_path, 4, "lgegt")
    (tmp_path / "readme.txt").write_text("read me")
    for domain, cases in (("acdc", 2), ("lge", 1)):
        found = cardiac.find_cardiac_cases(tmp_path, domain)
        assert (len(found.cases), found.missing, found.others) == (cases, [], ["readme.txt"])
        assert [*found.parts] == ["train"]  # of one patient nothing is left to test with


def test_another_domain(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cardiac has no domain 'mnms'; there are: acdc, lge"):
        cardiac.find_cardiac_cases(tmp_path, "mnms")
