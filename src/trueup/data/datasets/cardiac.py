"""The heart in two kinds of magnetic resonance: ACDC's cine images, and late gadolinium enhancement of MS-CMRSeg 2019.

Both are short-axis stacks; the classes are numbered as in ACDC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from trueup.data.datasets.file_matching import Found, NotThereError, Part, paired, visible
from trueup.data.labelled import Coding, read_labelled

DOMAINS = ("acdc", "lge")
CLASSES = ("background", "right ventricle", "myocardium", "left ventricle")
STRUCTURES = {"RV": (1,), "MYO": (2,), "LV": (3,)}
FIELD = 350.0  # mm; 256 pixels are then 1.37 mm wide

CODINGS = {
    "acdc": Coding("ACDC", {0: 0, 1: 1, 2: 2, 3: 3}),
    "lge": Coding("MS-CMRSeg", {0: 0, 600: 1, 200: 2, 500: 3}),
}
LAYOUTS = {
    "acdc": "training/patient001/Info.cfg, patient001_frame01.nii.gz and patient001_frame01_gt.nii.gz",
    "lge": "c0t2lge/patient1_LGE.nii.gz and lgegt/patient1_LGE_manual.nii.gz, whatever the folders are called",
}
FRAME = re.compile(r"(patient\d+)_frame(\d+)(_gt)?\.nii(\.gz)?", re.ASCII)
STACK = re.compile(r"(patient\d+_LGE)(_manual)?\.nii(\.gz)?", re.ASCII)
# What is of no use to a domain: whole beats, other images of the same hearts, and the other domain.
_BESIDE = r"Info\.cfg|patient\d+_4d\.nii(\.gz)?|patient\d+_(C0|T2)(_manual)?\.nii(\.gz)?"
BESIDE = {
    domain: re.compile(f"{_BESIDE}|{other.pattern}", re.ASCII) for domain, other in (("acdc", STACK), ("lge", FRAME))
}


def scan(root: Path, domain: str) -> Found:
    """The cases of a domain below a folder, divided 80 to 20 by patient; only headers are read."""
    if domain not in DOMAINS:
        raise ValueError(f"there is no domain {domain!r} of the heart; there are: {', '.join(DOMAINS)}")
    # ACDC's `testing` is the test of its challenge, and no part of what is compared elsewhere.
    files = [path for path in visible(root) if domain != "acdc" or "testing" not in path.relative_to(root).parts]
    parts = _acdc(files) if domain == "acdc" else _lge(files)
    read = partial(read_labelled, coding=CODINGS[domain], field=FIELD)
    found = paired(root, files, parts, read, BESIDE[domain], patient=lambda name: name.partition("_")[0])
    if not found.cases:
        raise NotThereError(f"{root} holds no image of {domain!r} with a mask; looked for {LAYOUTS[domain]}")
    return found


def _acdc(files: Iterable[Path]) -> Iterator[Part]:
    """The ends of diastole and systole of each patient; without an Info.cfg, all frames that were cut out."""
    patients: dict[Path, list[Part]] = {}
    for path in files:
        if (match := FRAME.fullmatch(path.name)) and path.parent.name == match[1]:
            name = f"{match[1]}_frame{int(match[2]):02d}"
            patients.setdefault(path.parent, []).append((name, "label" if match[3] else "image", path))
    for folder, parts in patients.items():
        there = {name for name, _, _ in parts}
        ends = _ends(folder / "Info.cfg") if (folder / "Info.cfg").is_file() else there
        yield from (part for part in parts if part[0] in ends)
        yield from ((name, "image", folder / f"{name}.nii.gz") for name in sorted(ends - there))  # to be missed


def _ends(info: Path) -> set[str]:
    """The two frames that an Info.cfg names."""
    lines = (line.partition(":") for line in info.read_text(encoding="utf-8-sig", errors="replace").splitlines())
    said = {key.strip().upper(): value.strip() for key, _, value in lines}
    frames = [said.get("ED", ""), said.get("ES", "")]
    if not all(frame.isdecimal() for frame in frames):
        raise ValueError(f"{info} does not say which frames to take; expected lines such as `ED: 1` and `ES: 12`")
    return {f"{info.parent.name}_frame{int(frame):02d}" for frame in frames}


def _lge(files: Iterable[Path]) -> Iterator[Part]:
    """All images and masks; most masks were published after the challenge, in a folder of their own."""
    for path in files:
        if match := STACK.fullmatch(path.name):
            yield match[1], "label" if match[2] else "image", path
