"""ImageNet-C: ROOT/corruption/severity/wnid/image, with or without the archives' own folders in between."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from trueup.data.corruptions import CORRUPTIONS
from trueup.data.datasets.folders import EXTENSIONS, digest
from trueup.data.domains import Domain, FileDomain, parse_corruption
from trueup.data.pictures import AS_STORED, Reading
from trueup.data.scanning import Scan, log_skipped

GROUPS = ("noise", "blur", "weather", "digital")


@cache
def class_names() -> tuple[str, ...]:
    """The 1,000 synsets in the order that trained networks know."""
    from timm.data.imagenet_info import ImageNetInfo

    return tuple(ImageNetInfo().label_names())  # type: ignore[no-untyped-call]


def domain(root: Path, which: str, reading: Reading = AS_STORED) -> Domain:
    """A corruption at a severity; the clean images are those networks were trained on and are not read."""
    if which == "clean":
        raise ValueError(
            "ImageNet-C is for networks trained on ImageNet already: take weights=imagenet and no training"
        )
    corruption, severity = parse_corruption(which)
    folder = find(root, corruption) / str(severity)
    if not folder.is_dir():
        raise ValueError(f"severity {severity} of {corruption} is missing: expected {corruption}/{severity}/wnid/image")
    number = {name: i for i, name in enumerate(class_names())}
    files, labels, scan = list[str](), list[int](), Scan(root)
    for synset in scan.inside(folder)[0]:
        if synset.name in number:
            inside = scan.inside(Path(synset.path))[1]
            names = [entry.name for entry in inside if Path(entry.name).suffix.lower() in EXTENSIONS]
            files += [f"{Path(synset.path).relative_to(root)}/{name}" for name in names]
            labels += [number[synset.name]] * len(names)
    log_skipped("imagenet-c", scan.skipped)
    if not files:
        raise ValueError(f"{corruption}/{severity} holds no folders of synsets such as n01440764 with images in them")
    return FileDomain(which, root, files, np.array(labels, dtype=np.int64), reading)


def others(root: Path, corruption: str) -> list[str]:
    """Files of a corruption's synset folders that are no images."""
    files = sorted(find(root, corruption).glob("[1-5]/*/*"))
    return [str(f.relative_to(root)) for f in files if f.suffix.lower() not in EXTENSIONS and f.name[0] != "."]


def find(root: Path, corruption: str) -> Path:
    """The folder of a corruption, at the root or in the archive's group."""
    for folder in (root / corruption, *(root / group / corruption for group in GROUPS)):
        if folder.is_dir():
            return folder
    raise ValueError(f"{corruption} is missing: expected ROOT/{corruption}/severity/wnid/image")


def fingerprint(root: Path) -> str:
    """A short hash of the first synset's files in each corruption and severity: names and sizes."""
    lines = []
    for corruption in CORRUPTIONS:
        with suppress(ValueError):
            for severity in sorted(folder for folder in find(root, corruption).iterdir() if folder.is_dir()):
                synset = min((s for s in severity.iterdir() if s.is_dir()), default=severity)
                files = sorted(f for f in synset.iterdir() if f.exists())
                lines += [f"{corruption} {severity.name} {synset.name} {f.name} {f.stat().st_size}" for f in files]
    return digest(lines)
