"""Whole fundus photographs as REFUGE, Drishti-GS and RIM-ONE r3 distribute them."""

from pathlib import Path

import numpy as np
import pytest
from fundus_files import HEIGHT, blank, drishti, levels, names, only, refuge, rim_one, save, square, touch, where
from PIL import Image

from trueup.data.datasets.fundus import find_fundus_cases

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
