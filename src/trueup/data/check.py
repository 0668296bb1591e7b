"""Checks of a dataset on disk against its card: counts, and files that cannot be read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from trueup.data.cards import CARDS, Card, get_card
from trueup.data.check_masks import check_masks
from trueup.data.check_report import Progress, Report, first_names
from trueup.data.corruptions import CORRUPTIONS
from trueup.data.datasets import check_reading, cifar, folders, imagenet, open_dataset
from trueup.data.datasets.mask_datasets import NAMES
from trueup.data.domains import Domain, FileDomain
from trueup.data.pictures import AS_STORED, BrokenImageError, Reading, UnknownRangeError, decode
from trueup.data.preflight import PictureInfo, inspect_picture
from trueup.data.scanning import describe_skipped


@dataclass
class ImageReport(Report):
    """A report on labelled images: counts per domain and class."""

    classes: tuple[str, ...] = ()
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def images(self) -> int:
        """Count all images."""
        return sum(sum(classes.values()) for classes in self.counts.values())


def check_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    decode_all: bool = True,
    reading: Reading = AS_STORED,
    progress: Progress = lambda done, of: None,
) -> Report:
    """Compare a folder with its dataset's card; `decode_all` opens every image and mask."""
    check_reading(name, reading)
    if name in NAMES:
        place = None if name.endswith("-sim") else _folder(name, root)
        return check_masks(name, place, read_all=decode_all, reading=reading, progress=progress)
    report = ImageReport(name)
    card = CARDS.get(name)
    if name != "folder" and card is None:
        get_card(name)
    if card is not None and card.kind == "embedded":
        dataset = open_dataset(name)
        for target in dataset.targets:
            _count(report, dataset.classes, [dataset.domain(target)], as_one=target)
        _compare(report, card)
        return report
    root = _folder(name, root)
    if card is not None and card.kind == "corruptions":
        _check_corruptions(report, card, root)
    else:
        _check_folders(report, card, root)
    if decode_all:
        _decode(report, root, reading, progress)
    return report


def _folder(name: str, root: str | Path | None) -> Path:
    if root is None or not Path(root).is_dir():
        raise ValueError(f"{root or 'root'} is not a folder: give the folder of {name} with --root")
    return Path(root)


def _check_folders(report: ImageReport, card: Card | None, root: Path) -> None:
    tree = folders.scan_image_folder(root, card)
    _count(report, tree.classes, (tree.domain(name) for name in tree.domains))
    report.others = tree.others
    if tree.skipped:
        report.problems.append(f"{len(tree.skipped)} entries were skipped: {describe_skipped(tree.skipped)}")
    if tree.missing:
        report.problems.append(f"{len(tree.missing)} listed files are missing: {first_names(tree.missing)}")
    if card is None:
        for name, classes in report.counts.items():
            lacking = [label for label, n in classes.items() if not n]
            if lacking:
                report.problems.append(f"{name} has no images of: {first_names(lacking)}")
        return
    if tree.unknown:
        report.problems.append(f"folders that are not domains of {card.name}: {first_names(tree.unknown)}")
    _compare(report, card)


def _check_corruptions(report: ImageReport, card: Card, root: Path) -> None:
    """Count every corruption at every severity, and the clean set if models are trained on it."""
    dataset, told = open_dataset(card.name, root), set()
    for corruption in CORRUPTIONS:
        for severity in range(1, 6):
            try:
                _count(report, dataset.classes, [dataset.domain(f"{corruption}-{severity}")], as_one=corruption)
            except ValueError as error:
                told.add(corruption)
                if str(error) not in report.problems:  # a missing labels.npy fails all of them
                    report.problems.append(str(error))
        if card.name == "imagenet-c" and corruption in report.counts:
            report.others += imagenet.non_image_files(root, corruption)
    if card.name != "imagenet-c":
        report.classes = dataset.classes
        try:
            _, labels = cifar.read_clean(card.name, root)
            if len(labels) != 50_000:
                report.problems.append(f"the clean set has {len(labels):,} images; 50,000 are expected")
        except ValueError as error:
            report.problems.append(str(error))
    _compare(report, card, told)


def _count(report: ImageReport, classes: tuple[str, ...], domains: Iterable[Domain], as_one: str | None = None) -> None:
    report.classes = classes
    for domain in domains:
        counts = np.bincount(domain.labels, minlength=len(classes))
        total = report.counts.setdefault(as_one or domain.name, dict.fromkeys(classes, 0))
        for label, n in zip(classes, counts, strict=True):
            total[label] += int(n)


def _compare(report: ImageReport, card: Card, told: Collection[str] = ()) -> None:
    """Report counts that differ from the card's."""
    if report.classes and len(report.classes) != card.classes:
        report.problems.append(f"{len(report.classes)} classes; the card says {card.classes}")
    elif card.class_names and report.classes != card.class_names:
        report.problems.append(
            f"classes are {first_names(report.classes)}; the card says {first_names(card.class_names)}"
        )
    for name, expected in card.domains.items():
        if name not in report.counts:
            if name not in told:
                report.problems.append(f"{name} is missing: {card.layout}")
            continue
        found = report.counts[name]
        if sum(found.values()) != expected:
            report.problems.append(f"{name} has {sum(found.values()):,} images; the card says {expected:,}")
        for label, n in zip(card.class_names, card.counts.get(name, ()), strict=False):
            if found.get(label, 0) != n:
                report.problems.append(f"{name}/{label} has {found.get(label, 0):,} images; the card says {n:,}")


def _decode(report: ImageReport, root: Path, reading: Reading, progress: Progress) -> None:
    """Open every image file, in parallel."""
    domains = list(_domains(report, root, reading))
    total = sum(len(domain.files) for domain in domains)
    unknown, odd, clipped, done = list[str](), list[str](), list[str](), 0
    with ThreadPoolExecutor() as pool:
        for domain in domains:
            rest = iter(range(len(domain.files)))
            while part := list(islice(rest, 512)):  # bounds the number of waiting results
                for i, seen in zip(part, pool.map(partial(_look, domain), part), strict=True):
                    file = domain.files[i]
                    if isinstance(seen, UnknownRangeError):
                        unknown.append(f"{file} ({seen.reason})")
                    elif isinstance(seen, BrokenImageError):
                        report.broken.append(file)
                    else:
                        odd += [f"{file} ({seen.width}×{seen.height})"] if seen.squashed else []
                        clipped += [file] if seen.clipped else []
                done += len(part)
                progress(done, total)
    if report.broken:
        report.problems.append(f"{len(report.broken)} images cannot be read: {first_names(report.broken)}")
    if unknown:
        why = "have more than 8 bits and do not declare the values of black and white"
        report.problems.append(f"{len(unknown)} images {why}; give --range LOW HIGH: {first_names(unknown, 1)}")
    if odd:
        how = "networks see them squashed; --resize crop or pad keeps their shape"
        report.notes.append(f"{len(odd)} of {total} images are not square, {how}: {first_names(odd, 3)}")
    if clipped:
        report.notes.append(
            f"{len(clipped)} images have values beyond --range, which are clipped: {first_names(clipped, 3)}"
        )


def _look(domain: FileDomain, i: int) -> PictureInfo | BrokenImageError | UnknownRangeError:
    """Inspect and decode a picture; return the error if that fails."""
    try:
        seen = inspect_picture(domain, i)
        decode(domain.root / domain.files[i], reading=domain.reading)
    except (BrokenImageError, UnknownRangeError) as error:
        return error
    return seen


def _domains(report: ImageReport, root: Path, reading: Reading) -> Iterator[FileDomain]:
    """Yield the domains that consist of files."""
    dataset = open_dataset(report.name, root, reading)
    names = [f"{c}-{s}" for c in dataset.targets for s in range(1, 6)] if dataset.clean else dataset.targets
    for name in names:
        try:
            domain = dataset.domain(name)
        except ValueError:
            continue  # already reported
        if isinstance(domain, FileDomain):
            yield domain
