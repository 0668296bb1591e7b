"""Reading volumes: orientation, headers of scanners and converters."""

import itertools
import struct
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from volume_files import (
    AXIAL,
    SHORT_AXIS,
    SKEW,
    SLIGHT,
    TILTED,
    X,
    Y,
    Z,
    acdc_like,
    affine,
    geometry,
    numbers,
    save_itk,
    save_nifti,
)

from trueup.data.domains import BrokenImageError
from trueup.data.volumes import count_slices, read_volume, write_mask


@pytest.mark.parametrize("turned", [None, SLIGHT], ids=["straight", "oblique"])
@pytest.mark.parametrize("codes", AXIAL)
def test_axial_slices_are_shown_from_front_to_back_and_from_right_to_left(
    tmp_path: Path, codes: str, turned: np.ndarray | None
) -> None:
    path = save_nifti(tmp_path / "a.nii.gz", numbers(), affine(codes, turned=turned))
    image = nib.load(path)
    # Another way to the same: nibabel turns the volume to left, posterior; slices stay in their order.
    wanted = axcodes2ornt(("L", "P", codes[2]))
    oracle = image.as_reoriented(ornt_transform(io_orientation(image.affine), wanted))
    scan = read_volume(path)
    assert np.array_equal(scan.values, np.asarray(oracle.dataobj).transpose(2, 1, 0))
    assert scan.values.dtype == np.int16
    assert scan.spacing == pytest.approx((4.0, *oracle.header.get_zooms()[1::-1]))
    assert count_slices(path) == Z


def test_what_is_in_front_on_the_right_comes_first(tmp_path: Path) -> None:
    values = np.zeros((X, Y, Z), dtype=np.int16)
    values[-1, -1, 3] = 1  # in RAS the last x is rightmost and the last y foremost
    values[-1, 0, 3] = 2  # right, back
    values[0, 0, 3] = 3  # left, back
    shown = read_volume(save_nifti(tmp_path / "a.nii", values, affine("RAS"))).values
    assert shown.shape == (Z, Y, X)
    assert (shown[3, 0, 0], shown[3, -1, 0], shown[3, -1, -1]) == (1, 2, 3)
    assert np.count_nonzero(shown) == 3
    values = values[:, :, ::-1]
    assert read_volume(save_nifti(tmp_path / "b.nii", values, affine("RAS"))).values[1, 0, 0] == 1


@pytest.mark.parametrize(
    "matrix",
    [
        affine("RAS", turned=SHORT_AXIS),
        affine("RSA"),
        affine("ASR"),
        affine("LPS", turned=SKEW),
        affine("RAS", turned=TILTED),
    ],
    ids=["short axis", "coronal", "sagittal", "skew", "tilted"],
)
def test_other_planes_are_shown_as_stored(tmp_path: Path, matrix: np.ndarray) -> None:
    scan = read_volume(save_nifti(tmp_path / "a.nii.gz", numbers(), matrix))
    assert np.array_equal(scan.values, numbers().transpose(2, 1, 0))
    assert scan.spacing == pytest.approx((4.0, 0.5, 0.75))


@pytest.mark.parametrize(
    ("zooms", "slices"),
    [
        ((0.5, 4.0, 0.6), 1),
        ((4.0, 0.5, 0.6), 0),
        ((0.5, 0.6, 4.0), 2),
        ((0.8, 1.1, 0.7), 2),  # not clearly coarser
        ((0.5, 4.0, 3.0), 2),  # than one, but not than both
        ((1.0, 1.0, 0.5), 2),
    ],
)
def test_slices_run_along_the_axis_that_is_clearly_coarser(
    tmp_path: Path, zooms: tuple[float, ...], slices: int
) -> None:
    matrix = affine("RSA", zooms, turned=SKEW)
    path = save_nifti(tmp_path / "a.nii.gz", numbers(), matrix)
    scan = read_volume(path)
    rows, columns = sorted({0, 1, 2} - {slices}, reverse=True)
    assert np.array_equal(scan.values, numbers().transpose(slices, rows, columns))
    assert scan.spacing == pytest.approx((zooms[slices], zooms[rows], zooms[columns]))
    assert count_slices(path) == (X, Y, Z)[slices]


def test_a_coarse_axis_that_runs_from_foot_to_head_gives_axial_slices(tmp_path: Path) -> None:
    # Stored as (left, head, front) with thick slices along the second axis.
    scan = read_volume(save_nifti(tmp_path / "a.nii.gz", numbers(), affine("LSA", (0.5, 4.0, 0.6))))
    assert np.array_equal(scan.values, numbers().transpose(1, 2, 0)[:, ::-1, :])


@pytest.mark.parametrize("ending", [".mhd", ".mha", ".nrrd"])
@pytest.mark.parametrize(
    "matrix",
    [affine("LPS"), affine("RAS"), affine("PLI"), affine("LPS", turned=SLIGHT), affine("LIP", turned=SHORT_AXIS)],
    ids=["LPS", "RAS", "PLI", "oblique", "short axis"],
)
def test_formats_make_no_difference(tmp_path: Path, ending: str, matrix: np.ndarray) -> None:
    one = save_nifti(tmp_path / "a.nii.gz", numbers(), matrix)
    other = save_itk(tmp_path / f"b{ending}", numbers(), matrix)
    a, b = read_volume(one), read_volume(other)
    assert np.array_equal(a.values, b.values)
    assert a.values.dtype == b.values.dtype == np.int16
    assert a.spacing == pytest.approx(b.spacing, rel=1e-6)
    assert a.grid.affine == pytest.approx(b.grid.affine, abs=1e-5)
    assert count_slices(one) == count_slices(other) == len(a.values)


def test_simpleitk_agrees_on_how_axial_slices_lie(tmp_path: Path) -> None:
    path = save_itk(tmp_path / "a.mha", numbers(), affine("ARS", turned=SLIGHT))
    oracle = sitk.GetArrayFromImage(sitk.DICOMOrient(sitk.ReadImage(str(path)), "LPS"))
    assert np.array_equal(read_volume(path).values, oracle)


# Headers as scanners, converters and challenges write them.


def test_scaling_is_applied(tmp_path: Path) -> None:
    path = save_nifti(tmp_path / "a.nii", numbers(), affine("LPS"))
    blob = path.read_bytes()
    path.write_bytes(blob[:112] + struct.pack("<ff", 0.5, -3) + blob[120:])  # scl_slope and scl_inter
    assert np.array_equal(read_volume(path).values, 0.5 * numbers().transpose(2, 1, 0) - 3)
    path.write_bytes(blob[:112] + struct.pack("<ff", 0, 7) + blob[120:])  # a slope of zero means none
    assert np.array_equal(read_volume(path).values, numbers().transpose(2, 1, 0))


@pytest.mark.parametrize("kind", ["nii", "mhd"])
def test_the_other_byte_order(tmp_path: Path, kind: str) -> None:
    values = numbers()
    if kind == "nii":
        header = nib.Nifti1Header(endianness=">")
        header.set_data_dtype(">i2")
        nib.save(nib.Nifti1Image(values, affine("LPS"), header), tmp_path / "a.nii")
        assert (tmp_path / "a.nii").read_bytes()[:4] == struct.pack(">i", 348)
    else:
        (tmp_path / "a.raw").write_bytes(values.T.astype(">i2").tobytes())
        (tmp_path / "a.mhd").write_text(
            "ObjectType = Image\nNDims = 3\nBinaryData = True\nBinaryDataByteOrderMSB = True\n"
            f"ElementSpacing = 0.75 0.5 4\nDimSize = {X} {Y} {Z}\nElementType = MET_SHORT\nElementDataFile = a.raw\n"
        )
    scan = read_volume(tmp_path / f"a.{kind}")
    assert np.array_equal(scan.values, values.transpose(2, 1, 0))
    assert scan.values.dtype.isnative
    assert scan.spacing == (4.0, 0.5, 0.75)


def test_channels_of_nifti(tmp_path: Path) -> None:
    values = numbers((X, Y, Z, 2))
    path = save_nifti(tmp_path / "a.nii.gz", values, affine("LPS"))
    for channel in (0, 1):
        assert np.array_equal(read_volume(path, channel).values, values[..., channel].transpose(2, 1, 0))
    with pytest.raises(BrokenImageError, match=r"a\.nii\.gz: there is no channel 2; there are 2"):
        read_volume(path, 2)
    assert count_slices(path) == Z
    vectors = save_nifti(tmp_path / "b.nii", numbers((X, Y, Z, 1, 3)), affine("LPS"))
    assert np.array_equal(read_volume(vectors, 2).values, numbers((X, Y, Z, 1, 3))[..., 0, 2].transpose(2, 1, 0))
    single = save_nifti(tmp_path / "c.nii", numbers((X, Y, Z, 1)), affine("LPS"))
    assert np.array_equal(read_volume(single).values, numbers((X, Y, Z)).transpose(2, 1, 0))
    with pytest.raises(BrokenImageError, match="no channel 1"):
        read_volume(single, 1)
    film = save_nifti(tmp_path / "d.nii", numbers((X, Y, Z, 2, 3)), affine("LPS"))
    with pytest.raises(BrokenImageError, match="24×20×5×2×3 is neither a volume nor several"):
        count_slices(film)


def test_channels_of_itk(tmp_path: Path) -> None:
    values = numbers((2, Z, Y, X))
    sitk.WriteImage(sitk.GetImageFromArray(values.transpose(1, 2, 3, 0), isVector=True), str(tmp_path / "v.mha"))
    sitk.WriteImage(sitk.GetImageFromArray(values, isVector=False), str(tmp_path / "t.mha"))
    for name, channel in itertools.product(("v.mha", "t.mha"), (0, 1)):
        assert np.array_equal(read_volume(tmp_path / name, channel).values, values[channel])
    with pytest.raises(BrokenImageError, match=r"v\.mha: there is no channel 2"):
        read_volume(tmp_path / "v.mha", 2)


@pytest.mark.parametrize("ending", [".nii", ".mha"])
def test_a_single_slice(tmp_path: Path, ending: str) -> None:
    values = numbers((X, Y))
    path = tmp_path / f"a{ending}"
    if ending == ".nii":
        nib.save(nib.Nifti1Image(values, np.diag([-4.0, -0.5, 1, 1])), path)
    else:
        image = sitk.GetImageFromArray(np.ascontiguousarray(values.T))
        image.SetSpacing((4.0, 0.5))
        sitk.WriteImage(image, str(path))
    scan = read_volume(path)
    assert np.array_equal(scan.values, values.T[None])
    assert scan.spacing[1:] == (0.5, 4.0)
    assert count_slices(path) == 1
    write_mask(tmp_path / f"m{ending}", (scan.values > 200).astype(np.uint8), scan)
    again = sitk.ReadImage(str(tmp_path / f"m{ending}"))
    assert np.array_equal(sitk.GetArrayFromImage(again), (values.T > 200))
    assert np.array_equal(geometry(again), geometry(sitk.ReadImage(str(path))))


def test_nifti_2_and_large_integers(tmp_path: Path) -> None:
    path = tmp_path / "a.nii.gz"
    nib.save(nib.Nifti2Image(numbers(dtype="int32"), affine("RAS")), path)
    scan = read_volume(path)
    assert np.array_equal(scan.values, numbers().transpose(2, 1, 0)[:, ::-1, ::-1])
    write_mask(tmp_path / "m.nii.gz", (scan.values > 9).astype(np.uint8), scan)
    mask = nib.load(tmp_path / "m.nii.gz")
    assert isinstance(mask, nib.Nifti2Image)
    assert np.array_equal(np.asarray(mask.dataobj), numbers() > 9)


def test_the_size_of_voxels_is_that_of_pixdim(tmp_path: Path) -> None:
    path = acdc_like(tmp_path / "a.nii.gz")
    assert nib.affines.voxel_sizes(nib.load(path).affine).tolist() == [1, 1, 1]
    scan = read_volume(path)
    assert scan.spacing == (10.0, 1.25, 1.5)
    assert np.array_equal(scan.values, numbers().transpose(2, 1, 0))


def test_a_header_that_says_nothing_of_the_patient_leaves_things_as_they_are(tmp_path: Path) -> None:
    path = save_nifti(tmp_path / "a.nii.gz", numbers(), None, pixdim=[1, 0.75, 0.5, 4, 0, 0, 0, 0])
    header = nib.load(path).header
    assert (header["sform_code"], header["qform_code"]) == (0, 0)
    scan = read_volume(path)
    assert np.array_equal(scan.values, numbers().transpose(2, 1, 0))
    assert scan.spacing == (4.0, 0.5, 0.75)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_an_sform_that_makes_no_sense_leaves_things_as_they_are(tmp_path: Path, bad: float) -> None:
    path = save_nifti(tmp_path / "a.nii", numbers(), affine("RAS"))
    blob = bytearray(path.read_bytes())
    blob[280:328] = struct.pack("<12f", *[bad] * 12)
    path.write_bytes(bytes(blob))
    scan = read_volume(path)
    assert np.array_equal(scan.values, numbers().transpose(2, 1, 0))
    assert scan.spacing == (4.0, 0.5, 0.75)


@pytest.mark.parametrize(("unit", "factor"), [("meter", 1000.0), ("micron", 0.001), ("mm", 1.0), ("unknown", 1.0)])
def test_spacing_is_in_millimetres(tmp_path: Path, unit: str, factor: float) -> None:
    image = nib.Nifti1Image(numbers(), affine("LPS"))
    image.header.set_xyzt_units(unit)
    nib.save(image, tmp_path / "a.nii")
    scan = read_volume(tmp_path / "a.nii")
    assert scan.spacing == pytest.approx((4 * factor, 0.5 * factor, 0.75 * factor))
    assert scan.grid.affine[:3, 3] == pytest.approx(factor * affine()[:3, 3])
