"""Prostate T2 MRI: Task05 of the Medical Segmentation Decathlon (MSD), and PROMISE12."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from trueup.data.datasets.file_matching import CaseFile, FoundCases, LabelCoding, check_domain, pair_cases, walk_files

DOMAINS = ("msd05", "promise12")
CLASSES = ("background", "prostate")
STRUCTURES = {"prostate": (1,)}
FIELD = 160.0  # mm; 256 pixels are then 0.625 mm wide
T2 = 0  # the channel in MSD's images; the other is a diffusion map

CODINGS = {
    # Peripheral and transition zone are merged: PROMISE12 labels the whole gland only.
    "msd05": LabelCoding("MSD Task05", {0: 0, 1: 1, 2: 1}),
    "promise12": LabelCoding("PROMISE12", {0: 0, 1: 1}),
}
LAYOUTS = {
    "msd05": "Task05_Prostate/imagesTr/prostate_00.nii.gz and Task05_Prostate/labelsTr/prostate_00.nii.gz",
    "promise12": "TrainingData_Part1/Case00.mhd and, in the same folder, Case00_segmentation.mhd",
}
DECATHLON = re.compile(r"(prostate_\d+)\.nii(\.gz)?", re.ASCII)
PROMISE = re.compile(r"(Case\d+)(_segmentation)?\.(mhd|mha|nrrd|nii|nii\.gz)", re.ASCII)
# Files that a domain does not use: the other domain, images without masks, and voxel data of a separate header.
BESIDE = re.compile(rf"dataset\.json|{DECATHLON.pattern}|{PROMISE.pattern}|Case\d+(_segmentation)?\.z?raw", re.ASCII)


def find_prostate_cases(root: Path, domain: str) -> FoundCases:
    """Find the cases of a domain below a folder, split 80 to 20; only headers are read."""
    check_domain(domain, DOMAINS, "prostate")
    files = list(walk_files(root))
    parts = _msd05(files) if domain == "msd05" else _promise12(files)
    expected = f"{domain!r}; looked for {LAYOUTS[domain]}"
    return pair_cases(root, files, parts, BESIDE, expected, CODINGS[domain], FIELD, channel=T2)


def _msd05(files: Iterable[Path]) -> Iterator[CaseFile]:
    """Yield the training images and masks; those in imagesTs have no masks."""
    kinds = {"imagesTr": "image", "labelsTr": "label"}
    for path in files:
        if (match := DECATHLON.fullmatch(path.name)) and path.parent.name in kinds:
            yield match[1], kinds[path.parent.name], path


def _promise12(files: Iterable[Path]) -> Iterator[CaseFile]:
    """Yield images and masks of the same folder; the challenge's test cases share names but have no masks."""
    folders: dict[Path, list[CaseFile]] = {}
    for path in files:
        if match := PROMISE.fullmatch(path.name):
            folders.setdefault(path.parent, []).append((match[1], "label" if match[2] else "image", path))
    for parts in folders.values():
        if any(kind == "label" for _, kind, _ in parts):
            yield from parts
