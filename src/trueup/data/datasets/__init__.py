"""Datasets by name: `open_dataset("pacs", root)`; "folder" for your own domain/class/image, "masks" for your masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from trueup.data.cards import CARDS, OWN, get_card
from trueup.data.corruptions import CORRUPTIONS
from trueup.data.domains import CorruptedDomain, Domain, parse_corruption
from trueup.data.pictures import AS_STORED, Reading


@dataclass(frozen=True)
class Dataset:
    """Named domains over the same classes."""

    name: str
    classes: tuple[str, ...]
    targets: tuple[str, ...]
    """The domains that a benchmark adapts to, in their usual order."""
    open: Callable[[str], Domain]
    clean: str | None = None
    """The domain that models are trained on; None: on all domains but the targets."""
    look: Callable[[], str] = str
    """Looks at the data and says what `fingerprint` is to be."""
    structures: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of masks: what is scored, each as the classes that it is made of."""
    domains: tuple[str, ...] = ()
    """All domains, if there are more than the usual targets."""
    learn_from: Callable[[Sequence[str]], tuple[str, ...]] | None = None
    """Says which domains to train on for given targets, if that is not all others."""
    left_out: Callable[[], Mapping[str, str]] = dict
    """Says what lies below its root and cannot be read, and why."""

    @property
    def task(self) -> str:
        """What is to be done with its images."""
        return "segmentation" if self.structures else "classification"

    def outputs(self, *, multilabel: bool = False) -> int:
        """How many outputs a network for it has: one for each class, or one for each structure."""
        return len(self.structures) if multilabel else len(self.classes)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash by which other data under the same name is told apart."""
        return self.look()

    def domain(self, name: str) -> Domain:
        """A domain by its name."""
        there = self.domains or self.targets
        if self.clean is None and (name.partition(":")[0] if self.structures else name) not in there:
            raise ValueError(f"{self.name} has no domain {name!r}; there are: {', '.join(there)}")
        return self.open(name)

    def sources(self, targets: Sequence[str]) -> tuple[str, ...]:
        """The domains to train on for these targets."""
        if self.clean is not None:
            return (self.clean,)
        if self.learn_from is not None:
            return self.learn_from(targets)
        rest = tuple(name for name in self.targets if name not in targets)
        if not rest:
            raise ValueError(f"all domains of {self.name} are targets; leave at least one to train on")
        return rest


def open_dataset(name: str, root: str | Path | None = None, reading: Reading = AS_STORED) -> Dataset:
    """A dataset, ready to be read; nothing but names is read now.

    root: the folder that holds its domains.
    reading: how its picture files are read; without a range, that of its card holds.
    """
    if name not in OWN:
        get_card(name)
    check_reading(name, reading)
    if name in CARDS and reading.range is None:
        reading = replace(reading, range=CARDS[name].range)
    if name.startswith("digits"):
        return _digits(name)
    if name.endswith("-sim"):
        return _masked(name, None)
    if root is None:
        raise ValueError(f"{name} is not embedded: say where it is with root= or --root")
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder")
    if name == "masks" or (name in CARDS and CARDS[name].kind == "masks"):
        return _masked(name, root, reading)
    if name in CARDS and CARDS[name].kind == "corruptions":
        return _corrupted(name, root, reading)
    from trueup.data.datasets import folders

    tree = folders.scan(root, None if name == "folder" else get_card(name), reading)
    return Dataset(
        name, tree.classes, tuple(tree.domains), tree.domain, look=tree.fingerprint, left_out=lambda: tree.skipped
    )


def on_paper(name: str) -> Dataset:
    """A dataset as its card describes it, without its files: for plans. Its domains hold nothing."""
    card = get_card(name)
    if card.kind == "embedded":
        return open_dataset(name)
    classes = card.class_names or tuple(map(str, range(card.classes)))
    if card.kind == "masks":
        from trueup.data.datasets.masked import unread

        return unread(name)
    return Dataset(name, classes, tuple(card.domains), _missing, "clean" if card.kind == "corruptions" else None)


def _missing(name: str) -> Domain:
    raise ValueError(f"{name} is on paper alone")


def check_reading(name: str, reading: Reading) -> None:
    """Refuse a way of reading pictures for a dataset that is not made of picture files, or has a way of its own."""
    asked = [f"{key}={value}" for key, value in asdict(reading).items() if value is not None]
    kind = CARDS[name].kind if name in CARDS else ""
    if asked and (name.startswith("cifar") or kind in ("embedded", "masks")):
        why = "reads its images in a way of its own" if kind == "masks" else "is not read from picture files"
        raise ValueError(f"{asked[0]} has no meaning for {name}, which {why}; leave it out")


def _masked(name: str, root: Path | None, reading: Reading = AS_STORED) -> Dataset:
    from trueup.data.datasets.masked import open_masked

    return open_masked(name, root, reading)


def _corrupted(name: str, root: Path, reading: Reading) -> Dataset:
    from trueup.data.datasets import cifar, imagenet

    if name == "imagenet-c":
        names, domain = imagenet.class_names(), partial(imagenet.domain, root, reading=reading)
        return Dataset(name, names, CORRUPTIONS, domain, "clean", partial(imagenet.fingerprint, root))
    names = cifar.class_names(name, root)
    return Dataset(
        name, names, CORRUPTIONS, partial(cifar.domain, name, root), "clean", partial(cifar.fingerprint, root)
    )


def _digits(name: str) -> Dataset:
    from trueup.data.datasets import digits

    card = get_card(name)
    if name == "digits":
        return Dataset(name, card.class_names, digits.DOMAINS, digits.domain, look=lambda: digits.VERSION)
    return Dataset(name, card.class_names, CORRUPTIONS, _corrupted_digits, "clean", lambda: digits.VERSION)


def _corrupted_digits(name: str) -> Domain:
    from trueup.data.datasets import digits

    if name == "clean":
        return digits.clean("train")
    return CorruptedDomain(digits.clean("test"), *parse_corruption(name))
