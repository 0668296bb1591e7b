"""Cardiac MRI: cine images of ACDC, and late gadolinium enhancement (LGE) of MS-CMRSeg 2019.

Both are short-axis stacks; the classes are numbered as in ACDC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from trueup.data.datasets.file_matching import CaseFile, FoundCases, LabelCoding, check_domain, pair_cases, walk_files

DOMAINS = ("acdc", "lge")
CLASSES = ("background", "right ventricle", "myocardium", "left ventricle")
STRUCTURES = {"RV": (1,), "MYO": (2,), "LV": (3,)}
FIELD = 350.0  # mm; 256 pixels are then 1.37 mm wide

CODINGS = {
    "acdc": LabelCoding("ACDC", {0: 0, 1: 1, 2: 2, 3: 3}),
    "lge": LabelCoding("MS-CMRSeg", {0: 0, 600: 1, 200: 2, 500: 3}),
}
LAYOUTS = {
    "acdc": "training/patient001/Info.cfg, patient001_frame01.nii.gz and patient001_frame01_gt.nii.gz",
    "lge": "c0t2lge/patient1_LGE.nii.gz and lgegt/patient1_LGE_manual.nii.gz, whatever the folders are called",
}
FRAME = re.compile(r"(patient\d+)_frame(\d+)(_gt)?\.nii(\.gz)?", re.ASCII)
STACK = re.compile(r"(patient\d+_LGE)(_manual)?\.nii(\.gz)?", re.ASCII)
# Files that a domain does not use: whole beats, other sequences of the same hearts, and the other domain.
_BESIDE = r"Info\.cfg|patient\d+_4d\.nii(\.gz)?|patient\d+_(C0|T2)(_manual)?\.nii(\.gz)?"
BESIDE = {
    domain: re.compile(f"{_BESIDE}|{other.pattern}", re.ASCII) for domain, other in (("acdc", STACK), ("lge", FRAME))
}


def find_cardiac_cases(root: Path, domain: str) -> FoundCases:
    """Find the cases of a domain below a folder, split 80 to 20 by patient; only headers are read."""
    check_domain(domain, DOMAINS, "cardiac")
    # ACDC's `testing` is the test set of its challenge; published comparisons do not use it.
    files = [path for path in walk_files(root) if domain != "acdc" or "testing" not in path.relative_to(root).parts]
    parts = _acdc(files) if domain == "acdc" else _lge(files)
    expected = f"{domain!r}; looked for {LAYOUTS[domain]}"
    coding, patient = CODINGS[domain], lambda name: name.partition("_")[0]
    return pair_cases(root, files, parts, BESIDE[domain], expected, coding, FIELD, patient=patient)


def _acdc(files: Iterable[Path]) -> Iterator[CaseFile]:
    """Yield the end-diastolic and end-systolic frames of each patient; without an Info.cfg, all frames."""
    patients: dict[Path, list[CaseFile]] = {}
    for path in files:
        if (match := FRAME.fullmatch(path.name)) and path.parent.name == match[1]:
            name = f"{match[1]}_frame{int(match[2]):02d}"
            patients.setdefault(path.parent, []).append((name, "label" if match[3] else "image", path))
    for folder, parts in patients.items():
        there = {name for name, _, _ in parts}
        ends = _ends(folder / "Info.cfg") if (folder / "Info.cfg").is_file() else there
        yield from (part for part in parts if part[0] in ends)
        yield from ((name, "image", folder / f"{name}.nii.gz") for name in sorted(ends - there))  # reported as missing


def _ends(info: Path) -> set[str]:
    """Return the two frames that an Info.cfg names."""
    lines = (line.partition(":") for line in info.read_text(encoding="utf-8-sig", errors="replace").splitlines())
    said = {key.strip().upper(): value.strip() for key, _, value in lines}
    frames = [said.get("ED", ""), said.get("ES", "")]
    if not all(frame.isdecimal() for frame in frames):
        raise ValueError(f"{info} does not name the frames to use; expected lines such as `ED: 1` and `ES: 12`")
    return {f"{info.parent.name}_frame{int(frame):02d}" for frame in frames}


def _lge(files: Iterable[Path]) -> Iterator[CaseFile]:
    """Yield all images and masks; most masks were published later, in a separate folder."""
    for path in files:
        if match := STACK.fullmatch(path.name):
            yield match[1], "label" if match[2] else "image", path
