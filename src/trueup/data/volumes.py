"""Medical volumes on disk (NIfTI, MetaImage, NRRD) in viewing orientation, and masks on their voxels.

Files store x first, in any orientation. Here slices come first, and axial slices are oriented as radiologists view
them. A mask is written back in the stored orientation.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trueup.atomic import write_atomic
from trueup.data.domains import BrokenImageError
from trueup.data.slices import Mask

Values = NDArray[Any]
Reals = NDArray[np.float64]

NIFTI = (".nii.gz", ".nii")
SUFFIXES = (*NIFTI, ".mha", ".mhd", ".nrrd")
COARSE = 1.5  # an axis this many times coarser than both others is the slice axis
ALONG = 0.8  # cosine of the largest angle between an axis and a patient axis
LPS = np.diag([-1.0, -1.0, 1.0])  # ITK points to the left and back, NIfTI to the right and front
MILLIMETRES = {1: 1000.0, 3: 0.001}  # NIfTI codes of metres and micrometres; others are millimetres


@dataclass(frozen=True, eq=False)
class Grid:
    """The voxel grid of a file, for showing its values and storing a mask."""

    shape: tuple[int, ...]  # the stored shape, x first, without channels; two or three axes
    affine: Reals  # (4, 4): from stored indices to millimetres towards the patient's right, front and head
    axes: tuple[int, int, int]  # the stored axes of slices, rows and columns
    flips: tuple[bool, bool]  # True for rows or columns that run against the stored order
    header: Any = None  # the header of a NIfTI file

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Return millimetres between slices, rows and columns."""
        z, y, x = np.linalg.norm(self.affine[:3, :3], axis=0)[list(self.axes)].tolist()
        return z, y, x

    @property
    def shape_3d(self) -> tuple[int, ...]:
        """Return the stored shape with three axes."""
        return (*self.shape, 1)[:3]

    @property
    def shown_shape(self) -> tuple[int, int, int]:
        """Return the numbers of slices, rows and columns."""
        return self.shape_3d[self.axes[0]], self.shape_3d[self.axes[1]], self.shape_3d[self.axes[2]]

    @property
    def orientation(self) -> tuple[tuple[int, bool], ...]:
        """Return for each stored axis the patient axis it follows, and True if forwards."""
        return tuple((int(np.abs(d).argmax()), bool(d[np.abs(d).argmax()] > 0)) for d in self.affine[:3, :3].T)

    @property
    def has_orientation(self) -> bool:
        """Return True if the file states its orientation; without a header it has no origin and default directions."""
        turn = self.affine[:3, :3] / np.linalg.norm(self.affine[:3, :3], axis=0)
        return bool(self.affine[:3, 3].any()) or not any(np.array_equal(turn, start) for start in (LPS, np.eye(3)))

    def show(self, stored: Values) -> Values:
        """Return stored values, x first, as (Z, H, W)."""
        return np.ascontiguousarray(self._flipped(stored.reshape(self.shape_3d).transpose(self.axes)))

    def store(self, shown: Values) -> Values:
        """Undo `show`."""
        return np.asarray(self._flipped(shown).transpose(np.argsort(self.axes)).reshape(self.shape))

    def _flipped(self, shown: Values) -> Values:
        return shown[:, :: -1 if self.flips[0] else 1, :: -1 if self.flips[1] else 1]


@dataclass(frozen=True, eq=False)
class Scan:
    """A volume in viewing orientation."""

    values: Values  # (Z, H, W), with the file's scaling applied
    spacing: tuple[float, float, float]  # millimetres between slices, rows and columns
    grid: Grid


def read_volume(path: Path, channel: int = 0) -> Scan:
    """Read a volume; `channel` selects one of several images over the same voxels."""
    file = _open(path)
    with _blaming(path):
        if not 0 <= channel < file.channels:
            raise ValueError(f"there is no channel {channel}; there are {file.channels}, counted from 0")
        values = file.load(channel)
        if values.dtype.kind not in "buif":
            raise ValueError(f"voxels of type {values.dtype} are not grey values")
        if strange := values.size - int(np.count_nonzero(np.isfinite(values))):
            raise ValueError(f"{strange} of {values.size} values are not finite")
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    return Scan(file.grid.show(values), file.grid.spacing, file.grid)


def count_channels(path: Path) -> int:
    """Return the number of images over the same voxels; reads the header only."""
    return _open(path).channels


def count_slices(path: Path) -> int:
    """Return the number of slices; reads the header only."""
    return _open(path).grid.shown_shape[0]


def write_mask(path: Path, mask: Mask, where: Scan | Grid) -> None:
    """Write a mask (Z, H, W) on a volume's voxels, atomically; the path's suffix gives the format."""
    grid = where.grid if isinstance(where, Scan) else where
    ending = volume_suffix(path)
    if mask.dtype != np.uint8:
        raise ValueError(f"a mask is written as uint8, not {mask.dtype}: use mask.astype(np.uint8)")
    if mask.shape != grid.shown_shape:
        have, need = format_shape(mask.shape), format_shape(grid.shown_shape)
        raise ValueError(f"the mask has {have} voxels, the volume has {need}")
    stored = grid.store(mask)
    write_atomic(path, _nifti_bytes(stored, grid, ending) if ending in NIFTI else _itk_bytes(stored, grid, ending))


def is_volume(path: Path) -> bool:
    """Return True if a file name is that of a volume."""
    return path.name.lower().endswith(SUFFIXES)


def volume_suffix(path: Path) -> str:
    """Return the suffix of a volume's name; raise a ValueError for other files."""
    for ending in SUFFIXES:
        if path.name.lower().endswith(ending):
            return ending
    raise ValueError(f"{path.name} does not end like a volume: {', '.join(SUFFIXES)}")


class _File(NamedTuple):
    """A parsed header, and a function that loads a channel as stored."""

    grid: Grid
    channels: int
    load: Callable[[int], Values]


def _open(path: Path) -> _File:
    nifti = volume_suffix(path) in NIFTI
    library = _library("nibabel" if nifti else "SimpleITK")
    with _blaming(path):
        return _open_nifti(path, library) if nifti else _open_itk(path, library)


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Turn any library error into a BrokenImageError with the file's name, without source locations."""
    try:
        yield
    except Exception as error:
        text = str(error).rpartition("ERROR: ")[2].strip() or type(error).__name__
        text = text.splitlines()[-1] if isinstance(error, RuntimeError) else text  # ITK gives the reason last
        text = _lack(path) if text.startswith("Reason:") else text  # an unrelated errno
        raise BrokenImageError(f"{path.name}: {' '.join(text.split())}") from error


def _open_nifti(path: Path, nibabel: Any) -> _File:
    image = nibabel.load(path, mmap=False)
    header, shape = image.header, tuple(map(int, image.shape))
    unit = MILLIMETRES.get(int(header["xyzt_units"]) & 7, 1.0)
    # Without a coded form the orientation is unknown.
    known = bool(header["sform_code"] or header["qform_code"])
    affine = np.array(image.affine, dtype=np.float64) if known else np.diag([0.0, 0.0, 0.0, 1.0])
    affine[:3] *= unit
    # ACDC's sform has voxels of one millimetre; only pixdim has the true size.
    spacing = np.abs(np.array(header["pixdim"][1:4], dtype=np.float64)) * unit

    def load(channel: int) -> Values:
        at = (..., *(channel if n > 1 else 0 for n in shape[3:]))
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as stream:
            values: Values = np.asanyarray(type(image).from_stream(stream).dataobj[at])
            while stream.read(2**20):  # the checksum comes last
                pass
        return values

    return _File(_grid(shape[:3], affine, spacing, header), _channels(shape), load)


def _open_itk(path: Path, itk: Any) -> _File:
    reader = itk.ImageFileReader()
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    shape, parts = tuple(map(int, reader.GetSize())), int(reader.GetNumberOfComponents())
    n = min(len(shape), 3)
    affine, spacing = np.eye(4), np.ones(3)
    affine[:n, :n] = np.reshape(reader.GetDirection(), (len(shape), len(shape)))[:n, :n]
    affine[:n, 3], spacing[:n] = reader.GetOrigin()[:n], reader.GetSpacing()[:n]
    affine[:3] = LPS @ affine[:3]

    def load(channel: int) -> Values:
        values = np.asarray(itk.GetArrayFromImage(reader.Execute()))
        values = values[..., channel] if parts > 1 else values
        return (values[channel if shape[3] > 1 else 0] if len(shape) == 4 else values).transpose()

    return _File(_grid(shape[:3], affine, spacing), _channels(shape, parts), load)


def _channels(shape: tuple[int, ...], parts: int = 1) -> int:
    several = [n for n in (*shape[3:], parts) if n != 1]
    if len(shape) < 2 or len(several) > 1 or min(shape) < 1:
        raise ValueError(f"the shape {format_shape(shape)} is neither a volume nor several over the same voxels")
    return math.prod(several)


def _grid(shape: tuple[int, ...], affine: Reals, spacing: Reals, header: Any = None) -> Grid:
    """Return the grid of voxels of this size; the affine gives the directions, if it is valid."""
    affine = affine if np.isfinite(affine).all() else np.zeros((4, 4))
    size = np.linalg.norm(affine[:3, :3], axis=0)
    spacing = np.where(np.isfinite(spacing) & (spacing > 0), spacing, size)
    spacing[len(shape) :] = 1.0
    if spacing.min() <= 0:
        raise ValueError(f"voxels of {format_shape(tuple(spacing))} mm have no size")
    directions = affine[:3, :3] / np.where(size > 0, size, 1)
    directions = directions if abs(np.linalg.det(directions)) > 1e-3 else LPS
    placed = np.eye(4)
    placed[:3] = np.column_stack([directions * spacing, affine[:3, 3]])
    return Grid(shape, placed, *_view(directions, spacing, len(shape)), header)


def _view(directions: Reals, spacing: Reals, stored: int) -> tuple[tuple[int, int, int], tuple[bool, bool]]:
    """Return the axes of slices, rows and columns, and which of the last two are flipped."""
    z = int(spacing.argmax())
    if stored == 2 or any(spacing[z] <= COARSE * spacing[other] for other in {0, 1, 2} - {z}):
        z = 2
    x, y = sorted({0, 1, 2} - {z})
    for rows, columns in ((y, x), (x, y)):
        back, left = -directions[1, rows], -directions[0, columns]
        up = np.cross(directions[:, columns], directions[:, rows])[2]
        if np.abs([back, left, up]).min() > ALONG:  # an axial slice: from front to back, from right to left
            return (z, rows, columns), (bool(back < 0), bool(left < 0))
    return (z, y, x), (False, False)


def _lack(path: Path) -> str:
    """Return why a MetaImage cannot be read; ITK does not tell."""
    with path.open("rb") as file:
        named = re.search(rb"^ElementDataFile\s*=\s*(.*?)\s*$", file.read(2**14), re.MULTILINE)
    if named is None:
        return "its header is damaged or incomplete"
    data = os.fsdecode(named[1])
    there = data.upper() in ("LOCAL", "LIST") or (path.parent / data).exists()
    return "its voxels are damaged or incomplete" if there else f"{data}, which holds its voxels, is missing"


def _nifti_bytes(stored: Mask, grid: Grid, ending: str) -> bytes:
    nibabel = _library("nibabel")
    if grid.header is None:
        image = nibabel.Nifti1Image(stored, grid.affine)
        image.set_sform(grid.affine, code="scanner")
        image.set_qform(grid.affine, code="scanner")
        image.header.set_xyzt_units("mm")
    else:
        header = grid.header.copy()
        header.extensions.clear()
        header["cal_min"] = header["cal_max"] = 0  # a grey-value window would hide labels
        header.set_intent("none")
        kind = nibabel.Nifti2Image if isinstance(header, nibabel.Nifti2Header) else nibabel.Nifti1Image
        image = kind(stored, header.get_best_affine(), header)
    image.set_data_dtype(np.uint8)
    blob: bytes = image.to_bytes()
    return gzip.compress(blob, 6, mtime=0) if ending.endswith(".gz") else blob


def _itk_bytes(stored: Mask, grid: Grid, ending: str) -> bytes:
    itk = _library("SimpleITK")
    n = len(grid.shape)
    matrix = LPS @ grid.affine[:3]
    spacing = np.linalg.norm(matrix[:, :3], axis=0)
    image = itk.GetImageFromArray(np.ascontiguousarray(stored.transpose()))
    image.SetSpacing(spacing[:n].tolist())
    image.SetOrigin(matrix[:n, 3].tolist())
    image.SetDirection((matrix[:, :3] / spacing)[:n, :n].ravel().tolist())
    with tempfile.TemporaryDirectory() as folder:
        # A .mhd may hold its voxels like a .mha: a single file can be written atomically.
        file = Path(folder) / ("mask.nrrd" if ending == ".nrrd" else "mask.mha")
        itk.WriteImage(image, str(file), useCompression=True)
        return file.read_bytes()


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} reads and writes medical volumes: pip install 'trueup[seg]'") from error


def format_shape(numbers: tuple[Any, ...]) -> str:
    """Format a shape as 24×20×5."""
    return "×".join(f"{number:g}" for number in numbers)
