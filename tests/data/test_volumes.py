"""Volumes on disk: how they are shown, and that masks lie on them voxel for voxel, as other libraries read both."""

import gzip
import itertools
import os
import struct
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform

from trueup.data.domains import BrokenImageError
from trueup.data.labelled_volumes import LabelCoding, read_labelled_volume
from trueup.data.slices import window_to_uint8
from trueup.data.volumes import count_slices, read_volume, write_mask

X, Y, Z = 24, 20, 5
CODING = LabelCoding("hearts", {0: 0, 200: 2, 500: 3, 600: 1})


def numbers(shape: tuple[int, ...] = (X, Y, Z), dtype: str = "int16") -> np.ndarray:
    """Every voxel another number, so that no flip or swap goes unseen."""
    return np.random.default_rng(0).permutation(int(np.prod(shape))).reshape(shape).astype(dtype)


def turn(degrees: float, axis: int) -> np.ndarray:
    a, b = [i for i in range(3) if i != axis]
    matrix = np.eye(3)
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    matrix[[a, a, b, b], [a, b, a, b]] = c, -s, s, c
    return matrix


def affine(codes: str = "RAS", zooms: tuple[float, ...] = (0.75, 0.5, 4.0), turned: object = None) -> np.ndarray:
    """Stored axes that run towards these sides of the patient, turned a little on demand."""
    result = np.eye(4)
    for column, code in enumerate(codes):
        row = next(i for i, pair in enumerate(("LR", "PA", "IS")) if code in pair)
        result[:3, column] = 0
        result[row, column] = zooms[column] * (1 if code in "RAS" else -1)
    result[:3, :3] = (np.eye(3) if turned is None else turned) @ result[:3, :3]
    result[:3, 3] = -31.5, 12.25, 7.0
    return result


def save_nifti(path: Path, values: np.ndarray, matrix: np.ndarray | None, **fields: object) -> Path:
    image = nib.Nifti1Image(values, matrix)
    if matrix is not None:
        image.set_qform(matrix, code=1)
        image.set_sform(matrix, code=1)
    for name, value in fields.items():
        image.header[name] = value
    nib.save(image, path)
    return path


def save_itk(path: Path, values: np.ndarray, matrix: np.ndarray, **options: bool) -> Path:
    """Values (x, y, z) and an affine as NIfTI has them, by SimpleITK."""
    image = sitk.GetImageFromArray(np.ascontiguousarray(values.T))
    towards = np.diag([-1.0, -1.0, 1.0]) @ matrix[:3]
    zooms = np.linalg.norm(towards[:, :3], axis=0)
    image.SetSpacing(zooms.tolist())
    image.SetOrigin(towards[:, 3].tolist())
    image.SetDirection((towards[:, :3] / zooms).ravel().tolist())
    sitk.WriteImage(image, str(path), **options)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def geometry(image: sitk.Image) -> np.ndarray:
    return np.array([*image.GetSize(), *image.GetSpacing(), *image.GetOrigin(), *image.GetDirection()])


AXIAL = ["".join(c) for sides in (("LR", "AP", "IS"), ("AP", "LR", "IS")) for c in itertools.product(*sides)]
SLIGHT = turn(12, 0) @ turn(-8, 2) @ turn(5, 1)
SHORT_AXIS = turn(40, 2) @ turn(50, 0) @ turn(-30, 1)
TILTED = turn(34, 0) @ turn(34, 1)  # rows and columns lie much as in axial slices, but the slices do not
SKEW = np.array([[2, -1, 2], [2, 2, -1], [-1, 2, 2]]) / 3  # no axis is near any of the patient's


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


def acdc_like(path: Path) -> Path:
    """ACDC's headers: an sform with voxels of 1 mm, while pixdim and the qform have their true size."""
    header = nib.Nifti1Header()
    header.set_data_shape((X, Y, Z))
    header.set_data_dtype(np.int16)
    header.set_qform(np.diag([-1.5, -1.25, 10.0, 1.0]), code=1)
    header.set_sform(np.diag([-1.0, -1.0, 1.0, 1.0]), code=2)
    header.set_xyzt_units("mm", "sec")
    nib.save(nib.Nifti1Image(numbers(), header.get_best_affine(), header), path)
    return path


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


# Files that cannot be read.


def break_file(path: Path, how: str) -> None:
    blob = path.read_bytes()
    damage = {
        "empty": b"",
        "cut in the header": blob[:60],
        "cut in the middle": blob[: len(blob) // 2],
        "cut at the end": blob[:-40],
        "text": b"this is no volume " * 50,
    }
    path.write_bytes(damage[how])


@pytest.mark.parametrize("how", ["empty", "cut in the header", "cut in the middle", "cut at the end", "text"])
@pytest.mark.parametrize("ending", [".nii", ".nii.gz", ".mha", ".nrrd"])
def test_damaged_files_are_named(tmp_path: Path, ending: str, how: str) -> None:
    path = tmp_path / f"some{ending}"
    if ending.startswith(".nii"):
        save_nifti(path, numbers(), affine())
    else:
        save_itk(path, numbers(), affine(), useCompression=True)
    break_file(path, how)
    with pytest.raises(BrokenImageError, match=rf"^some\{ending}: \S+"):
        read_volume(path)


def test_the_reason_is_whole(tmp_path: Path) -> None:
    path = save_nifti(tmp_path / "a.nii", numbers(), affine())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(BrokenImageError, match=r"^a\.nii: Expected 4800 bytes, got 4760 bytes .*$"):
        read_volume(path)


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path: Path) -> None:
    path = save_nifti(tmp_path / "a.nii.gz", numbers(), affine())
    blob = bytearray(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=0))
    blob[2000] ^= 1
    path.write_bytes(bytes(blob))
    with pytest.raises(BrokenImageError, match="CRC"):
        read_volume(path)


def test_voxels_that_lie_in_another_file(tmp_path: Path) -> None:
    path = save_itk(tmp_path / "Case00.mhd", numbers(), affine())
    raw = tmp_path / "Case00.raw"
    raw.write_bytes(raw.read_bytes()[:-10])
    with pytest.raises(BrokenImageError, match=r"Case00\.mhd: its voxels are damaged or incomplete"):
        read_volume(path)
    raw.unlink()
    with pytest.raises(BrokenImageError, match=r"Case00\.mhd: Case00\.raw, which holds its voxels, is missing"):
        read_volume(path)
    assert count_slices(path) == Z  # its header is whole


def test_a_header_that_was_cut_off_is_told_from_voxels_that_were(tmp_path: Path) -> None:
    path = save_itk(tmp_path / "a.mha", numbers(), affine())
    blob = path.read_bytes()
    path.write_bytes(blob[:60])
    with pytest.raises(BrokenImageError, match=r"^a\.mha: its header is damaged or incomplete$"):
        count_slices(path)
    path.write_bytes(blob[:-1])
    with pytest.raises(BrokenImageError, match=r"^a\.mha: its voxels are damaged or incomplete$"):
        read_volume(path)


@pytest.mark.parametrize("ending", [".nii.gz", ".mha"])
def test_a_file_that_is_not_there(tmp_path: Path, ending: str) -> None:
    for read in (read_volume, count_slices):
        with pytest.raises(BrokenImageError, match=rf"^gone\{ending}: .*(No such file|does not exist)"):
            read(tmp_path / f"gone{ending}")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("ending", [".nii.gz", ".mha"])
def test_values_that_are_not_finite(tmp_path: Path, ending: str, bad: float) -> None:
    values = numbers(dtype="float32")
    values[3, 4, 2] = bad
    save = save_nifti if ending == ".nii.gz" else save_itk
    with pytest.raises(BrokenImageError, match=rf"a\{ending}: 1 of 2400 values are not finite"):
        read_volume(save(tmp_path / f"a{ending}", values, affine()))


def test_colours_and_other_files_are_no_volumes(tmp_path: Path) -> None:
    colour = np.zeros((X, Y, Z), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    with pytest.raises(BrokenImageError, match=r"a\.nii: .* are not grey values"):
        read_volume(save_nifti(tmp_path / "a.nii", colour, affine()))
    with pytest.raises(ValueError, match=r"a\.png does not end like a volume: \.nii\.gz, \.nii, \.mha"):
        read_volume(tmp_path / "a.png")


def test_counting_slices_reads_no_voxels(tmp_path: Path) -> None:
    path = save_nifti(tmp_path / "a.nii", numbers(), affine())
    path.write_bytes(path.read_bytes()[:352])
    assert count_slices(path) == Z


@pytest.mark.parametrize(("library", "ending"), [("nibabel", ".nii.gz"), ("SimpleITK", ".mhd")])
def test_a_library_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, ending: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library} .*: pip install 'trueup\[seg\]'"):
        count_slices(tmp_path / f"a{ending}")


# Writing.

GRIDS = {
    "LPS": affine("LPS"),
    "RAS": affine("RAS"),
    "ALI": affine("ALI"),
    "oblique": affine("RPI", turned=SLIGHT),
    "short axis": affine("LPS", turned=SHORT_AXIS),
    "coarse": affine("LSA", (0.5, 4.0, 0.6), turned=SLIGHT),
}


@pytest.mark.parametrize("matrix", GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("source", [".nii", ".nii.gz", ".mhd", ".mha", ".nrrd"])
@pytest.mark.parametrize("target", [".nii", ".nii.gz", ".mhd", ".mha", ".nrrd"])
def test_a_mask_lies_on_its_image_whatever_the_formats(
    tmp_path: Path, source: str, target: str, matrix: np.ndarray
) -> None:
    save = save_nifti if source.startswith(".nii") else save_itk
    path, result = save(tmp_path / f"image{source}", numbers(), matrix), tmp_path / f"mask{target}"
    scan = read_volume(path)
    write_mask(result, (scan.values % 5).astype(np.uint8), scan)
    # SimpleITK reads all formats, in its own way; neither knows how the values were shown.
    image, mask = sitk.ReadImage(str(path)), sitk.ReadImage(str(result))
    assert np.array_equal(sitk.GetArrayFromImage(mask), sitk.GetArrayFromImage(image) % 5)
    assert mask.GetPixelID() == sitk.sitkUInt8
    assert geometry(mask) == pytest.approx(geometry(image), abs=2e-6)
    if source.startswith(".nii") and target.startswith(".nii"):
        one, other = nib.load(path), nib.load(result)
        assert np.array_equal(np.asarray(other.dataobj), np.asarray(one.dataobj) % 5)
        assert np.array_equal(other.affine, one.affine)
    assert np.array_equal(read_volume(result).values, scan.values % 5)  # and is shown like its image
    assert names(tmp_path) == sorted([path.name, result.name] + ["image.raw"] * (source == ".mhd"))


def test_a_nifti_mask_keeps_the_forms_and_drops_what_is_about_grey_values(tmp_path: Path) -> None:
    image = nib.Nifti1Image(numbers((X, Y, Z, 2)), affine("RPI", turned=SLIGHT))
    image.set_qform(affine("RPI", turned=SLIGHT), code=1)
    image.set_sform(affine("RPI", turned=SLIGHT), code=4)
    image.header.set_xyzt_units("mm", "msec")
    image.header.set_slope_inter(0.25, 10)
    image.header["cal_max"], image.header["cal_min"] = 700, 100
    image.header.set_intent("t test", (10,))
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"a name" * 100))
    nib.save(image, tmp_path / "a.nii")
    scan = read_volume(tmp_path / "a.nii")
    mask = np.asarray(scan.values > 1000, dtype=np.uint8)
    write_mask(tmp_path / "m.nii", mask, scan.grid)
    was, now = nib.load(tmp_path / "a.nii").header, nib.load(tmp_path / "m.nii").header
    assert now.get_data_shape() == (X, Y, Z)
    assert now.get_data_dtype() == np.uint8
    same = ("qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z")
    for name in (*same, "srow_x", "srow_y", "srow_z", "xyzt_units"):
        assert np.array_equal(now[name], was[name]), name
    assert np.array_equal(now["pixdim"][:4], was["pixdim"][:4])
    assert (was["sform_code"], was["qform_code"], int(now["cal_max"]), int(now["intent_code"])) == (4, 1, 0, 0)
    blob = (tmp_path / "m.nii").read_bytes()
    assert struct.unpack("<fff", blob[108:120]) == (352, 1, 0)  # where the voxels start, slope, intercept
    assert len(blob) == 352 + X * Y * Z
    assert len(was.extensions) == 1  # the scan's own header is as it was
    assert len(scan.grid.header.extensions) == 1


def test_the_forms_of_acdc_are_kept_though_they_disagree(tmp_path: Path) -> None:
    scan = read_volume(acdc_like(tmp_path / "a.nii.gz"))
    write_mask(tmp_path / "m.nii.gz", (scan.values > 5).astype(np.uint8), scan)
    mask = nib.load(tmp_path / "m.nii.gz")
    assert mask.get_sform(coded=True)[1] == 2
    assert mask.get_sform().diagonal().tolist() == [-1, -1, 1, 1]
    assert mask.get_qform().diagonal() == pytest.approx([-1.5, -1.25, 10, 1])
    assert mask.header.get_zooms() == (1.5, 1.25, 10)


def test_a_nifti_mask_of_a_metaimage_has_both_forms(tmp_path: Path) -> None:
    matrix = affine("RPI", turned=SLIGHT)
    scan = read_volume(save_itk(tmp_path / "a.mhd", numbers(), matrix))
    write_mask(tmp_path / "m.nii.gz", (scan.values > 5).astype(np.uint8), scan)
    mask = nib.load(tmp_path / "m.nii.gz")
    for form, code in (mask.get_sform(coded=True), mask.get_qform(coded=True)):
        assert form == pytest.approx(matrix, abs=1e-5)
        assert code == 1
    assert mask.header.get_xyzt_units() == ("mm", "unknown")


def test_codes_that_are_zero_stay_zero(tmp_path: Path) -> None:
    scan = read_volume(save_nifti(tmp_path / "a.nii", numbers(), None, pixdim=[1, 0.75, 0.5, 4, 0, 0, 0, 0]))
    for name in ("m.nii", "m.mha"):
        write_mask(tmp_path / name, (scan.values > 5).astype(np.uint8), scan)
        mask = sitk.ReadImage(str(tmp_path / name))
        assert np.array_equal(geometry(mask), geometry(sitk.ReadImage(str(tmp_path / "a.nii"))))
    header = nib.load(tmp_path / "m.nii").header
    assert (header["sform_code"], header["qform_code"]) == (0, 0)


@pytest.mark.parametrize("ending", [".nii.gz", ".mha", ".nrrd"])
def test_the_same_mask_gives_the_same_bytes(tmp_path: Path, ending: str) -> None:
    scan = read_volume(save_nifti(tmp_path / "a.nii.gz", numbers(), affine()))
    mask = (scan.values % 3).astype(np.uint8)
    write_mask(tmp_path / f"one{ending}", mask, scan)
    write_mask(tmp_path / f"other{ending}", np.asfortranarray(mask), scan)
    blob = (tmp_path / f"one{ending}").read_bytes()
    assert blob == (tmp_path / f"other{ending}").read_bytes()
    if ending == ".nii.gz":
        assert blob[3:8] == bytes(5)  # no name and no time in gzip's header
    assert len(blob) < mask.size  # compressed


@pytest.mark.parametrize("ending", [".nii.gz", ".mhd"])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, step: str
) -> None:
    scan = read_volume(save_nifti(tmp_path / "a.nii.gz", numbers(), affine()))
    mask, path = np.zeros(scan.values.shape, dtype=np.uint8), tmp_path / "out" / f"m{ending}"
    path.parent.mkdir()

    def full(*args: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(OSError, match="no space left"):
            write_mask(path, mask, scan)
        assert names(path.parent) == []
    write_mask(path, mask, scan)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(OSError, match="no space left"):
            write_mask(path, mask + 1, scan)
    assert names(path.parent) == [path.name]
    assert path.read_bytes() == before


def test_a_killed_write_leaves_nothing_that_looks_like_a_result(tmp_path: Path) -> None:
    save_nifti(tmp_path / "a.nii.gz", numbers(), affine())
    code = """
import os, sys, signal, numpy as np
from pathlib import Path
from trueup.data.volumes import read_volume, write_mask
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
scan = read_volume(Path("a.nii.gz"))
write_mask(Path("out/m.nii.gz"), np.zeros(scan.values.shape, np.uint8), scan)
"""
    (tmp_path / "out").mkdir()
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode < 0
    (left,) = names(tmp_path / "out")
    assert left.startswith(".")
    assert left.endswith(".partial")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    scan = read_volume(save_nifti(tmp_path / "a.nii.gz", numbers(), affine()))
    mask = np.zeros(scan.values.shape, dtype=np.uint8)
    with pytest.raises(ValueError, match="uint8, not int64"):
        write_mask(tmp_path / "m.nii.gz", mask.astype(np.int64), scan)
    with pytest.raises(ValueError, match="the mask has 24×20×5 voxels, the volume has 5×20×24"):
        write_mask(tmp_path / "m.nii.gz", mask.T, scan)
    with pytest.raises(ValueError, match=r"m\.png does not end like a volume"):
        write_mask(tmp_path / "m.png", mask, scan)
    assert names(tmp_path) == ["a.nii.gz"]


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
