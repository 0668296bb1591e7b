"""Folders laid out as domain/class/image, and the official list files beside them."""

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
from trueup.data.scanning import Scan

EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"))


@dataclass
class Tree:
    """What lies in a folder: for each domain the image files as (path below the root, class), and what is no image."""

    root: Path
    domains: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Files that a list names and that are not there."""
    unknown: list[str] = field(default_factory=list)
    """Folders beside the domains that are none of the card's."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Entries that are neither a folder nor a file that can be read, and why."""
    reading: Reading = AS_STORED

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes, sorted, as their numbers are."""
        return tuple(sorted({label for files in self.domains.values() for _, label in files}))

    def fingerprint(self) -> str:
        """A short hash of the names and sizes of all images."""
        paths = (path for files in self.domains.values() for path, _ in files)
        return digest(f"{path} {(self.root / path).stat().st_size}" for path in paths)

    def domain(self, name: str) -> FileDomain:
        """The images of one domain with their class numbers."""
        number = {label: i for i, label in enumerate(self.classes)}
        files = self.domains[name]
        labels = np.array([number[label] for _, label in files], dtype=np.int64)
        return FileDomain(name, self.root, [path for path, _ in files], labels, self.reading)


def scan(root: Path, card: Card | None = None, reading: Reading = AS_STORED) -> Tree:
    """List the images below `root`. With a card only its domains count, whatever case and blanks their folders have."""
    scanner = Scan(root)
    tree = Tree(root, skipped=scanner.skipped, reading=reading)
    inside, beside = scanner.inside(root)
    folders = [entry.name for entry in inside]
    if card is None:
        wanted = {name: name for name in folders}
        if joined := [name for name in folders if "+" in name]:
            raise ValueError(f"rename the folder {joined[0]!r}: a + in a target's name joins several domains")
    else:
        found = {_plain(name): name for name in folders}
        wanted = {name: found[_plain(name)] for name in card.domains if _plain(name) in found}
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


def digest(lines: Iterable[str]) -> str:
    """A short hash of texts."""
    return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:12]


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _is_list(name: str, folder: str) -> bool:
    """Return True if a file is a list of a domain: art_painting_train_kfold.txt, clipart_test.txt, Art.txt.

    It has the domain's name, or starts with it and an underscore, whatever the case and blanks.
    """
    parts = Path(name).stem.split("_")
    return name.endswith(".txt") and any(_plain("".join(parts[:n])) == _plain(folder) for n in range(1, len(parts) + 1))


def _listed(tree: Tree, folder: str, lists: list[Path]) -> Iterator[tuple[str, str]]:
    """The images that the lists name, each once. The class is the folder; the number beside the path must agree."""
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
            # A file of another domain would let a target's images into its sources.
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


def _walked(tree: Tree, folder: str, scanner: Scan) -> Iterator[tuple[str, str]]:
    """The image files of a domain's class folders."""
    classes, loose = scanner.inside(tree.root / folder)
    tree.others += [f"{folder}/{entry.name}" for entry in loose]
    for entry in classes:
        inner, files = scanner.inside(Path(entry.path))
        tree.others += [f"{folder}/{entry.name}/{deeper.name}" for deeper in inner]
        for file in files:
            path = f"{folder}/{entry.name}/{file.name}"
            if Path(file.name).suffix.lower() in EXTENSIONS:
                yield path, entry.name
            else:
                tree.others.append(path)
