"""Label codings, and masks aligned with their images."""

from pathlib import Path

import numpy as np
import pytest
from volume_files import CODING, X, Y, Z, affine, numbers, save_nifti

from trueup.data.datasets.file_matching import LabelCoding, read_labelled_volume
from trueup.data.domains import BrokenImageError
from trueup.data.slices import window_to_uint8

# Images with their masks.


def test_numbers_become_classes_by_hand() -> None:
    values = np.array([[0, 200, 500], [600, 0, 200]], dtype=np.int16)
    classes = CODING.decode(values, "m.nii")
    assert classes.tolist() == [[0, 2, 3], [1, 0, 2]]
    assert classes.dtype == np.uint8
    assert CODING.decode(values.astype(np.uint16), "m.nii").tolist() == classes.tolist()
    nearly = values + np.array([1e-5, -1e-5, 1e-4])
    assert CODING.decode(nearly, "m.nii").tolist() == classes.tolist()
    assert LabelCoding("c", {0: 0, 1: 1}).decode(np.array([True, False]), "m.nii").tolist() == [1, 0]


def test_numbers_that_mean_nothing_are_listed() -> None:
    with pytest.raises(BrokenImageError) as caught:
        CODING.decode(np.array([0, 9, 200, 7, 7, 500.5]), "m.nii")
    assert str(caught.value) == "m.nii: values 7, 9, 500.5 are not labels of hearts; expected 0, 200, 500, 600"
    with pytest.raises(BrokenImageError, match=r"values 1, 2, 3, 4, 5, 6, 7, 8 \.\.\. are not labels"):
        CODING.decode(np.arange(100), "m.nii")


@pytest.mark.parametrize("header", ["as its image", "lost"])
def test_an_image_with_its_mask(tmp_path: Path, header: str) -> None:
    values = numbers()
    codes = np.array([0, 200, 500, 600])[values % 4]
    image = save_nifti(tmp_path / "i.nii.gz", values, affine("RAS"))
    # A mask that was saved without caring for its header still belongs to the voxels as they are stored.
    matrix = affine("RAS") if header == "as its image" else np.eye(4)
    label = save_nifti(tmp_path / "m.nii.gz", codes.astype(np.int16), matrix)
    volume = read_labelled_volume(image, label, CODING, field=9.0)
    shown = values.transpose(2, 1, 0)[:, ::-1, ::-1]
    assert np.array_equal(volume.image, window_to_uint8(shown)[..., None])
    assert volume.image.shape == (Z, Y, X, 1)
    assert volume.image.dtype == np.uint8
    assert (volume.image.min(), volume.image.max()) == (0, 255)
    assert volume.mask is not None
    assert np.array_equal(volume.mask, np.array([0, 2, 3, 1])[shown % 4])
    assert volume.spacing == (4.0, 0.5, 0.75)
    assert volume.box == (1, 6, 18, 12)  # 9 mm are 18 rows of 0.5 mm and 12 columns of 0.75 mm


def test_the_mask_belongs_to_the_channel_that_is_asked_for(tmp_path: Path) -> None:
    image = save_nifti(tmp_path / "i.nii.gz", numbers((X, Y, Z, 2)), affine("LPS"))
    label = save_nifti(tmp_path / "m.nii.gz", np.zeros((X, Y, Z, 1), dtype=np.uint8), affine("LPS"))
    for channel in (0, 1):
        shown = numbers((X, Y, Z, 2))[..., channel].transpose(2, 1, 0)
        assert np.array_equal(
            read_labelled_volume(image, label, CODING, 9.0, channel).image, window_to_uint8(shown)[..., None]
        )


@pytest.mark.parametrize("code", ["LPS", "RAI", "LAS"])
def test_a_mask_that_is_stored_another_way_round_is_refused(tmp_path: Path, code: str) -> None:
    """It may be right about itself, and then voxel by voxel would be a mirror image."""
    image = save_nifti(tmp_path / "i.nii.gz", numbers(), affine("RAS"))
    label = save_nifti(tmp_path / "m.nii.gz", np.zeros((X, Y, Z), dtype=np.uint8), affine(code))
    with pytest.raises(BrokenImageError, match=r"m\.nii\.gz has another orientation than its image"):
        read_labelled_volume(image, label, CODING, 9.0)


def test_a_mask_of_another_shape(tmp_path: Path) -> None:
    image = save_nifti(tmp_path / "i.nii.gz", numbers(), affine())
    label = save_nifti(tmp_path / "m.nii.gz", np.zeros((Y, X, Z), dtype=np.uint8), affine())
    with pytest.raises(BrokenImageError, match=r"m\.nii\.gz has 20×24×5 voxels, its image 24×20×5"):
        read_labelled_volume(image, label, CODING, 9.0)
