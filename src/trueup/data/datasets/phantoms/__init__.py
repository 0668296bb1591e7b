"""The embedded benchmarks with masks: eyes, hearts and prostates that are drawn, not photographed or scanned.

Everything is made from random numbers in milliseconds; nothing is downloaded. A patient's anatomy does not depend on
what it is looked at with, so the same one can be drawn in two domains. The cases of two domains share no patient.
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np

from trueup.data.datasets.phantoms import eyes as fundus
from trueup.data.datasets.phantoms import hearts as cardiac
from trueup.data.datasets.phantoms import prostates as prostate
from trueup.data.slices import Case, Volume

VERSION = "1"  # to be raised with every change of the images, so that old records are told apart
DOMAINS = {
    "fundus-sim": ("clinic", "screening", "handheld"),
    "cardiac-sim": ("cine", "lge"),
    "prostate-sim": ("body-coil", "endorectal"),
}
"""The domains of each dataset; the first is the usual source."""
CASES = {"fundus-sim": 160, "cardiac-sim": 24, "prostate-sim": 24}
"""Of each domain."""
SLICES = {"fundus-sim": 1, "cardiac-sim": 8, "prostate-sim": 8}


def cases(dataset: str, domain: str) -> list[Case]:
    """The cases of a domain; always the same ones."""
    view, count = _place(dataset, domain), CASES[dataset]
    read = partial(_kept, dataset, domain)
    return [Case(f"{domain}-{i:03d}", SLICES[dataset], partial(read, view * count + i)) for i in range(count)]


def render(dataset: str, domain: str, number: int) -> Volume:
    """A patient, by number, as a domain shows it; patients are numbered through all domains of a dataset.

    Anatomy follows from the number alone; light, noise and whatever else is the camera's or the scanner's, from the
    number and the domain.
    """
    view, count = _place(dataset, domain), CASES[dataset]
    if not 0 <= number < count * len(DOMAINS[dataset]):
        raise ValueError(f"{dataset} has patients 0 to {count * len(DOMAINS[dataset]) - 1}, not {number}")
    key = (2023, list(DOMAINS).index(dataset), number)
    inside, outside = np.random.default_rng([*key, 0]), np.random.default_rng([*key, 1 + view])
    home = DOMAINS[dataset][number // count]
    if dataset == "fundus-sim":
        volume = fundus.picture(fundus.anatomy(inside), domain, outside)
    elif dataset == "cardiac-sim":
        volume = cardiac.scan(cardiac.anatomy(inside), domain, outside)
    else:
        volume = prostate.scan(prostate.anatomy(inside, coil=home == "endorectal"), domain, outside)
    for array in (volume.image, volume.mask):
        if array is not None:
            array.setflags(write=False)  # it is kept and handed out again
    return volume


_kept = lru_cache(maxsize=1024)(render)


def _place(dataset: str, domain: str) -> int:
    """Which of the dataset's domains it is."""
    if dataset not in DOMAINS:
        raise ValueError(f"there is no phantom {dataset!r}; there are: {', '.join(DOMAINS)}")
    if domain not in DOMAINS[dataset]:
        raise ValueError(f"{dataset} has no domain {domain!r}; there are: {', '.join(DOMAINS[dataset])}")
    return DOMAINS[dataset].index(domain)
