"""The prostate in T2-weighted magnetic resonance: Task05 of the Medical Segmentation Decathlon, and PROMISE12."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from trueup.data.datasets.file_matching import Found, NotThereError, Part, paired, visible
from trueup.data.labelled import Coding, read_labelled

DOMAINS = ("msd05", "promise12")
CLASSES = ("background", "prostate")
STRUCTURES = {"prostate": (1,)}
FIELD = 160.0  # mm; 256 pixels are then 0.625 mm wide
T2 = 0  # the channel of MSD's images; the other is a map of diffusion

CODINGS = {
    # Peripheral and transition zone: PROMISE12 knows the whole gland only.
    "msd05": Coding("MSD Task05", {0: 0, 1: 1, 2: 1}),
    "promise12": Coding("PROMISE12", {0: 0, 1: 1}),
}
LAYOUTS = {
    "msd05": "Task05_Prostate/imagesTr/prostate_00.nii.gz and Task05_Prostate/labelsTr/prostate_00.nii.gz",
    "promise12": "TrainingData_Part1/Case00.mhd and, in the same folder, Case00_segmentation.mhd",
}
DECATHLON = re.compile(r"(prostate_\d+)\.nii(\.gz)?", re.ASCII)
PROMISE = re.compile(r"(Case\d+)(_segmentation)?\.(mhd|mha|nrrd|nii|nii\.gz)", re.ASCII)
# What is of no use to a domain: the other one, images without masks, and what is read along with its header.
BESIDE = re.compile(rf"dataset\.json|{DECATHLON.pattern}|{PROMISE.pattern}|Case\d+(_segmentation)?\.z?raw", re.ASCII)


def scan(root: Path, domain: str) -> Found:
    """The cases of a domain below a folder, divided 80 to 20; only headers are read."""
    if domain not in DOMAINS:
        raise ValueError(f"there is no domain {domain!r} of the prostate; there are: {', '.join(DOMAINS)}")
    files = list(visible(root))
    parts = _msd05(files) if domain == "msd05" else _promise12(files)
    read = partial(read_labelled, coding=CODINGS[domain], field=FIELD, channel=T2)
    found = paired(root, files, parts, read, BESIDE)
    if not found.cases:
        raise NotThereError(f"{root} holds no image of {domain!r} with a mask; looked for {LAYOUTS[domain]}")
    return found


def _msd05(files: Iterable[Path]) -> Iterator[Part]:
    """The images to train with; those in imagesTs have no masks."""
    kinds = {"imagesTr": "image", "labelsTr": "label"}
    for path in files:
        if (match := DECATHLON.fullmatch(path.name)) and path.parent.name in kinds:
            yield match[1], kinds[path.parent.name], path


def _promise12(files: Iterable[Path]) -> Iterator[Part]:
    """Images and masks that lie side by side; the challenge's test has cases of the same names, without masks."""
    folders: dict[Path, list[Part]] = {}
    for path in files:
        if match := PROMISE.fullmatch(path.name):
            folders.setdefault(path.parent, []).append((match[1], "label" if match[2] else "image", path))
    for parts in folders.values():
        if any(kind == "label" for _, kind, _ in parts):
            yield from parts
