"""Datasets by name: `open_dataset("pacs", root)`; "folder" for your domain/class/image, "masks" for your masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from trueup.data.cards import CARDS, OWN, get_card
from trueup.data.corruptions import CORRUPTIONS
from trueup.data.datasets import cifar, digits, folders, imagenet
from trueup.data.domains import CorruptedDomain, Domain, parse_corruption
from trueup.data.pictures import AS_STORED, Reading


@dataclass(frozen=True)
class Dataset:
    """Named domains over the same classes."""

    name: str
    classes: tuple[str, ...]
    targets: tuple[str, ...]  # the domains to adapt to, in their usual order
    open: Callable[[str], Domain]
    clean: str | None = None  # the domain to train on; None: all domains except the targets
    compute_fingerprint: Callable[[], str] = str  # returns the value of `fingerprint`
    structures: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For masks: the classes of each scored structure."""
    domains: tuple[str, ...] = ()  # all domains, if there are more than the usual targets
    choose_sources: Callable[[Sequence[str]], tuple[str, ...]] | None = None
    """Returns the domains to train on for given targets; None: all others."""
    left_out: Callable[[], Mapping[str, str]] = dict
    """Returns the entries below its root that were skipped, with reasons."""

    @property
    def task(self) -> str:
        """Return "segmentation" or "classification"."""
        return "segmentation" if self.structures else "classification"

    def outputs(self, *, multilabel: bool = False) -> int:
        """Return the number of outputs of a network: one per class, or one per structure."""
        return len(self.structures) if multilabel else len(self.classes)

    @cached_property
    def fingerprint(self) -> str:
        """Return a short hash that distinguishes other data under the same name."""
        return self.compute_fingerprint()

    def domain(self, name: str) -> Domain:
        """Return a domain by its name."""
        there = self.domains or self.targets
        if self.clean is None and (name.partition(":")[0] if self.structures else name) not in there:
            raise ValueError(f"{self.name} has no domain {name!r}; there are: {', '.join(there)}")
        return self.open(name)

    def sources(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Return the domains to train on for these targets."""
        if self.clean is not None:
            return (self.clean,)
        if self.choose_sources is not None:
            return self.choose_sources(targets)
        rest = tuple(name for name in self.targets if name not in targets)
        if not rest:
            raise ValueError(f"all domains of {self.name} are targets; leave at least one to train on")
        return rest


def open_dataset(name: str, root: str | Path | None = None, reading: Reading = AS_STORED) -> Dataset:
    """Open a dataset below `root`; only names are read now. The default range of `reading` is that of its card."""
    from trueup.data.datasets.mask_datasets import open_mask_dataset

    kind = name if name in OWN else get_card(name).kind
    reading = check_reading(name, reading)
    if name.startswith("digits"):
        return _digits(name)
    if kind == "embedded":
        return open_mask_dataset(name, None)
    if root is None:
        raise ValueError(f"{name} is not embedded: give its folder with root= or --root")
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder")
    if kind == "masks":
        return open_mask_dataset(name, root, reading)
    if kind == "corruptions":
        return _corrupted(name, root, reading)
    tree = folders.scan_image_folder(root, CARDS.get(name), reading)
    fingerprint, left_out = tree.fingerprint, lambda: tree.skipped
    return Dataset(name, tree.classes, tuple(tree.domains), tree.domain, None, fingerprint, left_out=left_out)


def dataset_from_card(name: str) -> Dataset:
    """Return a dataset as its card describes it, without files, for plans. Its domains cannot be read."""
    card = get_card(name)
    if card.kind == "embedded":
        return open_dataset(name)
    if card.kind == "masks":
        from trueup.data.datasets.mask_datasets import open_mask_dataset

        return open_mask_dataset(name, None)
    classes = card.class_names or tuple(map(str, range(card.classes)))
    return Dataset(name, classes, tuple(card.domains), _missing, "clean" if card.kind == "corruptions" else None)


def _missing(name: str) -> Domain:
    raise ValueError(f"{name} cannot be read: its dataset was made from a card")


def check_reading(name: str, reading: Reading) -> Reading:
    """Return reading options with the range of the dataset's card by default; refuse those without effect on it."""
    asked = [f"{key}={value}" for key, value in asdict(reading).items() if value is not None]
    kind = CARDS[name].kind if name in CARDS else ""
    if asked and (name.startswith("cifar") or kind in ("embedded", "masks")):
        why = "has its own reader" if kind == "masks" else "is not read from picture files"
        raise ValueError(f"{asked[0]} has no effect on {name}, which {why}; leave it out")
    return replace(reading, range=CARDS[name].range) if name in CARDS and reading.range is None else reading


def _corrupted(name: str, root: Path, reading: Reading) -> Dataset:
    if name == "imagenet-c":
        names, domain = imagenet.imagenet_class_names(), partial(imagenet.imagenet_domain, root, reading=reading)
        return Dataset(name, names, CORRUPTIONS, domain, "clean", partial(imagenet.imagenet_fingerprint, root))
    names, domain = cifar.cifar_class_names(name, root), partial(cifar.cifar_domain, name, root)
    return Dataset(name, names, CORRUPTIONS, domain, "clean", partial(cifar.cifar_fingerprint, root))


def _digits(name: str) -> Dataset:
    def corrupted(domain: str) -> Domain:
        if domain == "clean":
            return digits.clean_digits("train")
        return CorruptedDomain(digits.clean_digits("test"), *parse_corruption(domain))

    plain, classes = name == "digits", get_card(name).class_names
    targets, open_domain = (digits.DOMAINS, digits.digits_domain) if plain else (CORRUPTIONS, corrupted)
    return Dataset(name, classes, targets, open_domain, None if plain else "clean", lambda: digits.VERSION)
