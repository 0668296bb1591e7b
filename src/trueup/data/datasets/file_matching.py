"""Cases with masks that were found on disk, and the few things that all who look for them need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from trueup.data.domains import BrokenImageError
from trueup.data.scanning import Scan
from trueup.data.slices import Case, Volume
from trueup.data.volumes import count_slices

DEEPEST = 2  # levels that archives put around what they hold

Part = tuple[str, str, Path]
"""The name of a case, whether this is its "image" or its "label", and the file."""


class NotThereError(ValueError):
    """Nothing of a domain lies below a folder."""


@dataclass
class Found:
    """What lies in a folder: the cases of each part, which are read later, and what fits nothing."""

    parts: dict[str, list[Case]] = field(default_factory=dict)
    """The cases of "train" and "test", or of one of them; what is like neither is a part of its own."""
    missing: list[str] = field(default_factory=list)
    """Images without a mask and masks without an image, each in a few words."""
    broken: list[str] = field(default_factory=list)
    """Cases whose header cannot be read, each with the reason."""
    others: list[str] = field(default_factory=list)
    """Files that are neither."""

    @property
    def cases(self) -> list[Case]:
        """The cases of all parts, one part after the other."""
        return [case for cases in self.parts.values() for case in cases]

    def part(self, name: str) -> list[Case]:
        """The cases of a part; "all" is "train" and "test", whatever other parts there are."""
        usual = [part for part in ("train", "test") if part in self.parts]
        if name == "all" and usual:
            return [case for part in usual for case in self.parts[part]]
        if name not in self.parts:
            there = ", ".join([*self.parts, *(["all"] if usual else [])])
            raise ValueError(f"there is no part {name!r} here; there is: {there}")
        return list(self.parts[name])

    def case(
        self, name: str, slices: Callable[[Path], int], read: Callable[..., Volume], *files: Path, patient: str = ""
    ) -> Case:
        """A case of an image and its masks; the image's slices are counted now.

        If they cannot be, it is one slice that says why when it is read.
        """
        try:
            return Case(name, slices(files[0]), partial(read, *files), patient, files)
        except BrokenImageError as error:
            self.broken.append(str(error))
            return Case(name, 1, partial(_refuse, str(error)), patient, files)


def visible(root: Path) -> Iterator[Path]:
    """All files below a folder, sorted; see `trueup.data.scanning` for what is left out."""
    return Scan(root).walk()


def levels(root: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """The folder itself and those below it, the nearest first, sorted within a level."""
    scan, level = Scan(root), [root]
    for _ in range(depth + 1):
        yield from level
        level = [Path(entry.path) for folder in level for entry in scan.inside(folder)[0]]


def paired(
    root: Path,
    files: Iterable[Path],
    parts: Iterable[Part],
    read: Callable[[Path, Path], Volume],
    beside: re.Pattern[str],
    patient: Callable[[str], str] = str,
) -> Found:
    """Cases of volumes with masks, divided 80 to 20 by patient; headers are read now, the rest by `read`.

    `beside` are names of files that belong there and are of no use here; `patient` gives the patient of a case.
    """
    pairs: dict[str, dict[str, Path]] = {}
    for name, kind, path in parts:
        if (other := pairs.setdefault(name, {}).setdefault(kind, path)) != path:
            raise ValueError(f"the {kind} of {name} is there twice: {other} and {path}; leave one of them")
    used = {path for pair in pairs.values() for path in pair.values()}
    rest = (path for path in files if path not in used and not beside.fullmatch(path.name))
    found, cases = Found(others=[path.relative_to(root).as_posix() for path in rest]), []
    for name, pair in sorted(pairs.items(), key=lambda item: (len(item[0]), item[0])):  # 9 before 10
        if len(pair) == 2:
            cases.append(found.case(name, count_slices, read, pair["image"], pair["label"], patient=patient(name)))
        for kind, path in pair.items() if len(pair) == 1 else ():
            lacks = f"has no {'mask' if kind == 'image' else 'image'}" if path.exists() else "is not there"
            found.missing.append(f"{path.relative_to(root).as_posix()} {lacks}")
    for part, those in zip(("train", "test"), eighty_twenty(case.patient for case in cases), strict=True):
        if chosen := [case for case in cases if case.patient in those]:
            found.parts[part] = chosen
    return found


def eighty_twenty(names: Iterable[str], seed: int = 0) -> tuple[list[str], list[str]]:
    """Divide names into four fifths to train with and one fifth to test with, always in the same way."""
    ordered = sorted(set(names))
    order = np.random.default_rng(seed).permutation(len(ordered))
    count = max(1, round(len(ordered) / 5)) if len(ordered) > 1 else 0
    test = {ordered[i] for i in order[:count]}
    return [name for name in ordered if name not in test], sorted(test)


def _refuse(reason: str) -> Volume:
    raise BrokenImageError(reason)
