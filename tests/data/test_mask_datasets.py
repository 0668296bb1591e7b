"""Which domain is learnt from for which target, and which part of a domain is meant."""

from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from trueup.data.datasets import Dataset, open_dataset
from trueup.data.datasets.mask_datasets import NAMES
from trueup.data.slices import SliceDomain

FUNDUS = {"refuge": "Domain3", "drishti-gs": "Domain1", "rim-one-r3": "Domain2"}


def crop(root: Path, domain: str, part: str, name: str) -> Path:
    """Files of the archive of crops; only names and sizes are looked at until they are read."""
    for kind in ("image", "mask"):
        file = root / FUNDUS[domain] / part / "ROIs" / kind / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return root


@pytest.fixture
def eyes(tmp_path: Path) -> Path:
    for domain in FUNDUS:
        for name in ("a", "b", "c"):
            crop(tmp_path, domain, "train", f"{domain}-{name}")
        crop(tmp_path, domain, "test", f"{domain}-t")
    return tmp_path


@pytest.fixture
def prostates(tmp_path: Path) -> Path:
    values = np.zeros((6, 5, 3), dtype=np.int16)
    for number in range(5):
        for name in (
            f"imagesTr/prostate_{number:02d}",
            f"labelsTr/prostate_{number:02d}",
            f"promise/Case{number:02d}",
            f"promise/Case{number:02d}_segmentation",
        ):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(values, np.diag([1.0, 1.0, 4.0, 1.0])), tmp_path / f"{name}.nii")
    return tmp_path


def own(root: Path, *domains: str) -> Path:
    for domain in domains:
        for kind, pixels in (("images", np.zeros((4, 4, 3))), ("masks", np.eye(4))):
            (root / domain / kind).mkdir(parents=True)
            Image.fromarray(pixels.astype(np.uint8)).save(root / domain / kind / "a.png")
    return root


def cases(dataset: Dataset, name: str) -> list[str]:
    domain = dataset.domain(name)
    assert isinstance(domain, SliceDomain)
    assert domain.name == name
    return [case.name for case in domain.cases]


# What is learnt from


@pytest.mark.parametrize(
    ("targets", "sources"),
    [
        (["drishti-gs"], ["refuge:all"]),
        (["rim-one-r3"], ["refuge:all"]),
        (["drishti-gs", "rim-one-r3"], ["refuge:all"]),  # one after the other, with the same model
        (["drishti-gs:all", "rim-one-r3:train"], ["refuge:all"]),
        (["refuge"], ["drishti-gs:all", "rim-one-r3:all"]),
        (["refuge:canon"], ["drishti-gs:all", "rim-one-r3:all"]),
        (["refuge", "drishti-gs"], ["rim-one-r3:all"]),
    ],
)
def test_sources_of_the_eye(eyes: Path, targets: Sequence[str], sources: Sequence[str]) -> None:
    assert open_dataset("fundus", eyes).sources(targets) == tuple(sources)


@pytest.mark.parametrize(
    ("name", "targets", "sources"),
    [
        ("prostate", ["promise12"], ["msd05:all"]),  # as in the paper's table
        ("prostate", ["promise12:all"], ["msd05:all"]),
        ("prostate", ["msd05"], ["promise12:all"]),  # as in its text
        ("prostate", ["msd05:train"], ["promise12:all"]),
        ("cardiac", ["lge"], ["acdc:all"]),
        ("cardiac", ["acdc:test"], ["lge:all"]),
        ("fundus-sim", ["screening"], ["clinic"]),
        ("fundus-sim", ["screening", "handheld"], ["clinic"]),
        ("fundus-sim", ["clinic"], ["screening", "handheld"]),
        ("cardiac-sim", ["lge"], ["cine"]),
        ("cardiac-sim", ["cine"], ["lge"]),
        ("prostate-sim", ["endorectal"], ["body-coil"]),
    ],
)
def test_sources_in_both_directions(tmp_path: Path, name: str, targets: Sequence[str], sources: Sequence[str]) -> None:
    assert open_dataset(name, tmp_path).sources(targets) == tuple(sources)


def test_sources_of_one_s_own_are_all_others(tmp_path: Path) -> None:
    dataset = open_dataset("masks", own(tmp_path, "day", "dusk", "night"))
    assert dataset.targets == dataset.domains == ("day", "dusk", "night")
    assert dataset.sources(["dusk"]) == ("day:all", "night:all")
    assert dataset.sources(["dusk:train", "day"]) == ("night:all",)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("prostate", ["msd05", "promise12"]),
        ("prostate", ["msd05:train", "promise12:test"]),
        ("fundus", ["refuge", "drishti-gs", "rim-one-r3"]),
        ("cardiac-sim", ["cine", "lge"]),
        ("masks", ["day"]),
    ],
)
def test_something_must_be_left_to_learn_from(tmp_path: Path, name: str, targets: Sequence[str]) -> None:
    with pytest.raises(ValueError, match=f"all domains of {name} are targets; leave at least one to train on"):
        open_dataset(name, own(tmp_path, "day")).sources(targets)


def test_what_models_learn_from_can_be_opened(eyes: Path) -> None:
    dataset = open_dataset("fundus", eyes)
    (source,) = dataset.sources(["drishti-gs"])
    assert cases(dataset, source) == [f"refuge-{name}" for name in "abct"]


# Parts


def test_parts_are_meant_by_name_and_targets_are_their_test_part(eyes: Path) -> None:
    dataset = open_dataset("fundus", eyes)
    assert cases(dataset, "refuge:train") == ["refuge-a", "refuge-b", "refuge-c"]
    assert cases(dataset, "refuge:test") == cases(dataset, "refuge") == ["refuge-t"]
    assert cases(dataset, "refuge:all") == cases(dataset, "refuge:train") + cases(dataset, "refuge:test")
    with pytest.raises(ValueError, match=r"refuge: there is no part 'valid'; there is: train, test, all"):
        dataset.domain("refuge:valid")


def test_a_domain_without_a_test_part_is_meant_as_a_whole(tmp_path: Path) -> None:
    crop(tmp_path, "drishti-gs", "train", "a")
    assert cases(open_dataset("fundus", tmp_path), "drishti-gs") == ["a"]
    day = open_dataset("masks", own(tmp_path / "own", "day"))
    assert cases(day, "day") == cases(day, "day:train") == cases(day, "day:all") == ["a"]


def test_the_other_camera_is_a_part_that_must_be_asked_for(tmp_path: Path) -> None:
    for file in ("Training400/g0001.jpg", "Disc_Cup_Masks/g0001.bmp", "Test400/T0001.jpg", "Disc_Cup_Masks/T0001.bmp"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    dataset = open_dataset("fundus", tmp_path)
    assert cases(dataset, "refuge") == cases(dataset, "refuge:all") == ["g0001"]
    assert cases(dataset, "refuge:canon") == ["T0001"]


def test_prostates_are_divided_and_both_ways_are_open(prostates: Path) -> None:
    dataset = open_dataset("prostate", prostates)
    assert dataset.targets == ("promise12",)
    assert dataset.domains == ("msd05", "promise12")
    for domain in dataset.domains:
        parts = {part: cases(dataset, f"{domain}:{part}") for part in ("train", "test", "all")}
        assert [len(names) for names in parts.values()] == [4, 1, 5]
        assert cases(dataset, domain) == parts["test"]
        assert sorted(parts["train"] + parts["test"]) == sorted(parts["all"])
    assert len(dataset.domain("msd05:all").labels) == 5 * 3  # slices


def test_a_domain_is_opened_once(eyes: Path) -> None:
    dataset = open_dataset("fundus", eyes)
    assert dataset.domain("refuge") is dataset.domain("refuge")
    assert dataset.domain("refuge") is not open_dataset("fundus", eyes).domain("refuge")


@pytest.mark.parametrize(
    ("name", "wrong", "there"),
    [
        ("fundus", "origa", "refuge, drishti-gs, rim-one-r3"),
        ("fundus", "origa:train", "refuge, drishti-gs, rim-one-r3"),
        ("cardiac", "LGE", "acdc, lge"),
        ("masks", "night", "day"),
        ("fundus-sim", "clinic:train", "clinic, screening, handheld"),  # not divided
        ("prostate-sim", "msd05", "body-coil, endorectal"),
    ],
)
def test_other_names_are_refused_with_those_there_are(tmp_path: Path, name: str, wrong: str, there: str) -> None:
    dataset = open_dataset(name, own(tmp_path, "day"))
    with pytest.raises(ValueError, match=f"{name} has no domain '{wrong}'; there are: {there}$"):
        dataset.domain(wrong)


# What is on disk


def test_a_domain_that_is_missing_does_not_hinder_the_others(tmp_path: Path) -> None:
    crop(tmp_path, "refuge", "train", "a")
    dataset = open_dataset("fundus", tmp_path)
    assert cases(dataset, "refuge") == ["a"]
    assert len(dataset.fingerprint) == 16
    assert dataset.sources(["drishti-gs"]) == ("refuge:all",)
    with pytest.raises(ValueError, match="holds no drishti-gs: looked for"):
        dataset.domain("drishti-gs")


def test_the_fingerprint_changes_with_the_files_and_with_nothing_else(eyes: Path) -> None:
    def fingerprint() -> str:
        return open_dataset("fundus", eyes).fingerprint

    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    (eyes / "Domain1/readme.txt").touch()
    (eyes / "Domain1/train/ROIs/image/alone.png").touch()  # without a mask
    assert fingerprint() == seen[0]
    seen.append(open_dataset("fundus", crop(eyes, "rim-one-r3", "test", "new")).fingerprint)
    mask = eyes / "Domain1/train/ROIs/mask/drishti-gs-a.png"
    mask.write_bytes(b"drawn again")
    seen.append(fingerprint())
    image = eyes / "Domain1/train/ROIs/image/drishti-gs-a.png"
    image.write_bytes(b"another")
    seen.append(fingerprint())
    for file in (mask, image):
        file.rename(eyes / "Domain1/test/ROIs" / file.relative_to(eyes / "Domain1/train/ROIs"))
    seen.append(fingerprint())
    (eyes / "Domain2").rename(eyes / "put away")
    seen.append(fingerprint())
    assert len({*seen}) == 6


def test_the_part_of_a_case_counts_for_the_fingerprint(tmp_path: Path) -> None:
    both = [crop(tmp_path / part, "refuge", part, "a") for part in ("train", "test")]
    assert len({open_dataset("fundus", root).fingerprint for root in both}) == 2


def test_slices_and_sizes_of_volumes_count_for_the_fingerprint(prostates: Path) -> None:
    before = open_dataset("prostate", prostates).fingerprint
    assert open_dataset("prostate", prostates).fingerprint == before
    for kind in ("imagesTr", "labelsTr"):
        values = np.zeros((5, 3, 6), dtype=np.int16)  # as many bytes
        nibabel.save(nibabel.Nifti1Image(values, np.diag([1.0, 1.0, 4.0, 1.0])), prostates / kind / "prostate_00.nii")
    assert open_dataset("prostate", prostates).fingerprint != before


def test_every_dataset_of_masks_says_what_is_scored(tmp_path: Path) -> None:
    own(tmp_path, "day")
    (tmp_path / "classes.txt").write_text("air\nskin\nbone\n")
    for name in NAMES:
        dataset = open_dataset(name, tmp_path)
        assert dataset.task == "segmentation"
        assert dataset.outputs() == len(dataset.classes)
        assert dataset.outputs(multilabel=True) == len(dataset.structures)
        drawn = {k for classes in dataset.structures.values() for k in classes}
        assert drawn == {*range(1, len(dataset.classes))}
        assert {*dataset.targets} <= {*dataset.domains}
    assert open_dataset("masks", tmp_path).structures == {"skin": (1,), "bone": (2,)}
    assert open_dataset("fundus", tmp_path).structures == {"disc": (1, 2), "cup": (2,)}


def test_embedded_datasets_need_no_folder_and_have_a_version() -> None:
    for name in ("fundus-sim", "cardiac-sim", "prostate-sim"):
        dataset = open_dataset(name)
        assert dataset.fingerprint
        (source,) = dataset.sources(dataset.targets)
        assert source not in dataset.targets
        assert len(dataset.domain(source).labels) > 0
