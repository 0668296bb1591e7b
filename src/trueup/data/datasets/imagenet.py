"""ImageNet-C: ROOT/corruption/severity/wnid/image, with or without the archives' group folders."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from trueup.data.corruptions import CORRUPTIONS
from trueup.data.datasets.folders import EXTENSIONS, short_hash
from trueup.data.domains import Domain, FileDomain, parse_corruption
from trueup.data.pictures import AS_STORED, Reading
from trueup.data.scanning import FolderScan, log_skipped

GROUPS = ("noise", "blur", "weather", "digital")


@cache
def imagenet_class_names() -> tuple[str, ...]:
    """Return the 1,000 synsets in the order of pretrained networks."""
    from timm.data.imagenet_info import ImageNetInfo

    return tuple(ImageNetInfo().label_names())  # type: ignore[no-untyped-call]


def imagenet_domain(root: Path, which: str, reading: Reading = AS_STORED) -> Domain:
    """Return a corruption at a severity; the clean images are not read, because networks come pretrained."""
    if which == "clean":
        raise ValueError("ImageNet-C needs networks pretrained on ImageNet: use weights=imagenet, without training")
    corruption, severity = parse_corruption(which)
    folder = corruption_folder(root, corruption) / str(severity)
    if not folder.is_dir():
        raise ValueError(f"severity {severity} of {corruption} is missing: expected {corruption}/{severity}/wnid/image")
    number = {name: i for i, name in enumerate(imagenet_class_names())}
    files, labels, scan = list[str](), list[int](), FolderScan(root)
    for synset in scan.list_folder(folder)[0]:
        if synset.name in number:
            inside = scan.list_folder(Path(synset.path))[1]
            names = [entry.name for entry in inside if Path(entry.name).suffix.lower() in EXTENSIONS]
            files += [f"{Path(synset.path).relative_to(root)}/{name}" for name in names]
            labels += [number[synset.name]] * len(names)
    log_skipped("imagenet-c", scan.skipped)
    if not files:
        raise ValueError(f"{corruption}/{severity} holds no synset folders such as n01440764 with images")
    return FileDomain(which, root, files, np.array(labels, dtype=np.int64), reading)


def non_image_files(root: Path, corruption: str) -> list[str]:
    """Return the files in a corruption's synset folders that are not images."""
    files = sorted(corruption_folder(root, corruption).glob("[1-5]/*/*"))
    return [str(f.relative_to(root)) for f in files if f.suffix.lower() not in EXTENSIONS and f.name[0] != "."]


def corruption_folder(root: Path, corruption: str) -> Path:
    """Return the folder of a corruption, at the root or in its group folder."""
    for folder in (root / corruption, *(root / group / corruption for group in GROUPS)):
        if folder.is_dir():
            return folder
    raise ValueError(f"{corruption} is missing: expected ROOT/{corruption}/severity/wnid/image")


def imagenet_fingerprint(root: Path) -> str:
    """Return a short hash of the names and sizes of the first synset's files in each corruption and severity."""
    lines = []
    for corruption in CORRUPTIONS:
        with suppress(ValueError):
            for severity in sorted(
                folder for folder in corruption_folder(root, corruption).iterdir() if folder.is_dir()
            ):
                synset = min((s for s in severity.iterdir() if s.is_dir()), default=severity)
                files = sorted(f for f in synset.iterdir() if f.exists())
                lines += [f"{corruption} {severity.name} {synset.name} {f.name} {f.stat().st_size}" for f in files]
    return short_hash(lines)
