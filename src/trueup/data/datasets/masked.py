"""Datasets of images with masks: which domain is learnt from for which, and which part of a domain is meant.

A domain's name may say a part: "promise12:train", "promise12:test", "promise12:all". Without, a target is its test
part, where it has one; models are trained on all cases of their sources, less those that training holds out itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

from trueup.data.cards import get_card
from trueup.data.datasets import Dataset, cardiac, fundus, phantoms, prostate
from trueup.data.datasets.file_matching import Found
from trueup.data.pictures import AS_STORED, Reading
from trueup.data.scanning import left_out
from trueup.data.slices import SliceDomain

ON_DISK: dict[str, ModuleType] = {"fundus": fundus, "cardiac": cardiac, "prostate": prostate}
NAMES = (*ON_DISK, *(f"{name}-sim" for name in ON_DISK), "masks")
Structures = Mapping[str, tuple[int, ...]]

# The usual targets, each after the domain that the paper trains on. Other directions need only be asked for.
USUAL = {
    "fundus": {"drishti-gs": "refuge", "rim-one-r3": "refuge"},
    "cardiac": {"lge": "acdc"},
    "prostate": {"promise12": "msd05"},  # so in the paper's table; its text says the reverse
    "fundus-sim": {"screening": "clinic", "handheld": "clinic"},
    "cardiac-sim": {"lge": "cine"},
    "prostate-sim": {"endorectal": "body-coil"},
}


def open_masked(name: str, root: Path | None, reading: Reading = AS_STORED) -> Dataset:
    """A dataset of images with masks; only names and headers are read now."""
    if name.endswith("-sim"):
        return _embedded(name)
    assert root is not None
    dataset = _dataset(name, *shelves(name, root, reading), USUAL.get(name, {}))
    return replace(dataset, left_out=lambda: left_out(root))


def shelves(
    name: str, root: Path, reading: Reading = AS_STORED
) -> tuple[tuple[str, ...], Structures, tuple[str, ...], Callable[[str], Found]]:
    """Of a dataset on disk the classes, the structures, the domains, and what looks for a domain."""
    if name == "masks":
        from trueup.data.datasets import masks

        classes, everything = masks.scan(root, reading)
        structures = {label: (k,) for k, label in enumerate(classes) if k}
        return classes, structures, tuple(everything), everything.__getitem__
    module = ON_DISK[name]
    scan: Callable[[str], Found] = cache(lambda domain: module.scan(root, domain))
    return module.CLASSES, module.STRUCTURES, module.DOMAINS, scan


def unread(name: str) -> Dataset:
    """A dataset on disk as if none of its cases were there."""
    module, empty = ON_DISK[name], Found(parts={"train": [], "test": []})
    return _dataset(name, module.CLASSES, module.STRUCTURES, module.DOMAINS, lambda domain: empty, USUAL[name])


def _embedded(name: str) -> Dataset:
    card, module = get_card(name), ON_DISK[name.removesuffix("-sim")]
    domains = phantoms.DOMAINS[name]
    return Dataset(
        name,
        card.class_names,
        tuple(USUAL[name]),
        cache(lambda domain: SliceDomain(domain, phantoms.cases(name, domain))),
        look=lambda: phantoms.VERSION,
        structures=module.STRUCTURES,
        domains=domains,
        learn_from=lambda targets: _sources(name, targets, domains, USUAL[name]),
    )


def _dataset(
    name: str,
    classes: tuple[str, ...],
    structures: Structures,
    domains: tuple[str, ...],
    scan: Callable[[str], Found],
    usual: Mapping[str, str],
) -> Dataset:
    def learn_from(targets: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{domain}:all" for domain in _sources(name, targets, domains, usual))

    return Dataset(
        name,
        classes,
        tuple(usual) or domains,
        cache(lambda domain: _part(domain, scan)),
        look=cache(lambda: _fingerprint(classes, domains, scan)),
        structures=structures,
        domains=domains,
        learn_from=learn_from,
    )


def _part(name: str, scan: Callable[[str], Found]) -> SliceDomain:
    domain, _, part = name.partition(":")
    found = scan(domain)
    try:
        return SliceDomain(name, found.part(part or ("test" if "test" in found.parts else "all")))
    except ValueError as error:
        raise ValueError(f"{domain}: {error}") from None


def _sources(name: str, targets: Sequence[str], domains: Sequence[str], usual: Mapping[str, str]) -> tuple[str, ...]:
    """The usual source of all these targets; else all domains that are none of them."""
    bases = [target.partition(":")[0] for target in targets]
    together = {usual.get(base) for base in bases}
    if len(together) == 1 and (source := together.pop()) is not None and source not in bases:
        return (source,)
    rest = tuple(domain for domain in domains if domain not in bases)
    if not rest:
        raise ValueError(f"all domains of {name} are targets; leave at least one to train on")
    return rest


def _fingerprint(classes: Sequence[str], domains: Sequence[str], scan: Callable[[str], Found]) -> str:
    """A hash of the classes, the cases that are there and their files' sizes; a domain that is missing is empty."""
    digest = hashlib.sha256(repr(tuple(classes)).encode())
    for domain in domains:
        try:
            parts = scan(domain).parts
        except ValueError:
            parts = {}
        for part, cases in parts.items():
            for case in cases:
                sizes = [file.stat().st_size for file in case.files]
                digest.update(f"{domain}/{part}/{case.name}:{case.slices} {sizes}\n".encode())
    return digest.hexdigest()[:16]
