"""Fundus datasets: parts, missing files, cropped archives, and errors."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fundus_files import (
    HEIGHT,
    WIDTH,
    Pixels,
    blank,
    drishti,
    levels,
    names,
    only,
    refuge,
    rim_one,
    save,
    square,
    touch,
    where,
)

from trueup.data.datasets.file_matching import FoundCases, split_80_20, walk_files
from trueup.data.datasets.fundus import CLASSES, DOMAINS, STRUCTURES, find_fundus_cases
from trueup.data.domains import BrokenImageError
from trueup.data.slices import LabelledCase, SliceDomain, Volume

# What there is


def test_the_disc_is_rim_and_cup() -> None:
    assert DOMAINS == ("refuge", "drishti-gs", "rim-one-r3")
    assert CLASSES == ("background", "rim", "cup")
    assert STRUCTURES == {"disc": (1, 2), "cup": (2,)}


def test_parts_are_had_by_name() -> None:
    def read() -> Volume:
        raise AssertionError

    found = FoundCases(
        {"train": [LabelledCase("a", 1, read), LabelledCase("b", 1, read)], "test": [LabelledCase("c", 1, read)]}
    )
    assert [case.name for case in found.cases] == ["a", "b", "c"] == [case.name for case in found.part("all")]
    assert [case.name for case in found.part("test")] == ["c"]
    with pytest.raises(ValueError, match="no part 'valid'; there is: train, test, all"):
        found.part("valid")
    with pytest.raises(ValueError, match="no part 'test'; there is: train, all"):
        FoundCases({"train": []}).part("test")


def test_all_are_those_to_train_and_to_test_with() -> None:
    def read() -> Volume:
        raise AssertionError

    found = FoundCases({part: [LabelledCase(part, 1, read)] for part in ("canon", "test", "train")})
    assert [case.name for case in found.part("all")] == ["train", "test"]
    assert [case.name for case in found.part("canon")] == ["canon"]
    assert len(found.cases) == 3
    del found.parts["train"], found.parts["test"]
    with pytest.raises(ValueError, match=r"no part 'all'; there is: canon$"):
        found.part("all")


def test_visible_files_are_sorted_and_free_of_junk(tmp_path: Path) -> None:
    touch(
        tmp_path, "b/2.png", "b/1.png", "a.png", "__MACOSX/a.png", "b/__MACOSX/x", "._a.png", "b/.DS_Store", "b/._1.png"
    )
    assert [file.relative_to(tmp_path).as_posix() for file in walk_files(tmp_path)] == ["a.png", "b/1.png", "b/2.png"]


def test_a_fifth_is_kept_for_testing_always_the_same() -> None:
    everything = [f"case{i:02d}" for i in range(50)]
    train, test = split_80_20(everything)
    assert (len(train), len(test)) == (40, 10)
    assert sorted(train + test) == everything
    assert (train, test) == (sorted(train), sorted(test))
    assert split_80_20(reversed(everything)) == (train, test)
    assert split_80_20(everything, seed=1) != (train, test)
    assert test != everything[-10:]
    assert test != everything[:10]
    assert [len(part) for part in split_80_20(["a", "b"])] == [1, 1]
    assert split_80_20(["a"]) == (["a"], [])


# The archive of crops


@pytest.mark.parametrize(
    ("domain", "folder"),
    [
        ("refuge", "Fundus/Domain3/{}/ROIs"),
        ("drishti-gs", "Fundus/Domain1/{}/ROIs"),
        ("rim-one-r3", "Fundus/Domain2/{}/ROIs"),
        ("refuge", "Domain3/{}"),
        ("drishti-gs", "archive/Fundus/Domain1/{}"),
        ("refuge", "refuge/{}"),
        ("drishti-gs", "Drishti-GS/{}"),
        ("rim-one-r3", "RIM-ONE_r3/{}"),
    ],
)
def test_crops_are_found_in_each_archive(tmp_path: Path, domain: str, folder: str) -> None:
    train, test = folder.format("train"), folder.format("test")
    touch(tmp_path, f"{train}/image/b.png", f"{train}/image/a.jpg", f"{train}/mask/a.png", f"{train}/mask/b.bmp")
    touch(
        tmp_path,
        f"{test}/image/a.png",
        f"{test}/mask/a.png",
        f"{test}/mask/._a.png",
        "__MACOSX/Domain3/train/image/q.png",
    )
    found = find_fundus_cases(tmp_path, domain)
    assert names(found) == {"train": ["a", "b"], "test": ["a"]}
    assert (found.missing, found.others) == ([], [])
    for other in {*DOMAINS} - {domain}:
        with pytest.raises(ValueError, match=f"holds no {other}"):
            find_fundus_cases(tmp_path, other)


def test_the_root_may_be_the_domain_itself(tmp_path: Path) -> None:
    touch(tmp_path, "Domain1/test/image/a.png", "Domain1/test/mask/a.png")
    assert names(find_fundus_cases(tmp_path / "Domain1", "drishti-gs")) == {"test": ["a"]}
    with pytest.raises(ValueError, match="holds no refuge"):
        find_fundus_cases(tmp_path / "Domain1", "refuge")


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_masks_of_crops_in_grey_or_saved_as_colours(tmp_path: Path, mode: str) -> None:
    root = tmp_path / "my images/of the mask"  # words of the layout, elsewhere in the path
    coded = np.array([[255, 201, 200, 128], [51, 50, 0, 255]], dtype=np.uint8)
    save(root / "Domain3/train/ROIs/image/gx.png", where(2, 4))
    save(root / "Domain3/train/ROIs/mask/gx.png", coded, mode)
    volume = only(find_fundus_cases(root, "refuge"))
    assert volume.mask is not None
    assert volume.mask.tolist() == [[[0, 0, 1, 1], [1, 2, 2, 0]]]
    assert volume.mask.dtype == volume.image.dtype == np.uint8
    np.testing.assert_array_equal(volume.image, where(2, 4)[None])
    assert (volume.box, volume.spacing) == ((0, 0, 2, 4), (1.0, 1.0, 1.0))


def test_crops_are_not_cropped_again_and_may_be_without_a_disc(tmp_path: Path) -> None:
    save(tmp_path / "Domain2/test/image/a.png", where())
    save(tmp_path / "Domain2/test/mask/a.png", blank(255))
    volume = only(find_fundus_cases(tmp_path, "rim-one-r3"))
    assert volume.image.shape == (1, HEIGHT, WIDTH, 3)
    assert volume.mask is not None
    assert not volume.mask.any()


def test_crops_go_before_whole_photographs(tmp_path: Path) -> None:
    refuge(tmp_path / "whole")
    touch(tmp_path, "z/Domain3/train/image/whole.png", "z/Domain3/train/mask/whole.png")
    touch(tmp_path, "z/Domain3/train/ROIs/image/crop.png", "z/Domain3/train/ROIs/mask/crop.png")
    assert names(find_fundus_cases(tmp_path, "refuge")) == {"train": ["crop"]}


def test_partners_that_are_missing_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "Domain1/train/image/a.png", "Domain1/train/mask/a.png", "Domain1/train/image/b.png")
    touch(tmp_path, "Domain1/test/mask/b.png", "Domain1/test/image/c.png", "Domain1/test/mask/c.png")
    touch(tmp_path, "Domain1/train/image/list.csv", "readme.md")
    found = find_fundus_cases(tmp_path, "drishti-gs")
    assert names(found) == {"train": ["a"], "test": ["c"]}  # b's mask is that of another part
    assert found.missing == ["Domain1/train/image/b.png has no mask", "Domain1/test/mask/b.png has no image"]
    assert found.others == ["Domain1/train/image/list.csv"]


# What goes wrong


def test_other_names_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fundus has no domain 'origa'; there are: refuge, drishti-gs, rim-one-r3"):
        find_fundus_cases(tmp_path, "origa")
    with pytest.raises(ValueError, match=r"holds no refuge: looked for Training400 .* crops in Domain3/"):
        find_fundus_cases(tmp_path, "refuge")
    touch(tmp_path, "Drishti-GS/train/image/.DS_Store", "Drishti-GS/train/mask/.DS_Store")
    with pytest.raises(ValueError, match=r"holds no drishti-gs.*Domain1/.*Drishti-GS/"):
        find_fundus_cases(tmp_path, "drishti-gs")
    touch(tmp_path, "Healthy/Stereo Images/N-1-L.jpg", "Healthy/Average_masks/N-1-L-Disc-Avg.png")
    with pytest.raises(ValueError, match=r"N-1-L.jpg has no mask of the cup"):
        find_fundus_cases(tmp_path, "rim-one-r3")
    for threshold in (0.0, 1.01, float("nan")):
        with pytest.raises(ValueError, match="threshold is"):
            find_fundus_cases(tmp_path, "drishti-gs", threshold=threshold)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (levels()[:-1], r"g0001\.bmp: the mask is 250×256 pixels, its image 250×257"),
        (blank(255), r"g0001\.bmp: the mask shows no disc"),
        (255 - levels(), r"g0001\.bmp: cup in all four corners; .* got values 0, 127, 255"),
        (square(blank(0), 120, 130, 20, 1), r"got values 0, 1$"),  # class numbers
        (np.dstack([levels(), blank(255), blank(255)]), r"g0001\.bmp: is coloured"),
    ],
)
def test_masks_that_cannot_be_meant(tmp_path: Path, mask: Pixels, message: str) -> None:
    found = find_fundus_cases(refuge(tmp_path, mask=mask), "refuge")
    with pytest.raises(BrokenImageError, match=message):
        only(found)


@pytest.mark.parametrize("broken", ["image", "mask"])
def test_files_that_cannot_be_decoded(tmp_path: Path, broken: str) -> None:
    save(tmp_path / "Domain3/train/image/a.png", where())
    save(tmp_path / "Domain3/train/mask/a.png", levels())
    file = tmp_path / "Domain3/train" / broken / "a.png"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(BrokenImageError, match=r"a\.png: "):
        only(find_fundus_cases(tmp_path, "refuge"))


def no_disc_drishti(root: Path) -> Path:
    return drishti(root, blank(190), blank(64))


def no_disc_on_the_left(root: Path) -> Path:
    rim_one(root)
    for what in ("Disc", "Cup"):
        save(root / f"Healthy/Average_masks/N-5-L-{what}-Avg.png", square(blank(0, HEIGHT, 300), 120, 210, 20, 255))
    return root


@pytest.mark.parametrize(
    ("make", "domain", "name"),
    [
        (no_disc_drishti, "drishti-gs", "drishtiGS_002_ODsegSoftmap.png"),
        (no_disc_on_the_left, "rim-one-r3", "N-5-L-Disc"),
    ],
)
def test_a_photograph_needs_a_disc(tmp_path: Path, make: Callable[[Path], Path], domain: str, name: str) -> None:
    with pytest.raises(BrokenImageError, match=f"{name}.*shows no disc"):
        only(find_fundus_cases(make(tmp_path), domain))


def test_masks_of_a_stereo_pair_are_as_wide_as_the_pair(tmp_path: Path) -> None:
    rim_one(tmp_path)
    save(tmp_path / "Healthy/Average_masks/N-5-L-Cup-Avg.png", blank(255, HEIGHT, 150))
    with pytest.raises(BrokenImageError, match=r"N-5-L-Cup-Avg\.png: the mask is 150×257 pixels, its image 300×257"):
        only(find_fundus_cases(tmp_path, "rim-one-r3"))


def test_cases_go_to_other_processes_and_into_domains(tmp_path: Path) -> None:
    found = find_fundus_cases(refuge(tmp_path), "refuge")
    domain = SliceDomain("refuge", pickle.loads(pickle.dumps(found.cases)))
    assert domain.image_name(0) == "g0001"
    assert domain.image(0, 50).shape == (50, 50, 3)
    assert np.unique(domain.mask(0, 50)).tolist() == [0, 1, 2]
