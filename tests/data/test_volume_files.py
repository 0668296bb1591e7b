"""Broken volume files, and writing masks."""

import gzip
import os
import struct
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from volume_files import (
    SHORT_AXIS,
    SLIGHT,
    X,
    Y,
    Z,
    acdc_like,
    affine,
    geometry,
    names,
    numbers,
    save_itk,
    save_nifti,
)

from trueup.data.domains import BrokenImageError
from trueup.data.volumes import count_slices, read_volume, write_mask

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
