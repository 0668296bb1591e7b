"""Datasets of images with masks: their usual sources and targets, and the parts of their domains.

A domain's name may select a part: "promise12:train", "promise12:test", "promise12:all". Without one, a target means its
test part, if it has one. Models are trained on all cases of their sources, except those that training holds out itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from trueup.data.datasets import Dataset, cardiac, fundus, phantoms, prostate
from trueup.data.datasets.file_matching import FoundCases
from trueup.data.datasets.mask_folders import scan_mask_folder
from trueup.data.pictures import AS_STORED, Reading
from trueup.data.scanning import find_skipped
from trueup.data.slices import SliceDomain

ON_DISK: dict[str, ModuleType] = {"fundus": fundus, "cardiac": cardiac, "prostate": prostate}
FINDERS: dict[str, Callable[[Path, str], FoundCases]] = {
    "fundus": fundus.find_fundus_cases,
    "cardiac": cardiac.find_cardiac_cases,
    "prostate": prostate.find_prostate_cases,
}
NAMES = (*ON_DISK, *(f"{name}-sim" for name in ON_DISK), "masks")
Structures = Mapping[str, tuple[int, ...]]

# The usual targets, each with the domain that the paper trains on. Other directions are possible on request.
USUAL = {
    "fundus": {"drishti-gs": "refuge", "rim-one-r3": "refuge"},
    "cardiac": {"lge": "acdc"},
    "prostate": {"promise12": "msd05"},  # as in the paper's table; its text says the reverse
    "fundus-sim": {"screening": "clinic", "handheld": "clinic"},
    "cardiac-sim": {"lge": "cine"},
    "prostate-sim": {"endorectal": "body-coil"},
}


class MaskSource(NamedTuple):
    """The classes, structures and domains of a dataset, and a function that finds a domain's cases."""

    classes: tuple[str, ...]
    structures: Structures
    domains: tuple[str, ...]
    find: Callable[[str], FoundCases]


def mask_source(name: str, root: Path | None, reading: Reading = AS_STORED) -> MaskSource:
    """Return a dataset's classes, structures, domains and finder; those on disk have no cases without a root."""
    if name == "masks":
        assert root is not None
        classes, found = scan_mask_folder(root, reading)
        return MaskSource(classes, {c: (k,) for k, c in enumerate(classes) if k}, tuple(found), found.__getitem__)
    module = ON_DISK[name.removesuffix("-sim")]

    def find(domain: str) -> FoundCases:
        if name not in ON_DISK:
            return FoundCases({"": phantoms.phantom_cases(name, domain)})
        return FoundCases({"train": [], "test": []}) if root is None else FINDERS[name](root, domain)

    domains = module.DOMAINS if name in ON_DISK else phantoms.DOMAINS[name]
    return MaskSource(module.CLASSES, module.STRUCTURES, domains, cache(find))


def open_mask_dataset(name: str, root: Path | None, reading: Reading = AS_STORED) -> Dataset:
    """Open a dataset of images with masks; only names and headers are read now."""
    source, embedded = mask_source(name, root, reading), name.endswith("-sim")

    def open_domain(name: str) -> SliceDomain:
        domain, _, part = (name, "", "") if embedded else name.partition(":")
        found = source.find(domain)
        try:
            cases = found.cases if embedded else found.part(part or ("test" if "test" in found.parts else "all"))
            return SliceDomain(name, cases)
        except ValueError as error:
            raise ValueError(f"{domain}: {error}") from None

    def choose_sources(targets: Sequence[str]) -> tuple[str, ...]:
        return tuple(domain if embedded else f"{domain}:all" for domain in _sources(name, targets, source.domains))

    return Dataset(
        name,
        source.classes,
        tuple(USUAL.get(name, ())) or source.domains,
        cache(open_domain),
        compute_fingerprint=cache(lambda: phantoms.VERSION if embedded else _fingerprint(source)),
        structures=source.structures,
        domains=source.domains,
        choose_sources=choose_sources,
        left_out=lambda: {} if root is None else find_skipped(root),
    )


def _sources(name: str, targets: Sequence[str], domains: Sequence[str]) -> tuple[str, ...]:
    """Return the usual source of these targets; else all other domains."""
    bases = [target.partition(":")[0] for target in targets]
    together = {USUAL.get(name, {}).get(base) for base in bases}
    if len(together) == 1 and (source := together.pop()) is not None and source not in bases:
        return (source,)
    rest = tuple(domain for domain in domains if domain not in bases)
    if not rest:
        raise ValueError(f"all domains of {name} are targets; leave at least one to train on")
    return rest


def _fingerprint(source: MaskSource) -> str:
    """Return a hash of the classes, the found cases and their files' sizes; a missing domain counts as empty."""
    digest = hashlib.sha256(repr(tuple(source.classes)).encode())
    for domain in source.domains:
        try:
            parts = source.find(domain).parts
        except ValueError:
            parts = {}
        for part, cases in parts.items():
            for case in cases:
                sizes = [file.stat().st_size for file in case.files]
                digest.update(f"{domain}/{part}/{case.name}:{case.slices} {sizes}\n".encode())
    return digest.hexdigest()[:16]
