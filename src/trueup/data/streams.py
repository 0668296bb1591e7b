"""Stream orders: pure functions from labels, domains and a seed to an order of indices.

Each domain has its own random stream, keyed by the seed and the domain's number, so its draws do not depend on other
domains. numpy's global random state is neither read nor written.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Order = NDArray[np.int64]


def iid(labels: ArrayLike, domains: ArrayLike, seed: int) -> Order:
    """Shuffle one domain; several domains are refused, because there are two ways to order them."""
    numbers = np.unique(_integers("domains", domains))
    if len(numbers) > 1:
        listed = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
        raise ValueError(
            f"iid takes one domain, got {len(numbers)} ({listed}): "
            "use 'continual' for one after another or 'mixed' for all together"
        )
    return continual(labels, domains, seed)


def dirichlet(
    labels: ArrayLike, domains: ArrayLike, seed: int, *, concentration: float = 0.1, slots: int | None = None
) -> Order:
    """Correlate labels in time: a Dirichlet draw spreads each class over slots; a slot holds one run per class.

    The lower the concentration, the longer the runs. By default a domain has as many slots as classes, but at most 100.
    """
    if not (_is_number(concentration) and 1e-6 <= concentration <= 1e6):
        raise ValueError(f"concentration={concentration!r} must lie between 1e-6 (long runs) and 1e6 (short runs)")
    if slots is not None:
        _whole("slots", slots, 1, "use None for one per class")

    def draw(y: Order, rng: np.random.Generator) -> Order:
        # Differs: RoTTA counts the classes of all domains and keeps the images of a class in file order;
        # NOTE also balances the sizes of the slots and redraws until each has ten images.
        shuffled = rng.permutation(len(y))
        classes, which = np.unique(y[shuffled], return_inverse=True)
        count = min(len(classes), 100) if slots is None else slots
        share = rng.dirichlet(np.full(count, float(concentration)), size=len(classes))
        turn = rng.random((count, len(classes)))  # the order of the classes in a slot
        slot = np.empty(len(y), dtype=np.int64)
        for k in range(len(classes)):
            members = np.flatnonzero(which == k)
            cuts = np.rint(np.cumsum(share[k])[:-1] * len(members))
            slot[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
        return shuffled[np.lexsort((turn[slot, which], slot))]

    return _within_domains(labels, domains, seed, draw)


def class_sorted(labels: ArrayLike, domains: ArrayLike, seed: int) -> Order:
    """Order each domain class after class; the seed shuffles the classes and the images of each."""

    def draw(y: Order, rng: np.random.Generator) -> Order:
        shuffled = rng.permutation(len(y))
        classes, which = np.unique(y[shuffled], return_inverse=True)
        return shuffled[np.argsort(rng.permutation(len(classes))[which], kind="stable")]

    return _within_domains(labels, domains, seed, draw)


def cases(labels: ArrayLike, domains: ArrayLike, seed: int) -> Order:
    """Order volumes patient after patient, at random; the slices of each keep their order."""

    def draw(y: Order, rng: np.random.Generator) -> Order:
        patients, which = np.unique(y, return_inverse=True)
        return np.argsort(rng.permutation(len(patients))[which], kind="stable")

    return _within_domains(labels, domains, seed, draw)


def continual(labels: ArrayLike, domains: ArrayLike, seed: int) -> Order:
    """Order domain after domain by number, shuffled within each."""
    return _within_domains(labels, domains, seed, lambda y, rng: rng.permutation(len(y)))


def gradual(labels: ArrayLike, domains: ArrayLike, seed: int) -> Order:
    """Take domains as severities 0, 1, ..., top, ..., 1, 0: half of each on the way up, half on the way down."""
    _, where = _checked(labels, domains, seed)
    *lower, top = [_generator(seed, d).permutation(ids) for d, ids in where.items()]
    halves = [np.split(ids, [(len(ids) + 1) // 2]) for ids in lower]
    return np.concatenate([*(up for up, _ in halves), top, *(down for _, down in reversed(halves))])


def mixed(labels: ArrayLike, domains: ArrayLike, seed: int) -> Order:
    """Shuffle all domains together."""
    y, _ = _checked(labels, domains, seed)
    return _generator(seed).permutation(len(y))


def label_shift(labels: ArrayLike, domains: ArrayLike, seed: int, *, imbalance: float = 10.0) -> Order:
    """Shuffle a long-tailed subset of each domain: the first class keeps `imbalance` times as many as the last.

    Sizes fall geometrically, as large as the images allow. The seed chooses the frequent classes, for all domains.
    """
    if not (_is_number(imbalance) and 1 <= imbalance <= 1e6):
        raise ValueError(f"imbalance={imbalance!r} must lie between 1 (balanced) and 1e6; 10 is a long tail")

    def draw(y: Order, rng: np.random.Generator) -> Order:
        shuffled = rng.permutation(len(y))
        classes, which, available = np.unique(y[shuffled], return_inverse=True, return_counts=True)
        # A key per class that depends only on seed and class makes the ranks agree between domains.
        rank = np.argsort(np.argsort([_generator(seed, 0, int(c)).random() for c in classes]))
        weight = float(imbalance) ** (-rank / max(len(classes) - 1, 1))
        target = np.maximum(np.rint(np.min(available / weight) * weight), 1)
        kept = [np.flatnonzero(which == k)[: int(target[k])] for k in range(len(classes))]
        # Shuffle again: in the order above, the few images of a rare class would all come early.
        return rng.permutation(shuffled[np.concatenate(kept)])

    return _within_domains(labels, domains, seed, draw)


def few_classes(labels: ArrayLike, domains: ArrayLike, seed: int, *, classes: int = 3) -> Order:
    """Shuffle the images of a few classes only; the seed chooses them: the same in every domain that has them."""
    _whole("classes", classes, 1, "the default is 3")

    def draw(y: Order, rng: np.random.Generator) -> Order:
        there = np.unique(y)
        kept = there[np.argsort([_generator(seed, 0, int(c)).random() for c in there])[:classes]]
        return rng.permutation(np.flatnonzero(np.isin(y, kept)))

    return _within_domains(labels, domains, seed, draw)


STREAMS: dict[str, Callable[..., Order]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "class-sorted": class_sorted,
    "cases": cases,
    "continual": continual,
    "gradual": gradual,
    "mixed": mixed,
    "label-shift": label_shift,
    "few-classes": few_classes,
}
SUBSAMPLING = ("label-shift", "few-classes")  # streams that leave images out; the rest is shuffled within each domain


def order(name: str, labels: ArrayLike, domains: ArrayLike, seed: int, **options: Any) -> Order:
    """Return the order of a stream by its name."""
    if name not in STREAMS:
        raise ValueError(f"no stream is called {name!r}{_near(name, STREAMS)} There are: {', '.join(STREAMS)}")
    parameters = inspect.signature(STREAMS[name]).parameters.values()
    allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for key in options:
        if key not in allowed:
            has = f"It has: {', '.join(allowed)}" if allowed else "It has none"
            raise ValueError(f"the stream {name!r} has no option {key!r}{_near(key, allowed)} {has}")
    return STREAMS[name](labels, domains, seed, **options)


def balanced_batches(order: Order, size: int) -> list[Order]:
    """Return consecutive batches of nearly equal size, at most `size`: no batch of one leftover slice."""
    _whole("size", size, 1, "a batch has at least one image")
    return np.array_split(order, -(-len(order) // size))


def batches(order: Order, size: int) -> Iterator[Order]:
    """Yield consecutive batches; the last may be smaller, and nothing is dropped."""
    _whole("size", size, 1, "a batch has at least one image")
    # Not a generator function: that would raise only at the first batch.
    return (order[start : start + size] for start in range(0, len(order), size))


def _within_domains(
    labels: ArrayLike, domains: ArrayLike, seed: int, draw: Callable[[Order, np.random.Generator], Order]
) -> Order:
    y, where = _checked(labels, domains, seed)
    return np.concatenate([ids[draw(y[ids], _generator(seed, d))] for d, ids in where.items()])


def _generator(seed: int, *key: int) -> np.random.Generator:
    # A spawn key, not [seed, domain]: such lists are flattened to 32-bit words, where long seeds collide.
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=key))


def _checked(labels: ArrayLike, domains: ArrayLike, seed: int) -> tuple[Order, dict[int, Order]]:
    """Return the labels, and for each domain, ordered by number, the indices of its images."""
    y, d = _integers("labels", labels), _integers("domains", domains)
    if len(y) != len(d):
        raise ValueError(f"there are {len(y)} labels and {len(d)} domains: give one of each for every image")
    _whole("seed", seed, 0, "any whole number from 0")
    by_domain = np.argsort(d, kind="stable")
    numbers, starts = np.unique(d[by_domain], return_index=True)
    return y, dict(zip(numbers.tolist(), np.split(by_domain, starts[1:]), strict=True))


def _integers(name: str, values: ArrayLike) -> Order:
    array = np.asarray(values)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(
            f"{name} has shape {array.shape}: give a 1-d array with one number for each image, at least one"
        )
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {array.dtype}: give whole numbers, for example with .astype(np.int64)")
    if array.min() < 0:
        raise ValueError(f"{name} contains {array.min()}: number them from 0 and leave out images without one")
    return array.astype(np.int64)


def _whole(name: str, value: Any, least: int, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}: {hint}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."
