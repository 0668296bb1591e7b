"""Checks of pictures: a dataset on disk against its card, and, before a run, some pictures of each domain."""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trueup.data.cards import Card, get_card
from trueup.data.check_masks import Progress, Report, check_masks
from trueup.data.corruptions import CORRUPTIONS
from trueup.data.datasets import Dataset, check_reading, cifar, folders, imagenet, open_dataset
from trueup.data.datasets.mask_datasets import NAMES
from trueup.data.domains import Domain, FileDomain
from trueup.data.loading import prefetch
from trueup.data.pictures import AS_STORED, BrokenImageError, PictureInfo, Reading, UnknownRangeError
from trueup.data.scanning import describe_skipped, first_names, log_once, log_skipped

SAMPLE = 32  # inspected pictures per domain


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
    name: str, root: str | Path | None = None, *, decode_all: bool = True, reading: Reading = AS_STORED,
    progress: Progress = lambda done, of: None,
) -> Report:  # fmt: skip
    """Compare a folder with its dataset's card; `decode_all` opens every image and mask."""
    reading = check_reading(name, reading)
    if name in NAMES:
        place = None if name.endswith("-sim") else _folder(name, root)
        return check_masks(name, place, read_all=decode_all, reading=reading, progress=progress)
    report, card = ImageReport(name), None if name == "folder" else get_card(name)
    if card is not None and card.kind == "embedded":
        dataset = open_dataset(name)
        report.classes = dataset.classes
        for target in dataset.targets:
            _count(report, target, dataset.domain(target))
        _compare(report, card)
        return report
    root = _folder(name, root)
    if card is not None and card.kind == "corruptions":
        domains = _check_corruptions(report, card, root, reading)
    else:
        domains = _check_folders(report, card, root, reading)
    if decode_all:
        _decode(report, domains, progress)
    return report


def _folder(name: str, root: str | Path | None) -> Path:
    if root is None or not Path(root).is_dir():
        raise ValueError(f"{root or 'root'} is not a folder: give the folder of {name} with --root")
    return Path(root)


def _check_folders(report: ImageReport, card: Card | None, root: Path, reading: Reading) -> list[FileDomain]:
    tree = folders.scan_image_folder(root, card, reading)
    domains = [tree.domain(name) for name in tree.domains]
    report.classes, report.others = tree.classes, tree.others
    for domain in domains:
        _count(report, domain.name, domain)
    if tree.skipped:
        report.problems.append(f"{len(tree.skipped)} entries were skipped: {describe_skipped(tree.skipped)}")
    if tree.missing:
        report.problems.append(f"{len(tree.missing)} listed files are missing: {first_names(tree.missing)}")
    if card is not None:
        if tree.unknown:
            report.problems.append(f"folders that are not domains of {card.name}: {first_names(tree.unknown)}")
        _compare(report, card)
        return domains
    for name, classes in report.counts.items():
        if lacking := [label for label, n in classes.items() if not n]:
            report.problems.append(f"{name} has no images of: {first_names(lacking)}")
    return domains


def _check_corruptions(report: ImageReport, card: Card, root: Path, reading: Reading) -> list[FileDomain]:
    """Count every corruption at every severity, and the clean set if models are trained on it."""
    dataset, told, domains = open_dataset(card.name, root, reading), set(), []
    report.classes = dataset.classes
    for corruption in CORRUPTIONS:
        for severity in range(1, 6):
            try:
                domain = dataset.domain(f"{corruption}-{severity}")
            except ValueError as error:
                told.add(corruption)
                if str(error) not in report.problems:  # a missing labels.npy fails all of them
                    report.problems.append(str(error))
                continue
            _count(report, corruption, domain)
            if isinstance(domain, FileDomain):
                domains.append(domain)
        if card.name == "imagenet-c" and corruption in report.counts:
            report.others += imagenet.non_image_files(root, corruption)
    if card.name != "imagenet-c":
        try:
            _, labels = cifar.read_clean(card.name, root)
            if len(labels) != 50_000:
                report.problems.append(f"the clean set has {len(labels):,} images; 50,000 are expected")
        except ValueError as error:
            report.problems.append(str(error))
    _compare(report, card, told)
    return domains


def _count(report: ImageReport, name: str, domain: Domain) -> None:
    """Add the images of a domain to the counts of `name`."""
    total = report.counts.setdefault(name, dict.fromkeys(report.classes, 0))
    counts = np.bincount(domain.labels, minlength=len(report.classes))
    for label, n in zip(report.classes, counts, strict=True):
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


def _decode(report: ImageReport, domains: Sequence[FileDomain], progress: Progress) -> None:
    """Open every image file, in parallel."""
    pictures = ((domain, i) for domain in domains for i in range(len(domain.files)))
    total = sum(len(domain.files) for domain in domains)
    unknown, odd, clipped = list[str](), list[str](), list[str]()
    with ThreadPoolExecutor() as pool:
        waiting = prefetch(pictures, lambda picture: pool.submit(_look, *picture), 512)
        for done, ((domain, i), looking) in enumerate(waiting, 1):
            file = domain.files[i]
            try:
                seen = looking.result()
                odd += [f"{file} ({seen.width}×{seen.height})"] if seen.squashed else []
                clipped += [file] if seen.clipped else []
            except UnknownRangeError as error:
                unknown.append(f"{file} ({error.reason})")
            except BrokenImageError:
                report.broken.append(file)
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


def _look(domain: FileDomain, i: int) -> PictureInfo:
    """Inspect and decode a picture."""
    seen = domain.inspect(i)
    domain.image(i)
    return seen


def preflight_datasets(datasets: Iterable[Dataset]) -> None:
    """Log skipped entries of datasets once, and inspect some pictures of each domain of picture files.

    An unknown range is refused; squashed and clipped pictures are logged. Worker processes do nothing.
    """
    if multiprocessing.parent_process() is not None:
        return
    for dataset in datasets:
        log_skipped(dataset.name, dataset.left_out())
        domains = []
        for name in dataset.targets if dataset.clean is None and not dataset.structures else ():
            with suppress(ValueError):  # a plan may name a dataset without files
                domains.append(dataset.domain(name))
        preflight_domains(dataset.name, [domain for domain in domains if isinstance(domain, FileDomain)])


def preflight_domains(name: str, domains: Sequence[FileDomain]) -> None:
    """Inspect some pictures of each domain; refuse an unknown range, and log squashed and clipped pictures once."""
    seen: dict[str, PictureInfo] = {}
    for domain in domains:
        count = len(domain.files)
        for i in np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(int)).tolist():
            with suppress(BrokenImageError):  # reported when it is loaded
                seen[domain.files[i]] = domain.inspect(i)
    looked = f"of {len(seen)} inspected pictures of {name}"
    squashing = all(domain.reading.resize is None for domain in domains)
    if squashing and (odd := [file for file, what in seen.items() if what.squashed]):
        first = seen[odd[0]]
        log_once(
            f"{len(odd)} {looked} are not square, such as {odd[0]} ({first.width}×{first.height}), and networks see "
            f"them squashed: --resize crop or pad keeps their shape, --resize squash silences this line"
        )
    if clipped := [file for file, what in seen.items() if what.clipped > 0]:
        share = 100 * max(what.clipped for what in seen.values())
        log_once(f"{len(clipped)} {looked} have values beyond --range, up to {share:.1f} % of them, which are clipped")
