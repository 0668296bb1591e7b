"""A first look at the pictures of a dataset, before a run starts: their shape, and whether their depth is known."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from trueup.data.datasets import Dataset
from trueup.data.domains import FileDomain
from trueup.data.pictures import BrokenImageError, UnknownRangeError, is_deep, opened, read_picture
from trueup.data.scanning import log_skipped

log = logging.getLogger("trueup")
SAMPLE = 32  # pictures of a domain that are looked at

_told: set[str] = set()


@dataclass(frozen=True)
class Seen:
    """The properties of a picture."""

    width: int
    height: int
    clipped: float
    """The share of its values that lie beyond the range that was asked for."""

    @property
    def squashed(self) -> bool:
        """True if its sides differ by more than a pixel's worth of rounding."""
        return abs(self.width - self.height) > 1


def look(domain: FileDomain, i: int) -> Seen:
    """Look at picture i: a BrokenImageError or an UnknownRangeError if it cannot be shown to a network."""
    path = domain.root / domain.files[i]
    with opened(path) as file:
        width, height = file.size
        deep = is_deep(file)
    clipped = 0.0
    if deep:
        picture = read_picture(path)
        try:
            low, high = picture.limits(domain.reading.range)
        except UnknownRangeError as error:
            raise error.called(domain.files[i]) from None
        values = picture.colours()
        clipped = float(np.mean((values < low) | (values > high)))
    return Seen(width, height, clipped)


def survey(datasets: Iterable[Dataset]) -> None:
    """Log once what is left out of datasets, and look at some pictures of each domain, if they are folders of pictures.

    An unknown depth is refused; what changes pictures is logged. Processes that this one has started keep quiet.
    """
    if multiprocessing.parent_process() is not None:
        return
    for dataset in datasets:
        log_skipped(dataset.name, dataset.left_out())
        domains = []
        for name in dataset.targets if dataset.clean is None and not dataset.structures else ():
            with suppress(ValueError):  # a dataset that is not here, for a plan
                domains.append(dataset.domain(name))
        survey_domains(dataset.name, [domain for domain in domains if isinstance(domain, FileDomain)])


def survey_domains(name: str, domains: Sequence[FileDomain]) -> None:
    """Look at some pictures of each domain; refuse an unknown depth, and log once what changes pictures."""
    seen: dict[str, Seen] = {}
    for domain in domains:
        count = len(domain.files)
        for i in np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(int)).tolist():
            with suppress(BrokenImageError):  # named when it is its turn
                seen[domain.files[i]] = look(domain, i)
    looked = f"of {len(seen)} pictures of {name} that were looked at"
    squashing = all(domain.reading.resize is None for domain in domains)
    if squashing and (odd := [file for file, what in seen.items() if what.squashed]):
        first = seen[odd[0]]
        _say(
            f"{len(odd)} {looked} are not square, such as {odd[0]} ({first.width}×{first.height}), and networks see "
            f"them squashed: --resize crop or pad keeps their shape, --resize squash keeps this line away"
        )
    if clipped := [file for file, what in seen.items() if what.clipped > 0]:
        share = 100 * max(what.clipped for what in seen.values())
        _say(f"{len(clipped)} {looked} have values beyond --range, up to {share:.1f} % of them, which are clipped")


def _say(line: str) -> None:
    if line not in _told:
        _told.add(line)
        log.warning("%s", line)
