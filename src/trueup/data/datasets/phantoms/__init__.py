"""Embedded benchmarks with masks: drawn eyes, hearts and prostates.

Everything is made from random numbers in milliseconds; nothing is downloaded. A patient's anatomy does not depend on
the domain, so it can be drawn in several domains. The cases of two domains share no patient.
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np

from trueup.data.datasets.phantoms import eyes, hearts, prostates
from trueup.data.slices import LabelledCase, Volume

VERSION = "1"  # raise it with every change of the images, so that old records differ
DOMAINS = {
    "fundus-sim": ("clinic", "screening", "handheld"),
    "cardiac-sim": ("cine", "lge"),
    "prostate-sim": ("body-coil", "endorectal"),
}
"""The domains of each dataset; the first is the usual source."""
CASES = {"fundus-sim": 160, "cardiac-sim": 24, "prostate-sim": 24}  # per domain
SLICES = {"fundus-sim": 1, "cardiac-sim": 8, "prostate-sim": 8}


def phantom_cases(dataset: str, domain: str) -> list[LabelledCase]:
    """Return the cases of a domain; always the same."""
    view, count = _place(dataset, domain), CASES[dataset]
    read = partial(_kept, dataset, domain)
    return [LabelledCase(f"{domain}-{i:03d}", SLICES[dataset], partial(read, view * count + i)) for i in range(count)]


def render_phantom(dataset: str, domain: str, number: int) -> Volume:
    """Draw a patient in a domain; patients are numbered over all domains; the number alone gives the anatomy."""
    view, count = _place(dataset, domain), CASES[dataset]
    if not 0 <= number < count * len(DOMAINS[dataset]):
        raise ValueError(f"{dataset} has patients 0 to {count * len(DOMAINS[dataset]) - 1}, not {number}")
    key = (2023, list(DOMAINS).index(dataset), number)
    inside, outside = np.random.default_rng([*key, 0]), np.random.default_rng([*key, 1 + view])
    home = DOMAINS[dataset][number // count]
    if dataset == "fundus-sim":
        volume = eyes.photograph_eye(eyes.make_eye(inside), domain, outside)
    elif dataset == "cardiac-sim":
        volume = hearts.scan_heart(hearts.make_heart(inside), domain, outside)
    else:
        volume = prostates.scan_prostate(prostates.make_pelvis(inside, coil=home == "endorectal"), domain, outside)
    for array in (volume.image, volume.mask):
        if array is not None:
            array.setflags(write=False)  # cached and returned again
    return volume


_kept = lru_cache(maxsize=1024)(render_phantom)


def _place(dataset: str, domain: str) -> int:
    if dataset not in DOMAINS:
        raise ValueError(f"there is no phantom {dataset!r}; there are: {', '.join(DOMAINS)}")
    if domain not in DOMAINS[dataset]:
        raise ValueError(f"{dataset} has no domain {domain!r}; there are: {', '.join(DOMAINS[dataset])}")
    return DOMAINS[dataset].index(domain)
