"""Fundus photographs in the layouts they are distributed in, of small files; expectations are worked out by hand."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from trueup.data.datasets.file_matching import FoundCases, split_80_20, walk_files
from trueup.data.datasets.fundus import CLASSES, DOMAINS, STRUCTURES, find_fundus_cases
from trueup.data.domains import BrokenImageError
from trueup.data.slices import LabelledCase, SliceDomain, Volume

Pixels = NDArray[np.uint8]
HEIGHT, WIDTH = 257, 250  # an eighth of REFUGE's height, so that its square of 800 pixels is one of 100


def where(height: int = HEIGHT, width: int = WIDTH) -> Pixels:
    """A picture whose pixels say where they are: row, column, and 7 in the third channel."""
    rows, columns = np.indices((height, width))
    return np.stack([rows % 256, columns % 256, np.full_like(rows, 7)], axis=2).astype(np.uint8)


def blank(value: int, height: int = HEIGHT, width: int = WIDTH) -> Pixels:
    return np.full((height, width), value, dtype=np.uint8)


def square(pixels: Pixels, top: int, left: int, side: int, value: int) -> Pixels:
    pixels[top : top + side, left : left + side] = value
    return pixels


def levels(top: int = 120, left: int = 130, disc: int = 20, cup: int = 8) -> Pixels:
    """A mask as in REFUGE: a square disc with a square cup in its upper left corner."""
    return square(square(blank(255), top, left, disc, 128), top, left, cup, 0)


def save(path: Path, pixels: Pixels, mode: str | None = None) -> None:
    """Without loss, whatever the name says: decoders look at the content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(path, format="BMP" if path.suffix == ".bmp" else "PNG")


def touch(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def names(found: FoundCases) -> dict[str, list[str]]:
    return {part: [case.name for case in cases] for part, cases in found.parts.items()}


def only(found: FoundCases) -> Volume:
    (case,) = found.cases
    assert case.slices == 1
    return case.read()


def refuge(root: Path, image: Pixels | None = None, mask: Pixels | None = None, mode: str | None = None) -> Path:
    save(root / "Training400/Glaucoma/g0001.jpg", where() if image is None else image)
    save(
        root / "Annotation-Training400/Disc_Cup_Masks/Glaucoma/g0001.bmp", levels() if mask is None else mask, mode=mode
    )
    return root


def drishti(root: Path, disc: Pixels, cup: Pixels, part: str = "Training", gt: str = "GT") -> Path:
    folder = root / "Drishti-GS1_files" / part
    save(folder / "Images/drishtiGS_002.png", where())
    for what, pixels in (("OD", disc), ("cup", cup)):
        save(folder / gt / "drishtiGS_002/SoftMap" / f"drishtiGS_002_{what}segSoftmap.png", pixels)
    return root


def rim_one(root: Path, stem: str = "N-5-L", folder: str = "Average_masks", form: str = "{}-{}-Avg.png") -> Path:
    """A stereo pair: left halves have the disc at row 120, column 60, right halves elsewhere; each half 150 wide."""
    save(root / "Healthy/Stereo Images" / f"{stem}.jpg", where(HEIGHT, 300))
    for what, side in (("Disc", 20), ("Cup", 8)):
        pixels = square(square(blank(0, HEIGHT, 300), 120, 60, side, 255), 30, 210, side + 10, 255)
        save(root / "Healthy" / folder / form.format(stem, what), pixels)
    return root


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


# REFUGE


def test_refuge_is_cropped_around_the_disc(tmp_path: Path) -> None:
    volume = only(find_fundus_cases(refuge(tmp_path), "refuge"))
    assert volume.image.shape == (1, 100, 100, 3)
    assert volume.box == (0, 0, 100, 100)
    assert volume.image[0, 0, 0].tolist() == [80, 90, 7]  # (120 + 139 + 1 - 100) / 2, (130 + 149 + 1 - 100) / 2
    assert volume.image[0, -1, -1].tolist() == [179, 189, 7]
    expected = square(square(blank(0, 100, 100), 40, 40, 20, 1), 40, 40, 8, 2)
    assert volume.mask is not None
    np.testing.assert_array_equal(volume.mask, expected[None])
    assert volume.image.base is None  # the photograph is not kept


@pytest.mark.parametrize(
    ("top", "left", "disc", "corner", "side"),
    [
        (120, 130, 70, (85, 95), 140),  # twice the disc
        (0, 230, 20, (0, 150), 100),  # moved to stay inside
        (237, 0, 20, (157, 0), 100),
        (20, 20, 200, (0, 0), 250),  # no square is larger than the photograph
    ],
)
def test_the_square_holds_twice_the_disc_and_stays_inside(
    tmp_path: Path, top: int, left: int, disc: int, corner: tuple[int, int], side: int
) -> None:
    volume = only(find_fundus_cases(refuge(tmp_path, mask=levels(top, left, disc)), "refuge"))
    assert volume.image.shape == (1, side, side, 3)
    assert volume.image[0, 0, 0, :2].tolist() == list(corner)
    assert volume.mask is not None
    assert np.count_nonzero(volume.mask) == disc * disc
    assert volume.mask[0, top - corner[0], left - corner[1]] == 2


def test_refuge_with_levels_that_zip_files_add(tmp_path: Path) -> None:
    touch(tmp_path, "REFUGE/REFUGE-Training400/Training400/Glaucoma/g0001.jpg")
    touch(tmp_path, "REFUGE/REFUGE-Training400/Training400/Non-Glaucoma/n0001.jpg")
    drawn = "REFUGE/Annotation-Training400/Annotation-Training400/Disc_Cup_Masks"
    touch(tmp_path, f"{drawn}/Glaucoma/g0001.bmp", f"{drawn}/Non-Glaucoma/n0001.bmp")
    illustration = "REFUGE/Annotation-Training400/Annotation-Training400/Disc_Cup_Fovea_Illustration/g0001.jpg"
    touch(tmp_path, illustration, "REFUGE/Annotation-Training400/Fovea_location.xlsx", "notes/mine.txt")
    touch(tmp_path, "REFUGE/REFUGE-Validation400/REFUGE-Validation400/V0001.jpg", "REFUGE/Test400/T0001.jpg")
    touch(tmp_path, "REFUGE/REFUGE-Validation400-GT/Disc_Cup_Masks/V0001.bmp")
    touch(
        tmp_path, "REFUGE/REFUGE-Test-GT/Disc_Cup_Masks/G/T0001.bmp", "REFUGE/REFUGE-Test-GT/Disc_Cup_Masks/N/T0002.bmp"
    )
    touch(tmp_path, "__MACOSX/Training400/g0009.jpg", "REFUGE/Test400/._T0001.jpg", "REFUGE/Test400/.DS_Store")
    found = find_fundus_cases(tmp_path, "refuge")
    assert names(found) == {"train": ["g0001", "n0001"], "canon": ["V0001", "T0001"]}
    assert [case.name for case in found.part("all")] == ["g0001", "n0001"]
    assert found.missing == ["REFUGE/REFUGE-Test-GT/Disc_Cup_Masks/N/T0002.bmp has no image"]
    assert found.others == [illustration, "REFUGE/Annotation-Training400/Fovea_location.xlsx"]
    touch(tmp_path, "elsewhere/Domain1/train/image/g0001.png")
    assert names(find_fundus_cases(tmp_path, "refuge")) == names(found)


def test_photographs_without_masks_are_left_out_and_named_once(tmp_path: Path) -> None:
    touch(tmp_path, "Training400/Glaucoma/g0001.jpg", "Training400/Glaucoma/g0002.jpg")
    touch(tmp_path, "Annotation-Training400/Disc_Cup_Masks/Glaucoma/g0001.bmp")
    touch(tmp_path, *(f"Test400/T{i:04d}.jpg" for i in range(1, 8)))
    found = find_fundus_cases(tmp_path, "refuge")
    assert names(found) == {"train": ["g0001"]}
    assert found.missing == [
        "Test400: none of its 7 images has all masks",
        "Training400/Glaucoma/g0002.jpg has no mask",
    ]


def test_the_square_is_no_higher_than_the_photograph(tmp_path: Path) -> None:
    mask = square(blank(255, 60, 200), 10, 140, 40, 128)
    volume = only(find_fundus_cases(refuge(tmp_path, where(60, 200), mask), "refuge"))
    assert volume.image.shape == (1, 60, 60, 3)
    assert volume.image[0, 0, 0].tolist() == [0, 130, 7]


def test_photographs_of_a_jpeg_and_of_other_sizes(tmp_path: Path) -> None:
    refuge(tmp_path)
    Image.new("RGB", (120, 514), (200, 90, 30)).save(tmp_path / "Training400/Glaucoma/g0001.jpg")
    mask = square(np.full((514, 120), 255, dtype=np.uint8), 250, 50, 10, 127)
    save(tmp_path / "Annotation-Training400/Disc_Cup_Masks/Glaucoma/g0001.bmp", mask)
    volume = only(find_fundus_cases(tmp_path, "refuge"))
    assert volume.image.shape == (1, 120, 120, 3)  # 200 by its height, but it is 120 wide
    assert np.abs(volume.image[0, 60, 60].astype(int) - (200, 90, 30)).max() <= 3


# Drishti-GS


@pytest.mark.parametrize(("threshold", "lowest"), [(0.75, 191), (0.5, 127), (0.25, 63), (1.0, 255), (0.001, 1)])
def test_so_many_experts_must_agree(tmp_path: Path, threshold: float, lowest: int) -> None:
    disc, cup = blank(0), blank(0)
    greys = [1, 62, 63, 64, 126, 127, 128, 190, 191, 254, 255]
    disc[120, 100:111], cup[140, 100:111] = greys, greys
    mask = only(find_fundus_cases(drishti(tmp_path, disc, cup), "drishti-gs", threshold=threshold)).mask
    count = sum(grey >= lowest for grey in greys)
    assert [np.count_nonzero(mask == n) for n in (1, 2)] == [count, count]


def test_by_default_three_of_four_experts_and_the_cup_belongs_to_the_disc(tmp_path: Path) -> None:
    disc = square(square(blank(0), 100, 100, 30, 128), 100, 100, 20, 191)
    cup = square(square(blank(0), 100, 90, 12, 191), 100, 90, 4, 190)  # ten columns of it lie outside the disc
    volume = only(find_fundus_cases(drishti(tmp_path, disc, cup), "drishti-gs"))
    assert volume.mask is not None
    # Disc and cup together: rows 100 to 119, columns 90 to 119; its square is 100 wide and starts at row 60, column 55.
    assert volume.image[0, 0, 0].tolist() == [60, 55, 7]
    expected = square(blank(0, 100, 100), 40, 45, 20, 1)
    expected[40:52, 35:47] = 2
    expected[40:44, 35:39] = 0
    np.testing.assert_array_equal(volume.mask[0], expected)


@pytest.mark.parametrize("gt", ["Test_GT", "GT"])
def test_drishti_is_divided_as_its_authors_do(tmp_path: Path, gt: str) -> None:
    disc = square(blank(0), 100, 100, 20, 255)
    drishti(tmp_path / "test", disc, disc, part="Test", gt=gt)  # around it, a word of the layout
    training = tmp_path / "test/Drishti-GS1_files/Training"
    touch(training, "Images/GLAUCOMA/drishtiGS_004.png", "Images/NORMAL/drishtiGS_008.png", "Images/Thumbs.db")
    touch(training, "Seen/drishtiGS_004.png")
    for stem in ("drishtiGS_004", "drishtiGS_008", "drishtiGS_010"):
        touch(training, f"GT/{stem}/AvgBoundary/{stem}_diskCenter.txt", f"GT/{stem}/SoftMap/{stem}_ODsegSoftmap.png")
    touch(training, "GT/drishtiGS_004/SoftMap/drishtiGS_004_cupsegSoftmap.png")
    found = find_fundus_cases(tmp_path, "drishti-gs")
    assert [*found.parts] == ["train", "test"]
    assert names(found) == {"train": ["drishtiGS_004"], "test": ["drishtiGS_002"]}
    above = "test/Drishti-GS1_files/Training"
    assert found.missing == [
        f"{above}/Images/NORMAL/drishtiGS_008.png has no mask of the cup",
        f"{above}/GT/drishtiGS_010/SoftMap/drishtiGS_010_ODsegSoftmap.png has no image",
    ]
    assert f"{above}/Seen/drishtiGS_004.png" in found.others
    assert len(found.others) == 5  # that, three centres and the thumbnails
    assert found.part("test")[0].read().image.shape == (1, 100, 100, 3)


# RIM-ONE r3


@pytest.mark.parametrize("stem", ["N-5-L", "N-5-R"])
def test_the_left_half_of_a_stereo_pair_whichever_the_eye(tmp_path: Path, stem: str) -> None:
    volume = only(find_fundus_cases(rim_one(tmp_path, stem), "rim-one-r3"))
    assert volume.image.shape == (1, 100, 100, 3)
    assert volume.image[0, 0, 0].tolist() == [80, 20, 7]  # (120 + 139 + 1 - 100) / 2, (60 + 79 + 1 - 100) / 2
    assert volume.mask is not None
    np.testing.assert_array_equal(volume.mask[0], square(square(blank(0, 100, 100), 40, 40, 20, 1), 40, 40, 8, 2))


def test_the_square_ends_where_the_other_half_begins(tmp_path: Path) -> None:
    rim_one(tmp_path)
    for what in ("Disc", "Cup"):
        pixels = square(blank(0, HEIGHT, 300), 120, 130, 20, 255)
        save(tmp_path / f"Healthy/Average_masks/N-5-L-{what}-Avg.png", pixels)
    volume = only(find_fundus_cases(tmp_path, "rim-one-r3"))
    assert volume.image[0, 0, 0].tolist() == [80, 50, 7]
    assert volume.image[0, 0, -1].tolist() == [80, 149, 7]


def test_masks_of_either_expert_or_of_both(tmp_path: Path) -> None:
    rim_one(tmp_path)
    for expert in "12":
        rim_one(tmp_path, folder=f"Expert{expert}_masks", form="{}-1-{}-exp" + expert + ".png")
        grown = square(blank(0, HEIGHT, 300), 120, 60, 20 + int(expert), 255)
        save(tmp_path / f"Healthy/Expert{expert}_masks/N-5-L-1-Disc-exp{expert}.png", grown)
        touch(tmp_path, f"Healthy/Expert{expert}_masks/N-5-L-2-Disc-exp{expert}.png")  # of the other view
    sizes = {}
    for expert in ("average", "1", "2"):
        mask = only(find_fundus_cases(tmp_path, "rim-one-r3", expert=expert)).mask
        assert mask is not None
        sizes[expert] = np.count_nonzero(mask)
    assert sizes == {"average": 400, "1": 441, "2": 484}
    with pytest.raises(ValueError, match="expert is '3'; there are: average, 1, 2"):
        find_fundus_cases(tmp_path, "rim-one-r3", expert="3")


def test_rim_one_is_divided_into_99_and_60(tmp_path: Path) -> None:
    train = {
        "N": [*range(5, 15), 16, *range(24, 28), *range(52, 57), 58, 59, *range(61, 77), *range(79, 89), 90, 91, 92],
        "G": [1, *range(3, 22), *range(32, 40)],
        "S": [1, *range(10, 29)],
    }
    test = {
        "N": [1, 2, 3, 4, 17, 18, 20, 21, 22, 23, *range(28, 45), 46, 47, 48, 49, 50, 51, 78],
        "G": [2, *range(22, 32)],
        "S": [2, 3, 4, 5, 6, 7, 8, 9, *range(29, 36)],
    }
    expected: dict[str, set[str]] = {"train": set(), "test": set()}
    for part, numbers in (("train", train), ("test", test)):
        for letter, those in numbers.items():
            folder = "RIM-ONE r3/Healthy" if letter == "N" else "RIM-ONE r3/Glaucoma and suspects"
            for n in those:
                stem = f"{letter}-{n}-{'LR'[n % 2]}"
                expected[part].add(stem)
                touch(tmp_path, f"{folder}/Stereo Images/{stem}.jpg", f"{folder}/Average_masks/{stem}-Disc-Avg.png")
                touch(
                    tmp_path, f"{folder}/Average_masks/{stem}-Cup-Avg.png", f"{folder}/Average_masks/{stem}-Cup-Avg.txt"
                )
    touch(tmp_path, "RIM-ONE r3/Healthy/Thumbnails/N-5-R.jpg")
    found = find_fundus_cases(tmp_path, "rim-one-r3")
    assert {part: set(stems) for part, stems in names(found).items()} == expected
    assert (len(found.part("train")), len(found.part("test")), len(found.part("all"))) == (99, 60, 159)
    assert sum(case.name.startswith("N") for case in found.part("test")) == 34
    assert sum(case.name.startswith("N") for case in found.cases) == 85
    assert found.missing == []
    assert "RIM-ONE r3/Healthy/Thumbnails/N-5-R.jpg" in found.others
    assert len(found.others) == 160


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
