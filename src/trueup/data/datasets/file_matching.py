"""Images and masks matched on disk: the found cases, and the steps that all finders share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from trueup.data.domains import BrokenImageError
from trueup.data.scanning import FolderScan
from trueup.data.slices import LabelledCase, Mask, Volume, field_of_view_box, window_to_uint8
from trueup.data.volumes import Grid, Scan, Values, count_slices, format_shape, is_volume, read_volume

CaseFile = tuple[str, str, Path]  # the name of a case, "image" or "label", and the file


class DomainNotFoundError(ValueError):
    """A folder without any case of a domain."""


@dataclass
class FoundCases:
    """The cases of each part of a domain, read on demand, and files that do not fit."""

    parts: dict[str, list[LabelledCase]] = field(default_factory=dict)  # "train", "test" or both; others of their own
    missing: list[str] = field(default_factory=list)  # images without a mask, masks without an image
    broken: list[str] = field(default_factory=list)  # cases whose header cannot be read, each with the reason
    others: list[str] = field(default_factory=list)  # files that are neither

    @property
    def cases(self) -> list[LabelledCase]:
        """Return the cases of all parts."""
        return [case for cases in self.parts.values() for case in cases]

    def part(self, name: str) -> list[LabelledCase]:
        """Return the cases of a part; "all" means "train" and "test" only."""
        usual = [part for part in ("train", "test") if part in self.parts]
        if name == "all" and usual:
            return [case for part in usual for case in self.parts[part]]
        if name not in self.parts:
            there = ", ".join([*self.parts, *(["all"] if usual else [])])
            raise ValueError(f"there is no part {name!r}; there is: {there}")
        return list(self.parts[name])

    def make_case(self, name: str, read: Callable[..., Volume], *files: Path, patient: str = "") -> LabelledCase:
        """Return a case of an image and its masks; count the slices of a volume now.

        If that fails, the case has one slice and raises the reason when it is read.
        """
        try:
            slices = count_slices(files[0]) if is_volume(files[0]) else 1
            return LabelledCase(name, slices, partial(read, *files), patient, files)
        except BrokenImageError as error:
            self.broken.append(str(error))
            return LabelledCase(name, 1, partial(_raise, str(error)), patient, files)


@dataclass(frozen=True)
class LabelCoding:
    """The meaning of the numbers in a dataset's masks."""

    of: str  # the dataset's name
    classes: Mapping[int, int]  # the class of each number; other numbers are refused

    def decode(self, values: Values, name: str) -> Mask:
        """Convert numbers to classes; errors name the file `name`."""
        mask, known = np.zeros(values.shape, dtype=np.uint8), np.zeros(values.shape, dtype=bool)
        for number, label in self.classes.items():
            # Scaled masks hold values such as 0.99999.
            here = np.abs(values - number) < 1e-3 if values.dtype.kind == "f" else values == number
            mask[here] = label
            known |= here
        if not known.all():
            strange, right = np.unique(values[~known]), ", ".join(map(str, self.classes))
            some = ", ".join(f"{value:g}" for value in strange[:8]) + " ..." * (len(strange) > 8)
            raise BrokenImageError(f"{name}: values {some} are not labels of {self.of}; expected {right}")
        return mask


def align_mask(drawn: Scan, grid: Grid, name: str) -> Values:
    """Return a mask (Z, H, W) on the grid of its image, voxel by voxel as stored: many masks have lost their header.

    A mask whose header states another orientation than the image is refused: either may be wrong.
    """
    if drawn.grid.shape_3d != grid.shape_3d:
        raise BrokenImageError(
            f"{name} has {format_shape(drawn.grid.shape_3d)} voxels, its image {format_shape(grid.shape_3d)}"
        )
    if drawn.grid.has_orientation and drawn.grid.orientation != grid.orientation:
        raise BrokenImageError(f"{name} has another orientation than its image: save it on the image's grid")
    return grid.show(drawn.grid.store(drawn.values))


def read_labelled_volume(image: Path, label: Path, coding: LabelCoding, field: float, channel: int = 0) -> Volume:
    """Read a volume with its mask; networks see the middle square of `field` millimetres."""
    scan = read_volume(image, channel)
    drawn = read_volume(label)
    mask = coding.decode(align_mask(drawn, scan.grid, label.name), label.name)
    _, height, width = scan.values.shape
    box = field_of_view_box(height, width, scan.spacing, field)
    return Volume(window_to_uint8(scan.values)[..., None], mask, scan.spacing, box)


def walk_files(root: Path) -> Iterator[Path]:
    """Yield all files below a folder, sorted; `trueup.data.scanning` says what is skipped."""
    return FolderScan(root).walk()


def check_domain(domain: str, domains: Iterable[str], dataset: str) -> None:
    """Refuse an unknown domain."""
    if domain not in domains:
        raise ValueError(f"{dataset} has no domain {domain!r}; there are: {', '.join(domains)}")


def pair_cases(
    root: Path, files: Iterable[Path], parts: Iterable[CaseFile], beside: re.Pattern[str], expected: str,
    coding: LabelCoding, field: float, *, channel: int = 0, patient: Callable[[str], str] = str,
) -> FoundCases:  # fmt: skip
    """Pair volumes with masks and split the cases 80 to 20 by patient; only headers are read now.

    `beside` matches names of files that belong there but are not used, `expected` describes the domain for an error
    if no case is found, `patient` gives the patient of a case.
    """
    read = partial(read_labelled_volume, coding=coding, field=field, channel=channel)
    pairs: dict[str, dict[str, Path]] = {}
    for name, kind, path in parts:
        if (other := pairs.setdefault(name, {}).setdefault(kind, path)) != path:
            raise ValueError(f"the {kind} of {name} exists twice: {other} and {path}; keep one of them")
    used = {path for pair in pairs.values() for path in pair.values()}
    rest = (path for path in files if path not in used and not beside.fullmatch(path.name))
    found, cases = FoundCases(others=[path.relative_to(root).as_posix() for path in rest]), []
    for name, pair in sorted(pairs.items(), key=lambda item: (len(item[0]), item[0])):  # 9 before 10
        if len(pair) == 2:
            cases.append(found.make_case(name, read, pair["image"], pair["label"], patient=patient(name)))
        for kind, path in pair.items() if len(pair) == 1 else ():
            lacks = f"has no {'mask' if kind == 'image' else 'image'}" if path.exists() else "does not exist"
            found.missing.append(f"{path.relative_to(root).as_posix()} {lacks}")
    for part, patients in zip(("train", "test"), split_80_20(case.patient for case in cases), strict=True):
        if chosen := [case for case in cases if case.patient in patients]:
            found.parts[part] = chosen
    if not cases:
        raise DomainNotFoundError(f"{root} holds no image with a mask of {expected}")
    return found


def split_80_20(names: Iterable[str], seed: int = 0) -> tuple[list[str], list[str]]:
    """Split names into four fifths for training and one fifth for testing, deterministically."""
    ordered = sorted(set(names))
    order = np.random.default_rng(seed).permutation(len(ordered))
    count = max(1, round(len(ordered) / 5)) if len(ordered) > 1 else 0
    test = {ordered[i] for i in order[:count]}
    return [name for name in ordered if name not in test], sorted(test)


def _raise(reason: str) -> Volume:
    raise BrokenImageError(reason)
