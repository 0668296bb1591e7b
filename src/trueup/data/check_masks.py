"""Is a dataset with masks what its card says? Reads every case, and counts what the masks show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trueup.data.cards import CARDS
from trueup.data.check import Progress, few
from trueup.data.datasets import phantoms
from trueup.data.datasets.file_matching import Found, NotThereError
from trueup.data.datasets.masked import ON_DISK, Structures, shelves
from trueup.data.pictures import AS_STORED, BrokenImageError, Reading, UnknownRangeError
from trueup.data.scanning import describe, left_out
from trueup.data.slices import Case, cut

THREADS = 4  # volumes that are in memory at a time
WITHIN = {"cup": "disc", "LV": "MYO"}
"""Structures that lie within others: where they mostly do not, numbers have been mistaken for one another."""


@dataclass
class Part:
    """What a part of a domain holds; of its masks only what could be read counts."""

    cases: int
    slices: int
    read: int = 0
    having: Counter[str] = field(default_factory=Counter)
    """In how many cases each structure is."""
    pixels: Counter[str] = field(default_factory=Counter)
    """How many pixels each structure has; all pixels under the empty name."""
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Rows and columns of a slice, and how many cases have them."""
    spacings: set[tuple[float, float, float]] = field(default_factory=set)
    """Millimetres between slices, rows and columns, where they are known."""

    def share(self, structure: str) -> float:
        """The part of all pixels that a structure has."""
        return self.pixels[structure] / max(1, self.pixels[""])


@dataclass
class MaskReport:
    """What was found: the cases of each part of each domain, and everything that is not as it should be."""

    name: str
    structures: Structures = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    """By domain and part, as in "refuge:train"."""
    problems: list[str] = field(default_factory=list)
    """Each in one sentence; an empty list means that all is well."""
    missing: list[str] = field(default_factory=list)
    """Images without masks and masks without images."""
    broken: list[str] = field(default_factory=list)
    """Cases that cannot be read, each with the reason."""
    others: list[str] = field(default_factory=list)
    """Files that are neither images nor masks; they are left out and do no harm."""
    notes: list[str] = field(default_factory=list)
    """Remarks that are worth knowing and need not be faults."""
    found: dict[str, Found] = field(default_factory=dict, repr=False)
    """The cases themselves, by domain."""

    @property
    def cases(self) -> int:
        """All cases."""
        return sum(part.cases for part in self.parts.values())

    @property
    def slices(self) -> int:
        """All slices."""
        return sum(part.slices for part in self.parts.values())


@dataclass(frozen=True)
class _Seen:
    """What a case is like."""

    size: tuple[int, int]
    spacing: tuple[float, float, float] | None
    pixels: dict[str, int]
    astray: tuple[str, ...]
    """Structures that are not within those that they should be within."""
    cropped: bool
    """Whether a structure reaches beyond what networks see."""


def check_masks(
    name: str,
    root: Path | None,
    *,
    read_all: bool = True,
    reading: Reading = AS_STORED,
    progress: Progress = lambda done, of: None,
) -> MaskReport:
    """Compare a folder with its dataset's card; `read_all` reads every case, else names and headers are looked at."""
    report = MaskReport(name)
    try:
        report.structures, domains, scan = _domains(name, root, reading)
    except ValueError as error:  # your own folder is laid out otherwise, or its masks do not agree
        report.problems.append(str(error))
        return report
    for domain in domains:
        try:
            report.found[domain] = scan(domain)
        except NotThereError as error:
            report.problems.append(f"not found: {error}")
        except ValueError as error:
            report.problems.append(f"{domain}: {error}")
    for domain, found in report.found.items():
        for part, cases in found.parts.items():
            report.parts[_key(domain, part)] = Part(len(cases), sum(case.slices for case in cases))
        report.missing += found.missing
    if root is not None and (skipped := left_out(root)):
        report.problems.append(f"{len(skipped)} entries are left out: {describe(skipped)}")
    report.others = list(dict.fromkeys(file for found in report.found.values() for file in found.others))
    _compare(report)
    if read_all:
        _read(report, progress)
    else:
        report.broken = [f"{domain}: {line}" for domain, found in report.found.items() for line in found.broken]
    if report.broken:
        first = f"{len(report.broken)} of {report.cases} cases cannot be read; the first: {report.broken[0]}"
        report.problems.append(first)
    return report


def _domains(
    name: str, root: Path | None, reading: Reading
) -> tuple[Structures, Sequence[str], Callable[[str], Found]]:
    """What is scored, the domains, and what looks for one."""
    if name.endswith("-sim"):
        structures: Structures = ON_DISK[name.removesuffix("-sim")].STRUCTURES
        return structures, phantoms.DOMAINS[name], lambda domain: Found({"": phantoms.cases(name, domain)})
    assert root is not None
    return shelves(name, root, reading)[1:]


def _key(domain: str, part: str) -> str:
    return f"{domain}:{part}" if part else domain


def _compare(report: MaskReport) -> None:
    """Say what lacks its partner, and where the counts differ from the card's."""
    for domain, expected in CARDS[report.name].domains.items() if report.name in CARDS else ():
        usual = [part for key in ("train", "test", "") if (part := report.parts.get(_key(domain, key)))]
        count = sum(part.cases for part in usual)
        if domain in report.found and count != expected:
            report.problems.append(f"{domain} has {count:,} cases; the card says {expected:,}")
    if report.missing:
        report.problems.append(f"images and masks do not pair up, {len(report.missing)} times: {few(report.missing)}")


def _read(report: MaskReport, progress: Progress) -> None:
    """Read every case, several at a time, and look at what the masks show."""
    look = partial(_look, structures=report.structures)
    done = 0
    pool = ThreadPoolExecutor(THREADS)
    try:
        for domain, found in report.found.items():
            seen: dict[str, _Seen] = {}
            for key, cases in found.parts.items():
                part = report.parts[_key(domain, key)]
                for case, what in zip(cases, pool.map(look, cases), strict=True):
                    if isinstance(what, str):
                        report.broken.append(f"{_key(domain, key)}: {what}")
                    else:
                        _count(part, what)
                        seen[f"{key}/{case.name}" if case.name in seen else case.name] = what
                    done += 1
                    progress(done, report.cases)
            _judge(report, domain, seen)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for all others


def _look(case: Case, structures: Structures) -> _Seen | str:
    """What a case is like, or why it cannot be read."""
    try:
        volume = case.read()
    except (BrokenImageError, UnknownRangeError) as error:
        return str(error)
    assert volume.mask is not None
    if len(volume.mask) != case.slices:
        return f"{case.name} has {len(volume.mask)} slices; its header said {case.slices}"
    counts = np.bincount(volume.mask.ravel(), minlength=256)
    there = [pair for pair in WITHIN.items() if structures.keys() >= set(pair)]
    seen = sum(int(np.count_nonzero(cut(mask[..., None], volume.box))) for mask in volume.mask)
    photograph = case.slices == 1 and volume.spacing == (1.0, 1.0, 1.0)
    return _Seen(
        (volume.mask.shape[1], volume.mask.shape[2]),
        None if photograph else volume.spacing,
        {"": volume.mask.size, **{name: int(counts[list(classes)].sum()) for name, classes in structures.items()}},
        tuple(pair[0] for pair in there if not _within(*(np.isin(volume.mask, structures[name]) for name in pair))),
        seen < volume.mask.size - int(counts[0]),
    )


def _within(inner: NDArray[np.bool_], outer: NDArray[np.bool_]) -> bool:
    """Whether most of what is next to a structure, in its slices, is of the structure around it."""
    padded = np.pad(inner, ((0, 0), (1, 1), (1, 1)))
    near = padded[:, :-2, 1:-1] | padded[:, 2:, 1:-1] | padded[:, 1:-1, :-2] | padded[:, 1:-1, 2:]
    edge = near & ~inner
    return bool(2 * np.count_nonzero(edge & outer) >= np.count_nonzero(edge))


def _count(part: Part, what: _Seen) -> None:
    part.read += 1
    part.pixels.update(what.pixels)
    part.having.update(name for name, n in what.pixels.items() if name and n)
    part.sizes[what.size] += 1
    if what.spacing is not None:
        part.spacings.add(what.spacing)


def _judge(report: MaskReport, domain: str, seen: dict[str, _Seen]) -> None:
    """Say what is strange about the masks of a domain."""
    for structure in report.structures:
        if seen and not any(what.pixels[structure] for what in seen.values()):
            report.problems.append(f"{domain}: {structure} is in none of the cases; the coding may be another")
    for inner, outer in WITHIN.items():
        if strange := [name for name, what in seen.items() if inner in what.astray]:
            hint = "; the coding may be another" if 2 * len(strange) > len(seen) else ""
            report.problems.append(
                f"{domain}: {inner} is not within {outer} in {len(strange)} of {len(seen)} cases{hint}: {few(strange)}"
            )
    if empty := [name for name, what in seen.items() if not any(what.pixels[s] for s in report.structures)]:
        # Of your own images some may well show nothing.
        says = report.problems if report.name in CARDS else report.notes
        says.append(f"{domain}: {len(empty)} of {len(seen)} masks are empty: {few(empty)}")
    if cropped := [name for name, what in seen.items() if what.cropped]:
        report.notes.append(
            f"{domain}: in {len(cropped)} of {len(seen)} cases something lies beyond what networks see: {few(cropped)}"
        )
