"""Folders laid out as domain/class/image, and the official list files beside them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trueup.data.cards import Card
from trueup.data.domains import FileDomain

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

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes, sorted, as their numbers are."""
        return tuple(sorted({label for files in self.domains.values() for _, label in files}))

    def fingerprint(self) -> str:
        """A short hash of the names of all images."""
        names = "\n".join(path for files in self.domains.values() for path, _ in files)
        return hashlib.sha256(names.encode()).hexdigest()[:12]

    def domain(self, name: str) -> FileDomain:
        """The images of one domain with their class numbers."""
        number = {label: i for i, label in enumerate(self.classes)}
        files = self.domains[name]
        labels = np.array([number[label] for _, label in files], dtype=np.int64)
        return FileDomain(name, self.root, [path for path, _ in files], labels)


def scan(root: Path, card: Card | None = None) -> Tree:
    """List the images below `root`. With a card only its domains count, whatever case and blanks their folders have."""
    tree = Tree(root)
    folders = sorted(f.name for f in os.scandir(root) if f.is_dir() and not f.name.startswith("."))
    if card is None:
        wanted = {name: name for name in folders}
    else:
        found = {_plain(name): name for name in folders}
        wanted = {name: found[_plain(name)] for name in card.domains if _plain(name) in found}
        tree.unknown = [name for name in folders if name not in wanted.values()]
    for name, folder in wanted.items():
        lists = _lists(root, folder) if card is not None else []
        tree.domains[name] = sorted(_listed(tree, lists) if lists else _walked(tree, folder))
    tree.domains = {name: files for name, files in tree.domains.items() if files or card is not None}
    if not any(tree.domains.values()):
        expected = (
            f"domains of {card.name} ({', '.join(card.domains)})" if card else "folders laid out as domain/class/image"
        )
        raise ValueError(f"{root} holds no {expected}; it holds: {', '.join(folders[:8]) or 'no folders'}")
    return tree


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _lists(root: Path, folder: str) -> list[Path]:
    """The list files of a domain: art_painting_train_kfold.txt, clipart_test.txt, Art.txt."""
    return sorted(f for f in root.glob("*.txt") if f.stem == folder or f.stem.startswith(f"{folder}_"))


def _listed(tree: Tree, lists: list[Path]) -> Iterator[tuple[str, str]]:
    """The images that the lists name, each once. The class is the folder; the number beside the path must agree."""
    numbers: dict[str, str] = {}
    seen: set[str] = set()
    for file in lists:
        for n, line in enumerate(file.read_text().splitlines(), 1):
            path, _, number = line.strip().rpartition(" ")
            if not line.strip() or path in seen:
                continue
            label = Path(path).parent.name
            if not path or Path(path).is_absolute() or ".." in Path(path).parts or not label:
                raise ValueError(f"{file.name}, line {n}: expected `domain/class/image number`, not {line!r}")
            if numbers.setdefault(label, number) != number:
                raise ValueError(
                    f"{file.name}, line {n}: class {label} is number {number}, but was {numbers[label]} before"
                )
            seen.add(path)
            if (tree.root / path).is_file():
                yield path, label
            else:
                tree.missing.append(path)


def _walked(tree: Tree, folder: str) -> Iterator[tuple[str, str]]:
    """The image files of a domain's class folders."""
    for entry in sorted(os.scandir(tree.root / folder), key=lambda e: e.name):
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            tree.others.append(f"{folder}/{entry.name}")
            continue
        for file in sorted(f.name for f in os.scandir(entry.path)):
            path = f"{folder}/{entry.name}/{file}"
            if Path(file).suffix.lower() in EXTENSIONS:
                yield path, entry.name
            elif not file.startswith("."):
                tree.others.append(path)
