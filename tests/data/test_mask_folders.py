"""A folder of one's own with images and masks, pictures and volumes; expectations are worked out by hand."""

import pickle
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from trueup.data.datasets.file_matching import FoundCases
from trueup.data.datasets.mask_folders import scan_mask_folder
from trueup.data.domains import BrokenImageError
from trueup.data.slices import Volume

Array = NDArray[Any]
CORNERS = np.array([[0, 1, 1], [2, 0, 1]], dtype=np.uint8)  # two rows, three columns


def save(path: Path, pixels: Array, **settings: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **settings)


def pair(root: Path, mask: Array = CORNERS, name: str = "a", domain: str = "day") -> Path:
    """A colour picture and its mask."""
    height, width = mask.shape[:2]
    colours = np.arange(height * width * 3).astype(np.uint8).reshape(height, width, 3)
    save(root / domain / "images" / f"{name}.png", colours)
    save(root / domain / "masks" / f"{name}.png", mask)
    return root


def put(root: Path, *paths: str) -> Path:
    """Files that are never read."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def named(root: Path, *classes: str) -> Path:
    (root / "classes.txt").write_text("\n".join(classes) + "\n\n")
    return root


def nifti(path: Path, values: Array, affine: Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), path)


def only(root: Path) -> Volume:
    (found,) = scan_mask_folder(root)[1].values()
    (case,) = found.cases
    return case.read()


def names(domains: dict[str, FoundCases]) -> dict[str, list[str]]:
    assert all([*found.parts] == ["train"] for found in domains.values())
    return {name: [case.name for case in found.part("train")] for name, found in domains.items()}


# Names


def test_every_folder_with_images_and_masks_is_a_domain(tmp_path: Path) -> None:
    root = tmp_path / "images of masks"
    put(root, "night/Images/b.png", "night/Images/a.tif", "night/Masks/a.bmp", "night/Masks/b.png")
    put(root, "day/images/z.JPG", "day/masks/z.PNG", "notes/readme.md", "__MACOSX/day/images/z.jpg")
    put(root, "day/images/._z.jpg", "day/images/.DS_Store", "day/masks/._z.png")
    classes, domains = scan_mask_folder(named(root, "nothing", "something"))
    assert classes == ("nothing", "something")
    assert names(domains) == {"day": ["z"], "night": ["a", "b"]}
    assert [found.missing + found.others for found in domains.values()] == [[], []]


def test_one_domain_may_be_the_root_itself(tmp_path: Path) -> None:
    root = tmp_path / "clinic"
    put(root, "images/a.png", "masks/a.png")
    assert names(scan_mask_folder(named(root, "no", "yes"))[1]) == {"clinic": ["a"]}


def test_masks_may_say_in_their_name_that_they_are_masks(tmp_path: Path) -> None:
    images = ("a.png", "a1.png", "b.png", "c.png", "d.jpeg", "e.x.png")
    put(named(tmp_path, "no", "yes"), *(f"day/images/{name}" for name in images))
    put(tmp_path, *(f"day/masks/{n}.png" for n in ("a_mask", "a1", "b_seg", "c_gt", "d_segmentation", "e.x")))
    put(tmp_path, *(f"day/{kind}/{n}.png" for kind in ("images", "masks") for n in ("f", "f_mask")))
    domains = scan_mask_folder(tmp_path)[1]
    assert names(domains) == {"day": ["a", "a1", "b", "c", "d", "e.x", "f", "f_mask"]}
    assert domains["day"].missing == []


def test_folders_below_images_are_part_of_the_name(tmp_path: Path) -> None:
    put(named(tmp_path, "no", "yes"), "day/images/p1/1.png", "day/images/p2/1.png", "day/masks/p1/1.png")
    domains = scan_mask_folder(put(tmp_path, "day/masks/p2/1_gt.png"))[1]
    assert names(domains) == {"day": ["p1/1", "p2/1"]}


def test_partners_that_are_missing_are_named(tmp_path: Path) -> None:
    put(named(tmp_path, "no", "yes"), "day/images/a.png", "day/images/b.png", "day/images/c.png", "day/images/list.csv")
    put(tmp_path, "day/masks/a.png", "day/masks/c.jpg", "day/masks/d.png", "day/masks/a.raw")
    domains = scan_mask_folder(tmp_path)[1]
    assert names(domains) == {"day": ["a"]}
    assert sorted(domains["day"].missing) == [
        "day/images/b.png has no mask",
        "day/images/c.png has no mask",
        "day/masks/c.jpg: JPEG alters class numbers; save masks as PNG",
        "day/masks/d.png has no image",
    ]
    assert domains["day"].others == ["day/images/list.csv"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "it holds: no folders"),
        (["day/cat/1.png"], "holds no images and masks, nor folders with images and masks; it holds: day"),
        (["day/images/a.png"], "has only the folder images"),
        (["day/images/a.png", "day/masks/b.png"], "no image of day has a mask; day/masks/b.png has no image"),
        (["day/images/a.png", "day/images/a.jpg", "day/masks/a.png"], "a.jpg and a.png in .* have the same name"),
        (
            ["day/images/a.png", "day/masks/a.png", "day/masks/a_gt.png"],
            "a.png and a_gt.png in .* masks of the same image",
        ),
        (["a+b/images/a.png", "a+b/masks/a.png"], r"rename the folder 'a\+b'"),
    ],
)
def test_folders_that_are_laid_out_otherwise(tmp_path: Path, files: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scan_mask_folder(put(named(tmp_path, "no", "yes"), *files))


# Classes


def test_classes_are_counted_over_all_masks_of_all_domains(tmp_path: Path) -> None:
    pair(tmp_path, np.array([[0, 1]], dtype=np.uint8))
    pair(tmp_path, np.array([[0, 3]], dtype=np.uint8), name="b")
    pair(tmp_path, np.array([[2, 2]], dtype=np.uint8), domain="night")
    classes, domains = scan_mask_folder(tmp_path)
    assert classes == ("background", "class 1", "class 2", "class 3")
    masks = [case.read().mask for found in domains.values() for case in found.cases]
    assert [mask.tolist() for mask in masks if mask is not None] == [[[[0, 1]]], [[[0, 3]]], [[[2, 2]]]]


@pytest.mark.parametrize(
    "held", [[[0, 255]], [[255, 255]], [[0, 1]], [[0, 255], [0, 1], [0, 0]]], ids=["255", "all 255", "1", "each"]
)
def test_two_classes_may_be_0_and_255(tmp_path: Path, held: list[list[int]]) -> None:
    for i, values in enumerate(held):
        pair(tmp_path, np.array([values], dtype=np.uint8), name=str(i))
    classes, domains = scan_mask_folder(tmp_path)
    assert classes == ("background", "class 1")
    for case, values in zip(domains["day"].cases, held, strict=True):
        mask = case.read().mask
        assert mask is not None
        assert mask.dtype == np.uint8
        assert mask.tolist() == [[[min(value, 1) for value in values]]]


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([[0, 128, 255]], r"0\.png: the mask holds 0, 128, 255; .* no mask holds 1"),
        ([[0, 1, 255]], r"0\.png: the mask holds 0, 1, 255; .* no mask holds 2"),
        ([[0, 1, 2], [0, 255, 255]], r"1\.png: the mask holds 0, 255; .* no mask holds 3"),
        ([[0, 1, 1], [0, 3, 3]], r"1\.png: the mask holds 0, 3; .* no mask holds 2; .*classes\.txt"),
        ([[0, 0, 0]], "all masks are 0"),
    ],
)
def test_numbers_that_are_no_classes(tmp_path: Path, held: list[list[int]], message: str) -> None:
    for i, values in enumerate(held):
        pair(tmp_path, np.array([values], dtype=np.uint8), name=str(i))
    with pytest.raises(ValueError, match=message):
        scan_mask_folder(tmp_path)


def test_masks_may_be_without_background(tmp_path: Path) -> None:
    assert scan_mask_folder(pair(tmp_path, np.array([[1, 2]], dtype=np.uint8)))[0] == (
        "background",
        "class 1",
        "class 2",
    )


def test_a_photograph_is_no_mask(tmp_path: Path) -> None:
    pair(tmp_path, np.arange(256, dtype=np.uint8).reshape(16, 16))
    with pytest.raises(ValueError, match="hold 256 classes; at most 255 are allowed"):
        scan_mask_folder(tmp_path)
    with pytest.raises(BrokenImageError, match=r"a\.png: the mask holds 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.; there are 3"):
        only(named(tmp_path, "a", "b", "c"))


def test_classes_that_are_named_need_not_be_drawn(tmp_path: Path) -> None:
    root = named(pair(tmp_path, np.array([[0, 3]], dtype=np.uint8)), "air", "fat", "bone", "blood")
    assert scan_mask_folder(root)[0] == ("air", "fat", "bone", "blood")
    mask = only(root).mask
    assert mask is not None
    assert mask.tolist() == [[[0, 3]]]
    with pytest.raises(BrokenImageError, match=r"a\.png: the mask holds 0, 3; there are 3 classes, 0 to 2"):
        only(named(tmp_path, "air", "fat", "bone"))
    pair(tmp_path, np.array([[0, 255]], dtype=np.uint8))
    with pytest.raises(BrokenImageError, match=r"the mask holds 0, 255; there are 3 classes"):
        only(tmp_path)


@pytest.mark.parametrize("text", ["", "background", "a\nb\na", "a\n\nb"])
def test_names_of_classes_are_at_least_two_and_differ(tmp_path: Path, text: str) -> None:
    (pair(tmp_path) / "classes.txt").write_text(text)
    with pytest.raises(ValueError, match=r"classes\.txt names .*distinct names, one per line"):
        scan_mask_folder(tmp_path)


# Pictures


def test_a_picture_is_seen_whole_in_a_square(tmp_path: Path) -> None:
    volume = only(pair(tmp_path))
    assert volume.image.shape == (1, 2, 3, 3)
    assert volume.image[0, 1, 2].tolist() == [15, 16, 17]
    assert volume.mask is not None
    np.testing.assert_array_equal(volume.mask[0], CORNERS)
    assert volume.spacing == (1.0, 1.0, 1.0)
    assert volume.box == (-1, 0, 3, 3)  # three wide, so three high, of which one is empty
    assert volume.network_view(0)[:, 0, 0].tolist() == [0, 0, 9]
    assert volume.network_target(0).tolist() == [[0, 0, 0], [0, 1, 1], [2, 0, 1]]


def test_numbers_of_masks_however_they_are_saved(tmp_path: Path) -> None:
    save(tmp_path / "day/images/a.png", CORNERS)
    file = tmp_path / "day/masks/a.png"
    palette = Image.fromarray(CORNERS)
    palette.putpalette([255, 255, 255, 128, 0, 0, 0, 128, 0])  # colours mean nothing
    masks = (
        Image.fromarray(CORNERS),
        Image.fromarray(CORNERS).convert("RGB"),
        Image.fromarray(CORNERS).convert("RGBA"),
        Image.fromarray(CORNERS).convert("LA"),
        Image.fromarray(CORNERS.astype(np.uint16)),
        palette,
    )
    for picture in masks:
        file.parent.mkdir(exist_ok=True)
        picture.save(file)
        with Image.open(file) as kept:
            assert kept.mode == picture.mode
        mask = only(tmp_path).mask
        assert mask is not None, picture.mode
        assert mask.dtype == np.uint8
        np.testing.assert_array_equal(mask[0], CORNERS, err_msg=picture.mode)
    Image.fromarray(CORNERS > 0).save(file)
    mask = only(tmp_path).mask
    assert mask is not None
    assert mask.tolist() == [[[0, 1, 1], [1, 0, 1]]]


def test_grey_pictures_stay_grey_and_scanners_are_windowed(tmp_path: Path) -> None:
    pair(tmp_path)
    file = tmp_path / "day/images/a.png"
    save(file, CORNERS + 100)
    assert only(tmp_path).image[..., 0].tolist() == [[[100, 101, 101], [102, 100, 101]]]
    file.unlink()
    save(file.with_suffix(".tif"), np.array([[1000, 1000, 1000], [1000, 1000, 4000]], dtype=np.uint16))
    assert only(tmp_path).image[..., 0].tolist() == [[[0, 0, 0], [0, 0, 255]]]
    save(file.with_suffix(".tif"), np.array([[0, 0, 0], [0, 0, 1]], dtype=np.float32))
    assert only(tmp_path).image[..., 0].tolist() == [[[0, 0, 0], [0, 0, 255]]]
    save(file.with_suffix(".tif"), np.array([[0, 0, 0], [0, np.nan, 1]], dtype=np.float32))
    with pytest.raises(BrokenImageError, match=r"a\.tif: holds values that are not finite"):
        only(tmp_path)


def test_masks_of_another_size_or_in_colours(tmp_path: Path) -> None:
    pair(tmp_path)
    save(tmp_path / "day/masks/a.png", CORNERS.T)
    with pytest.raises(BrokenImageError, match=r"a\.png: the mask is 1×3×2 \(slices, rows, columns\), its image 1×2×3"):
        only(tmp_path)
    save(tmp_path / "day/masks/a.png", np.dstack([CORNERS, CORNERS, CORNERS + 1]))
    with pytest.raises(BrokenImageError, match=r"a\.png: is coloured"):
        scan_mask_folder(tmp_path)


@pytest.mark.parametrize("broken", ["images", "masks"])
def test_files_that_cannot_be_decoded(tmp_path: Path, broken: str) -> None:
    named(pair(tmp_path, np.tile(CORNERS, (40, 40))), "a", "b", "c")
    file = tmp_path / "day" / broken / "a.png"
    file.write_bytes(file.read_bytes()[:80])
    with pytest.raises(BrokenImageError, match=r"a\.png: "):
        only(tmp_path)


def test_a_stack_in_one_picture_is_refused(tmp_path: Path) -> None:
    named(pair(tmp_path), "a", "b", "c")
    (tmp_path / "day/images/a.png").unlink()
    page = Image.fromarray(CORNERS)
    page.save(tmp_path / "day/images/a.tiff", save_all=True, append_images=[page, page])
    with pytest.raises(BrokenImageError, match=r"a\.tiff: has 3 pages; save a stack as NIfTI"):
        only(tmp_path)


# Volumes

# Files store columns, rows, slices; this affine runs to the patient's left and back, as slices are looked at.
LEFT_BACK = np.diag([-0.5, -2.0, 5.0, 1.0])


def volume_values() -> tuple[Array, Array]:
    """(x, y, z) = (6, 4, 3): grey values that grow along all axes, and a mask that differs along all."""
    x, y, z = np.indices((6, 4, 3))
    mask = np.zeros((6, 4, 3), dtype=np.uint8)
    mask[1:3, 0, 1], mask[5, 3, 2] = 1, 2
    return (100 * z + 10 * y + x).astype(np.int16), mask


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_volumes_are_windowed_and_keep_their_millimetres(tmp_path: Path, ending: str) -> None:
    grey, mask = volume_values()
    nifti(tmp_path / f"day/images/scan.1{ending}", grey, LEFT_BACK)
    nifti(tmp_path / f"day/masks/scan.1_seg{ending}", mask, LEFT_BACK)
    classes, domains = scan_mask_folder(tmp_path)
    assert classes == ("background", "class 1", "class 2")
    (case,) = pickle.loads(pickle.dumps(domains["day"].cases))
    assert (case.name, case.slices) == ("scan.1", 3)
    volume = case.read()
    low, high = np.percentile(grey, [1, 99])
    expected = np.clip(255 * (grey - low) / (high - low) + 0.5, 0, 255).astype(np.uint8)
    np.testing.assert_allclose(volume.image[..., 0].astype(int), expected.transpose(2, 1, 0).astype(int), atol=1)
    np.testing.assert_array_equal(volume.mask, mask.transpose(2, 1, 0))
    assert volume.spacing == (5.0, 2.0, 0.5)
    # Four rows of 2 mm make 8 mm; six columns of 0.5 mm make 3: the square is 4 rows and 16 columns, 5 of them before.
    assert volume.box == (0, -5, 4, 16)


def test_metaimages_with_their_voxels_beside_them(tmp_path: Path) -> None:
    import SimpleITK

    grey, mask = volume_values()
    for folder, values, ending in (("images", grey, ".mhd"), ("masks", mask, ".mha")):
        (tmp_path / folder).mkdir()
        image = SimpleITK.GetImageFromArray(values.transpose(2, 1, 0))
        image.SetSpacing((0.5, 2.0, 5.0))
        SimpleITK.WriteImage(image, str(tmp_path / folder / f"c{ending}"))
    found = scan_mask_folder(tmp_path)[1][tmp_path.name]
    assert (tmp_path / "images/c.raw").exists()
    assert (found.missing, found.others) == ([], [])
    volume = only(tmp_path)
    np.testing.assert_array_equal(volume.mask, mask.transpose(2, 1, 0))
    assert volume.box == (0, -5, 4, 16)


def test_a_mask_lies_on_the_voxels_of_its_image_whatever_its_own_header_says(tmp_path: Path) -> None:
    grey, mask = volume_values()
    nifti(tmp_path / "images/a.nii", grey, LEFT_BACK)
    nifti(tmp_path / "masks/a.nii", mask, np.eye(4))
    volume = only(tmp_path)
    np.testing.assert_array_equal(volume.mask, mask.transpose(2, 1, 0))


def test_masks_of_volumes_hold_class_numbers_or_nearly_so(tmp_path: Path) -> None:
    grey, mask = volume_values()
    nifti(tmp_path / "images/a.nii", grey, LEFT_BACK)
    nifti(tmp_path / "masks/a.nii", mask * np.float32(0.99999), LEFT_BACK)
    np.testing.assert_array_equal(only(tmp_path).mask, mask.transpose(2, 1, 0))
    nifti(tmp_path / "masks/a.nii", np.where(mask > 0, np.float32(255), np.float32(0)), LEFT_BACK)
    np.testing.assert_array_equal(only(tmp_path).mask, mask.transpose(2, 1, 0) > 0)
    nifti(tmp_path / "masks/a.nii", mask * np.float32(0.5), LEFT_BACK)
    with pytest.raises(BrokenImageError, match=r"a\.nii: the mask holds 0, 0\.5, 1; "):
        scan_mask_folder(tmp_path)
    nifti(tmp_path / "masks/a.nii", mask.astype(np.int16) - 1, LEFT_BACK)
    with pytest.raises(BrokenImageError, match=r"a\.nii: the mask holds -1, 0, 1; "):
        scan_mask_folder(tmp_path)


def test_volumes_and_masks_of_other_sizes_and_damaged_ones(tmp_path: Path) -> None:
    grey, mask = volume_values()
    nifti(tmp_path / "images/a.nii", grey, LEFT_BACK)
    nifti(tmp_path / "masks/a.nii", mask[:, :, :2], LEFT_BACK)
    with pytest.raises(BrokenImageError, match=r"a\.nii has 6×4×2 voxels, its image 6×4×3"):
        only(named(tmp_path, "a", "b", "c"))
    (tmp_path / "images/a.nii").write_bytes(b"no volume")
    (found,) = scan_mask_folder(tmp_path)[1].values()
    assert [line.startswith("a.nii: ") for line in found.broken] == [True]
    with pytest.raises(BrokenImageError, match=r"a\.nii: "):
        only(tmp_path)
