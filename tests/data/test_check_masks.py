"""The check of images with masks: true small copies are well, and each thing that is done to them is named."""

import dataclasses
import gzip
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from PIL import Image

from trueup.data.cards import CARDS
from trueup.data.check import ImageReport, check_dataset
from trueup.data.check_masks import MaskReport
from trueup.data.datasets import phantoms

Pixels = NDArray[np.uint8]


def see(name: str, root: Path | None = None, **settings: bool) -> MaskReport:
    report = check_dataset(name, root, decode_all=not settings.get("fast"))
    assert isinstance(report, MaskReport)
    return report


def expect(monkeypatch: pytest.MonkeyPatch, name: str, **domains: int) -> None:
    """A card that says so many cases."""
    there = {domain.replace("_", "-"): n for domain, n in domains.items()}
    monkeypatch.setitem(CARDS, name, dataclasses.replace(CARDS[name], domains=there))


# Eyes, in the archive of crops


def save(path: Path, pixels: Pixels) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def eye(disc: int = 8, cup: int = 4, height: int = 20, width: int = 10, rim: int = 128, inside: int = 0) -> Pixels:
    """255 around a square disc, with a square cup in its middle."""
    mask = np.full((height, width), 255, dtype=np.uint8)
    mask[1 : 1 + disc, 1 : 1 + disc] = rim
    edge = 1 + (disc - cup) // 2
    mask[edge : edge + cup, edge : edge + cup] = inside
    return mask


def crop(root: Path, domain: int, part: str, name: str, mask: Pixels, size: tuple[int, ...] = ()) -> Path:
    folder = root / f"Domain{domain}" / part / "ROIs"
    save(folder / f"image/{name}.png", np.full((*(size or mask.shape), 3), 90, dtype=np.uint8))
    save(folder / f"mask/{name}.png", mask)
    return folder


@pytest.fixture
def eyes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three of Drishti-GS and two of REFUGE, and a card that knows of no others."""
    expect(monkeypatch, "fundus", refuge=2, drishti_gs=3)
    monkeypatch.setattr("trueup.data.datasets.fundus.DOMAINS", ("refuge", "drishti-gs"))
    for name in ("a", "b"):
        crop(tmp_path, 1, "train", name, eye())
    crop(tmp_path, 1, "test", "c", eye(disc=6, cup=2, height=12, width=12))
    crop(tmp_path, 3, "train", "d", eye())
    crop(tmp_path, 3, "test", "e", eye(cup=0))
    return tmp_path


def test_a_true_copy_is_well_and_its_masks_are_counted(eyes: Path) -> None:
    report = see("fundus", eyes)
    assert (report.problems, report.missing, report.broken, report.others, report.notes) == ([], [], [], [], [])
    assert [*report.parts] == ["refuge:train", "refuge:test", "drishti-gs:train", "drishti-gs:test"]
    assert (report.cases, report.slices) == (5, 5)
    train, test = report.parts["drishti-gs:train"], report.parts["refuge:test"]
    assert (train.cases, train.slices, train.read) == (2, 2, 2)
    assert dict(train.having) == {"disc": 2, "cup": 2}
    assert train.share("disc") == 64 / 200
    assert train.share("cup") == 16 / 200
    assert dict(train.sizes) == {(20, 10): 2}
    assert train.spacings == set()  # nobody knows how large a pixel is
    assert (test.having["disc"], test.having["cup"], test.share("cup")) == (1, 0, 0.0)


def test_progress_counts_cases(eyes: Path) -> None:
    told: list[tuple[int, int]] = []
    check_dataset("fundus", str(eyes), progress=lambda done, of: told.append((done, of)))
    assert told == [(n, 5) for n in range(1, 6)]


def test_other_counts_than_the_card_s_and_a_domain_that_is_not_there(
    eyes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    report = see("fundus", eyes)
    assert [*report.found] == ["refuge", "drishti-gs"]
    absent, *counts = report.problems
    assert absent.startswith("not found: ")
    assert "holds no rim-one-r3: looked for Stereo Images with Average_masks" in absent
    assert counts == ["refuge has 2 cases; the card says 400", "drishti-gs has 3 cases; the card says 101"]


def test_what_cannot_be_read_is_named_with_the_reason_and_the_rest_is_counted(eyes: Path) -> None:
    crop(eyes, 1, "train", "a", eye(), size=(21, 10))
    crop(eyes, 3, "train", "d", 255 - eye())
    file = eyes / "Domain3/test/ROIs/image/e.png"
    file.write_bytes(file.read_bytes()[:40])
    report = see("fundus", eyes)
    coded, cut, size = report.broken
    assert coded.startswith("refuge:train: d.png: cup in all four corners; expected 255 background")
    assert cut.startswith("refuge:test: e.png: ")
    assert size == "drishti-gs:train: a.png: the mask is 10×20 pixels, its image 10×21"
    assert report.problems == [f"3 of 5 cases cannot be read; the first: {coded}"]
    train = report.parts["drishti-gs:train"]
    assert (train.cases, train.read, train.having["disc"]) == (2, 1, 1)


def test_partners_that_are_missing_and_other_files(eyes: Path) -> None:
    (eyes / "Domain1/train/ROIs/mask/b.png").rename(eyes / "Domain1/train/ROIs/mask/q.png")
    (eyes / "Domain1/train/ROIs/image/list.csv").touch()
    report = see("fundus", eyes)
    folder = "Domain1/train/ROIs"
    assert report.missing == [f"{folder}/image/b.png has no mask", f"{folder}/mask/q.png has no image"]
    assert report.others == [f"{folder}/image/list.csv"]
    assert report.problems == [
        "drishti-gs has 2 cases; the card says 3",
        f"images and masks do not match, 2 times: {report.missing[0]}, {report.missing[1]}",
    ]


def test_rim_and_cup_that_were_mistaken_for_one_another(eyes: Path) -> None:
    for part, name in (("train", "a"), ("train", "b"), ("test", "c")):
        crop(eyes, 1, part, name, eye(rim=0, inside=128))
    crop(eyes, 3, "train", "d", eye(disc=4, cup=4))  # nothing but cup
    assert see("fundus", eyes).problems == [
        "refuge: cup is not within disc in 1 of 2 cases: d",
        "drishti-gs: cup is not within disc in 3 of 3 cases; the label coding may differ: a, b, c",
    ]


def test_a_cup_may_touch_the_edge_of_the_disc(eyes: Path) -> None:
    mask = eye()
    mask[1:5, 3:7] = 0
    crop(eyes, 3, "train", "d", mask)
    assert see("fundus", eyes).problems == []


def test_masks_that_are_empty_and_structures_that_are_nowhere(eyes: Path) -> None:
    crop(eyes, 1, "test", "c", np.full((9, 9), 255, dtype=np.uint8))
    crop(eyes, 3, "train", "d", eye(cup=0))
    assert see("fundus", eyes).problems == [
        "refuge: cup is in none of the cases; the label coding may differ",
        "drishti-gs: 1 of 3 masks are empty: c",
    ]


def test_a_part_of_its_own_does_not_count_for_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(monkeypatch, "fundus", refuge=1)
    monkeypatch.setattr("trueup.data.datasets.fundus.DOMAINS", ("refuge",))
    for image, mask in (
        ("Training400/Glaucoma/g0001.png", "Annotation-Training400/Disc_Cup_Masks/g0001.png"),
        ("REFUGE-Validation400/V0001.png", "REFUGE-Validation400-GT/Disc_Cup_Masks/V0001.png"),
    ):
        save(tmp_path / image, np.full((20, 20, 3), 90, dtype=np.uint8))
        save(tmp_path / mask, eye(width=20))
    report = see("fundus", tmp_path)
    assert report.problems == []
    assert {key: part.cases for key, part in report.parts.items()} == {"refuge:train": 1, "refuge:canon": 1}


def test_files_are_not_read_if_not_asked_for(eyes: Path) -> None:
    (eyes / "Domain1/train/ROIs/mask/b.png").write_bytes(b"")
    told: list[int] = []
    report = check_dataset("fundus", eyes, decode_all=False, progress=lambda done, of: told.append(done))
    assert isinstance(report, MaskReport)
    assert (report.problems, report.cases, told) == ([], 5, [])
    assert {part.read for part in report.parts.values()} == {0}


# Hearts and prostates


def nifti(path: Path, values: NDArray[np.int16], spacing: tuple[float, float, float]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([-spacing[0], -spacing[1], spacing[2], 1.0])), path)
    return path


def heart(left: int = 3, muscle: int = 2, right: int = 1, slices: int = 3) -> NDArray[np.int16]:
    """(x, y, z): muscle around the left ventricle, the right one beside it."""
    mask = np.zeros((16, 12, slices), dtype=np.int16)
    mask[2:8, 2:8], mask[3:7, 3:7], mask[8:11, 3:7] = muscle, left, right
    return mask


def beat(root: Path, number: int, mask: NDArray[np.int16], spacing: tuple[float, float, float]) -> Path:
    name = f"patient{number:03d}"
    grey = np.arange(mask.size, dtype=np.int16).reshape(mask.shape)
    nifti(root / f"training/{name}/{name}_frame01.nii.gz", grey, spacing)
    return nifti(root / f"training/{name}/{name}_frame01_gt.nii.gz", mask, spacing)


@pytest.fixture
def hearts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    expect(monkeypatch, "cardiac", acdc=5)
    monkeypatch.setattr("trueup.data.datasets.cardiac.DOMAINS", ("acdc",))
    for number in range(1, 6):
        beat(tmp_path, number, heart(slices=2 + number % 2), (1.5, 1.25 + 0.125 * number, 5.0 + number))
    return tmp_path


def test_volumes_are_counted_with_their_slices_and_millimetres(hearts: Path) -> None:
    report = see("cardiac", hearts)
    assert (report.problems, report.notes) == ([], [])
    assert (report.cases, report.slices) == (5, 13)
    parts = [report.parts["acdc:train"], report.parts["acdc:test"]]
    assert [part.cases for part in parts] == [4, 1]
    assert [dict(part.having) for part in parts] == [dict.fromkeys(("RV", "MYO", "LV"), n) for n in (4, 1)]
    assert [part.share("MYO") for part in parts] == [20 / 192] * 2
    assert set.union(*(part.spacings for part in parts)) == {(5.0 + n, 1.25 + 0.125 * n, 1.5) for n in range(1, 6)}
    assert dict(parts[1].sizes) == {(12, 16): 1}


def test_ventricles_that_were_mistaken_for_one_another(hearts: Path) -> None:
    for number in range(1, 6):
        beat(hearts, number, heart(left=1, right=3), (1.5, 1.5, 5.0))
    (problem,) = see("cardiac", hearts).problems
    assert problem.startswith("acdc: LV is not within MYO in 5 of 5 cases; the label coding may differ: patient")


def test_labels_of_another_coding_and_a_ventricle_that_is_nowhere(hearts: Path) -> None:
    for number in range(1, 6):
        beat(hearts, number, heart(right=0), (1.5, 1.5, 5.0))
    beat(hearts, 2, heart(200, 500, 600), (1.5, 1.5, 5.0))
    report = see("cardiac", hearts)
    (line,) = report.broken
    assert "patient002_frame01_gt.nii.gz: values 200, 500, 600 are not labels of ACDC" in line
    assert report.problems[0] == "acdc: RV is in none of the cases; the label coding may differ"
    assert len(report.problems) == 2


def test_headers_are_read_even_if_voxels_are_not(hearts: Path) -> None:
    nifti(hearts / "training/patient002/patient002_frame01_gt.nii.gz", heart(9, 9, 9), (1.5, 1.5, 5.0))
    (hearts / "training/patient001/patient001_frame01.nii.gz").write_bytes(gzip.compress(b"no header"))
    report = see("cardiac", hearts, fast=True)
    (line,) = report.broken
    assert line.startswith("acdc: patient001_frame01.nii.gz: ")
    assert report.problems == [f"1 of 5 cases cannot be read; the first: {line}"]
    assert len(see("cardiac", hearts).broken) == 2


def test_what_cannot_be_looked_for_is_a_problem_of_its_domain(hearts: Path) -> None:
    (hearts / "training/patient001/Info.cfg").write_text("ED: one\n")
    report = see("cardiac", hearts)
    (problem,) = report.problems
    assert problem.startswith("acdc: ")
    assert "does not name the frames to use" in problem
    assert report.parts == {}


def test_a_header_that_counts_other_slices_than_there_are(hearts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueup.data.datasets.file_matching.count_slices", lambda path: 4)
    report = see("cardiac", hearts)
    assert len(report.broken) == 5
    assert "patient001_frame01 has 3 slices; its header said 4" in " ".join(report.broken)


def test_prostates_beyond_what_networks_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(monkeypatch, "prostate", promise12=2, msd05=1)
    values = np.arange(3 * 10 * 12, dtype=np.int16).reshape(3, 10, 12)
    for number, column in ((0, 5), (1, 0)):
        mask = np.zeros(values.shape, dtype=np.int16)
        mask[1, 4:6, column] = 1
        for ending, array in (("", values), ("_segmentation", mask)):
            image = sitk.GetImageFromArray(array)
            image.SetSpacing((20.0, 20.0, 60.0))  # 240 mm wide, of which 160 are seen
            sitk.WriteImage(image, str(tmp_path / f"Case{number:02d}{ending}.mhd"))
    (tmp_path / "notes.txt").touch()
    report = see("prostate", tmp_path)
    assert report.problems == [p for p in report.problems if p.startswith("not found: ") and "'msd05'" in p]
    assert report.notes == ["promise12: structures extend beyond the view of networks in 1 of 2 cases: Case01"]
    assert report.others == ["notes.txt"]


# Your own, and what is embedded


def own(root: Path, domain: str, name: str, mask: list[list[int]]) -> Path:
    save(root / domain / f"images/{name}.png", np.full((len(mask), len(mask[0]), 3), 90, dtype=np.uint8))
    save(root / domain / f"masks/{name}.png", np.array(mask, dtype=np.uint8))
    return root


def test_a_folder_of_one_s_own_has_no_card_and_may_show_nothing(tmp_path: Path) -> None:
    own(tmp_path, "day", "a", [[0, 1], [2, 2]])
    own(tmp_path, "day", "b", [[0, 0], [0, 0]])
    own(tmp_path, "night", "a", [[0, 1, 0], [0, 1, 1]])
    report = see("masks", tmp_path)
    assert [*report.parts] == ["day:train", "night:train"]
    assert [*report.structures] == ["class 1", "class 2"]
    assert report.parts["day:train"].share("class 2") == 2 / 8
    assert report.problems == ["night: class 2 is in none of the cases; the label coding may differ"]
    assert report.notes == ["day: 1 of 2 masks are empty: b"]


@pytest.mark.parametrize(
    ("mask", "says"), [([[0, 1], [5, 7]], "a.png: the mask holds 0, 1, 5, 7"), ([[0, 0]], "all masks are 0 everywhere")]
)
def test_masks_of_one_s_own_that_do_not_agree(tmp_path: Path, mask: list[list[int]], says: str) -> None:
    report = see("masks", own(tmp_path, "day", "a", mask))
    (problem,) = report.problems
    assert problem.startswith(says)
    assert (report.parts, report.found) == ({}, {})


def test_a_name_that_is_in_two_parts_is_counted_twice(eyes: Path) -> None:
    for part in ("train", "test"):
        crop(eyes, 3, part, "same", np.full((9, 9), 255, dtype=np.uint8))
    assert "refuge: 2 of 4 masks are empty: same, test/same" in see("fundus", eyes).problems


@pytest.mark.parametrize("name", phantoms.DOMAINS)
def test_embedded_datasets_are_well_and_need_no_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = see(name, fast=True)
    assert whole.problems == []
    assert {domain: part.cases for domain, part in whole.parts.items()} == CARDS[name].domains
    monkeypatch.setitem(phantoms.CASES, name, 3)
    expect(monkeypatch, name, **dict.fromkeys(CARDS[name].domains, 3))
    report = see(name)
    assert (report.problems, report.notes) == ([], [])
    for domain, part in report.parts.items():
        masks = [case.read().mask for case in phantoms.phantom_cases(name, domain)]
        drawn = np.stack([mask for mask in masks if mask is not None])
        assert part.slices == drawn.shape[0] * drawn.shape[1]
        for structure, classes in report.structures.items():
            assert part.share(structure) == np.isin(drawn, classes).mean()
            assert part.having[structure] == len(drawn) == 3


def test_fewer_embedded_cases_than_the_card_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(phantoms.CASES, "fundus-sim", 2)
    assert see("fundus-sim").problems == [f"{d} has 2 cases; the card says 160" for d in CARDS["fundus-sim"].domains]


def test_no_folder_is_refused_and_images_without_masks_have_the_other_report(tmp_path: Path) -> None:
    for name in ("fundus", "masks"):
        for where in (None, tmp_path / "nowhere"):
            with pytest.raises(ValueError, match=f"is not a folder: give the folder of {name} with --root"):
                check_dataset(name, where)
    save(tmp_path / "day/cat/1.png", eye())
    assert isinstance(check_dataset("folder", tmp_path), ImageReport)
