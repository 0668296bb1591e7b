"""Datasets laid out as domain/class/image, with optional official list files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trueup.data.cards import Card
from trueup.data.domains import FileDomain
from trueup.data.pictures import AS_STORED, Reading
from trueup.data.scanning import FolderScan

EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"))


@dataclass
class ImageTree:
    """The content of a dataset folder: image files per domain, as (path below the root, class), and other files."""

    root: Path
    domains: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # files that a list names but that do not exist
    unknown: list[str] = field(default_factory=list)  # folders that are not domains of the card
    skipped: dict[str, str] = field(default_factory=dict)  # the reason for each entry that cannot be read
    reading: Reading = AS_STORED

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of all classes, in the order of their numbers."""
        return tuple(sorted({label for files in self.domains.values() for _, label in files}))

    def fingerprint(self) -> str:
        """Return a short hash of the names and sizes of all images."""
        paths = (path for files in self.domains.values() for path, _ in files)
        return short_hash(f"{path} {(self.root / path).stat().st_size}" for path in paths)

    def domain(self, name: str) -> FileDomain:
        """Return the images of one domain with their class numbers."""
        number = {label: i for i, label in enumerate(self.classes)}
        files = self.domains[name]
        labels = np.array([number[label] for _, label in files], dtype=np.int64)
        return FileDomain(name, self.root, [path for path, _ in files], labels, self.reading)


def scan_image_folder(root: Path, card: Card | None = None, reading: Reading = AS_STORED) -> ImageTree:
    """List the images below `root`; with a card only its domains, whose folders may differ in case and blanks."""
    scanner = FolderScan(root)
    tree = ImageTree(root, skipped=scanner.skipped, reading=reading)
    inside, beside = scanner.list_folder(root)
    folders = [entry.name for entry in inside]
    if card is None:
        wanted = {name: name for name in folders}
        if joined := [name for name in folders if "+" in name]:
            raise ValueError(f"rename the folder {joined[0]!r}: a + in a target joins several domains")
    else:
        found = {simple_name(name): name for name in folders}
        wanted = {name: found[simple_name(name)] for name in card.domains if simple_name(name) in found}
        tree.unknown = [name for name in folders if name not in wanted.values()]
    for name, folder in wanted.items():
        lists = [Path(f.path) for f in beside if _is_list(f.name, folder)] if card is not None else []
        tree.domains[name] = sorted(_listed(tree, folder, lists) if lists else _walked(tree, folder, scanner))
    tree.domains = {name: files for name, files in tree.domains.items() if files or card is not None}
    if not any(tree.domains.values()):
        expected = (
            f"domains of {card.name} ({', '.join(card.domains)})" if card else "folders laid out as domain/class/image"
        )
        raise ValueError(f"{root} holds no {expected}; it holds: {', '.join(folders[:8]) or 'no folders'}")
    return tree


def short_hash(lines: Iterable[str]) -> str:
    """Return a short hash of lines."""
    return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:12]


def simple_name(name: str) -> str:
    """Return a name in lower case, with letters and digits only."""
    return "".join(c for c in name.lower() if c.isalnum())


def _is_list(name: str, folder: str) -> bool:
    """Return True for a list of a domain: art_painting_train_kfold.txt, clipart_test.txt, Art.txt in any case."""
    parts = Path(name).stem.split("_")
    starts = (simple_name("".join(parts[:n])) for n in range(1, len(parts) + 1))
    return name.endswith(".txt") and simple_name(folder) in starts


def _listed(tree: ImageTree, folder: str, lists: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield the listed images, each once. The folder is the class; the number after the path must agree."""
    numbers: dict[str, str] = {}
    seen: set[str] = set()
    for file in lists:
        for n, line in enumerate(file.read_text().splitlines(), 1):
            path, _, number = line.strip().rpartition(" ")
            path = Path(path).as_posix()
            if not line.strip() or path in seen:
                continue
            parts = Path(path).parts
            label = parts[-2] if len(parts) == 3 else ""
            # A file of another domain would leak target images into the sources.
            if not label or parts[0] != folder or ".." in parts or not number.isdecimal():
                raise ValueError(f"{file.name}, line {n}: expected `{folder}/class/image number`, not {line!r}")
            if numbers.setdefault(label, number) != number:
                raise ValueError(
                    f"{file.name}, line {n}: class {label} is number {number}, but was {numbers[label]} before"
                )
            seen.add(path)
            if (tree.root / path).is_file():
                yield path, label
            else:
                tree.missing.append(path)


def _walked(tree: ImageTree, folder: str, scanner: FolderScan) -> Iterator[tuple[str, str]]:
    """Yield the image files in a domain's class folders."""
    classes, loose = scanner.list_folder(tree.root / folder)
    tree.others += [f"{folder}/{entry.name}" for entry in loose]
    for entry in classes:
        inner, files = scanner.list_folder(Path(entry.path))
        tree.others += [f"{folder}/{entry.name}/{deeper.name}" for deeper in inner]
        for file in files:
            path = f"{folder}/{entry.name}/{file.name}"
            if Path(file.name).suffix.lower() in EXTENSIONS:
                yield path, entry.name
            else:
                tree.others.append(path)
