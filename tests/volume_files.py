"""Small NIfTI, MetaImage and NRRD files in many orientations."""

import itertools
from pathlib import Path

import nibabel as nib
import numpy as np
import SimpleITK as sitk  # noqa: N813

from trueup.data.datasets.file_matching import LabelCoding

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
