"""Checks of a dataset's pictures before a run: shape, and known range of values."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from trueup.data.datasets import Dataset
from trueup.data.domains import FileDomain
from trueup.data.pictures import BrokenImageError, UnknownRangeError, is_deep, open_picture, read_picture
from trueup.data.scanning import log_once, log_skipped

SAMPLE = 32  # inspected pictures per domain


@dataclass(frozen=True)
class PictureInfo:
    """The size of a picture, and its clipped values."""

    width: int
    height: int
    clipped: float  # the share of values beyond the requested range

    @property
    def squashed(self) -> bool:
        """Return True if the sides differ by more than a pixel of rounding."""
        return abs(self.width - self.height) > 1


def inspect_picture(domain: FileDomain, i: int) -> PictureInfo:
    """Inspect picture i; raise a BrokenImageError or an UnknownRangeError if a network cannot see it."""
    path = domain.root / domain.files[i]
    with open_picture(path) as file:
        width, height = file.size
        deep = is_deep(file)
    clipped = 0.0
    if deep:
        picture = read_picture(path)
        try:
            low, high = picture.value_range(domain.reading.range)
        except UnknownRangeError as error:
            raise error.renamed(domain.files[i]) from None
        values = picture.colours()
        clipped = float(np.mean((values < low) | (values > high)))
    return PictureInfo(width, height, clipped)


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
                seen[domain.files[i]] = inspect_picture(domain, i)
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
