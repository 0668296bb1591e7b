"""Checks of a dataset with masks against its card: counts, and what its masks show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from trueup.data.cards import CARDS
from trueup.data.datasets.file_matching import DomainNotFoundError, FoundCases
from trueup.data.datasets.mask_datasets import Structures, mask_source
from trueup.data.loading import prefetch
from trueup.data.pictures import BrokenImageError, Reading, UnknownRangeError
from trueup.data.scanning import describe_skipped, find_skipped, first_names
from trueup.data.slices import LabelledCase, crop_padded

THREADS = 4  # volumes in memory at a time
WITHIN = {"cup": "disc", "LV": "MYO"}  # structures inside others: if they mostly are not, labels are probably swapped

Progress = Callable[[int, int], None]


@dataclass
class Report:
    """The findings of a check; those of images and of masks have more."""

    name: str
    problems: list[str] = field(default_factory=list)  # sentences; empty if the dataset is complete and readable
    broken: list[str] = field(default_factory=list)  # images, or cases with the reason, that cannot be read
    others: list[str] = field(default_factory=list)  # other files; they are ignored
    notes: list[str] = field(default_factory=list)  # remarks that are not problems


@dataclass
class DomainPart:
    """The counts of a part of a domain; for masks, of those that can be read."""

    cases: int
    slices: int
    read: int = 0
    having: Counter[str] = field(default_factory=Counter)  # the number of cases with each structure
    pixels: Counter[str] = field(default_factory=Counter)  # of each structure; all pixels under the empty name
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # cases of each slice size (rows, columns)
    spacings: set[tuple[float, float, float]] = field(default_factory=set)  # millimetres, if known

    def share(self, structure: str) -> float:
        """Return the share of pixels of a structure."""
        return self.pixels[structure] / max(1, self.pixels[""])


@dataclass
class MaskReport(Report):
    """A report on images with masks: the cases of each part of each domain."""

    structures: Structures = field(default_factory=dict)
    parts: dict[str, DomainPart] = field(default_factory=dict)  # by domain and part, as in "refuge:train"
    missing: list[str] = field(default_factory=list)  # images without masks and masks without images
    found: dict[str, FoundCases] = field(default_factory=dict, repr=False)  # the cases themselves, by domain

    @property
    def cases(self) -> int:
        """Count all cases."""
        return sum(part.cases for part in self.parts.values())

    @property
    def slices(self) -> int:
        """Count all slices."""
        return sum(part.slices for part in self.parts.values())


@dataclass(frozen=True)
class _Seen:
    """The measured properties of a case."""

    size: tuple[int, int]
    spacing: tuple[float, float, float] | None
    pixels: dict[str, int]
    astray: tuple[str, ...]  # structures that are not inside the one that should surround them
    cropped: bool  # True if a structure extends beyond the network's view


def check_masks(name: str, root: Path | None, *, read_all: bool, reading: Reading, progress: Progress) -> MaskReport:
    """Compare a folder with its dataset's card; `read_all` reads every case, else only names and headers."""
    report = MaskReport(name)
    try:
        _, report.structures, domains, find = mask_source(name, root, reading)
    except ValueError as error:  # a user's folder with another layout, or with masks that contradict each other
        report.problems.append(str(error))
        return report
    for domain in domains:
        try:
            report.found[domain] = find(domain)
        except DomainNotFoundError as error:
            report.problems.append(f"not found: {error}")
        except ValueError as error:
            report.problems.append(f"{domain}: {error}")
    for domain, found in report.found.items():
        for part, cases in found.parts.items():
            report.parts[_key(domain, part)] = DomainPart(len(cases), sum(case.slices for case in cases))
        report.missing += found.missing
    if root is not None and (skipped := find_skipped(root)):
        report.problems.append(f"{len(skipped)} entries were skipped: {describe_skipped(skipped)}")
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


def _key(domain: str, part: str) -> str:
    return f"{domain}:{part}" if part else domain


def _compare(report: MaskReport) -> None:
    """Report files without a partner, and counts that differ from the card's."""
    for domain, expected in CARDS[report.name].domains.items() if report.name in CARDS else ():
        usual = [part for key in ("train", "test", "") if (part := report.parts.get(_key(domain, key)))]
        count = sum(part.cases for part in usual)
        if domain in report.found and count != expected:
            report.problems.append(f"{domain} has {count:,} cases; the card says {expected:,}")
    if report.missing:
        report.problems.append(
            f"images and masks do not match, {len(report.missing)} times: {first_names(report.missing)}"
        )


def _read(report: MaskReport, progress: Progress) -> None:
    """Read every case, in parallel, and check its mask."""
    seen: dict[str, dict[str, _Seen]] = {domain: {} for domain in report.found}
    parts = [(domain, part, cases) for domain, found in report.found.items() for part, cases in found.parts.items()]
    cases = ((domain, part, case) for domain, part, cases in parts for case in cases)
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = prefetch(cases, lambda item: pool.submit(_look, item[2], report.structures), THREADS)
        for done, ((domain, part, case), looking) in enumerate(waiting, 1):
            try:
                what = looking.result()
                _count(report.parts[_key(domain, part)], what)
                seen[domain][f"{part}/{case.name}" if case.name in seen[domain] else case.name] = what
            except (BrokenImageError, UnknownRangeError) as error:
                report.broken.append(f"{_key(domain, part)}: {error}")
            progress(done, report.cases)
    for domain in report.found:
        _judge(report, domain, seen[domain])


def _look(case: LabelledCase, structures: Structures) -> _Seen:
    """Measure a case."""
    volume = case.load()
    assert volume.mask is not None
    counts = np.bincount(volume.mask.ravel(), minlength=256)
    there = [pair for pair in WITHIN.items() if structures.keys() >= set(pair)]
    seen = sum(int(np.count_nonzero(crop_padded(mask, volume.box))) for mask in volume.mask)
    photograph = case.slices == 1 and volume.spacing == (1.0, 1.0, 1.0)
    return _Seen(
        (volume.mask.shape[1], volume.mask.shape[2]),
        None if photograph else volume.spacing,
        {"": volume.mask.size, **{name: int(counts[list(classes)].sum()) for name, classes in structures.items()}},
        tuple(pair[0] for pair in there if not _within(*(np.isin(volume.mask, structures[name]) for name in pair))),
        seen < volume.mask.size - int(counts[0]),
    )


def _within(inner: NDArray[np.bool_], outer: NDArray[np.bool_]) -> bool:
    """Return True if most pixels next to a structure, within slices, belong to the outer one."""
    edge = ndimage.binary_dilation(inner, ndimage.generate_binary_structure(2, 1)[None]) & ~inner
    return bool(2 * np.count_nonzero(edge & outer) >= np.count_nonzero(edge))


def _count(part: DomainPart, what: _Seen) -> None:
    part.read += 1
    part.pixels.update(what.pixels)
    part.having.update(name for name, n in what.pixels.items() if name and n)
    part.sizes[what.size] += 1
    if what.spacing is not None:
        part.spacings.add(what.spacing)


def _judge(report: MaskReport, domain: str, seen: dict[str, _Seen]) -> None:
    """Report implausible masks of a domain."""
    for structure in report.structures:
        if seen and not any(what.pixels[structure] for what in seen.values()):
            report.problems.append(f"{domain}: {structure} is in none of the cases; the label coding may differ")
    for inner, outer in WITHIN.items():
        if strange := [name for name, what in seen.items() if inner in what.astray]:
            hint = "; the label coding may differ" if 2 * len(strange) > len(seen) else ""
            where = f"in {len(strange)} of {len(seen)} cases{hint}: {first_names(strange)}"
            report.problems.append(f"{domain}: {inner} is not within {outer} {where}")
    if empty := [name for name, what in seen.items() if not any(what.pixels[s] for s in report.structures)]:
        # Some user images may show nothing.
        says = report.problems if report.name in CARDS else report.notes
        says.append(f"{domain}: {len(empty)} of {len(seen)} masks are empty: {first_names(empty)}")
    if cropped := [name for name, what in seen.items() if what.cropped]:
        where = f"in {len(cropped)} of {len(seen)} cases: {first_names(cropped)}"
        report.notes.append(f"{domain}: structures extend beyond the view of networks {where}")
