"""Streams have the property they are named for, measured on the labels and domains in their order."""

from collections import Counter
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trueup.data import streams

Array = NDArray[np.int64]
CLASSES, EACH = 10, 60
LABELS = np.tile(np.arange(CLASSES), EACH)  # so that neighbours differ before anything is shuffled
ONE = np.zeros_like(LABELS)
THREE = np.random.default_rng(7).permutation(np.repeat([0, 1, 2], len(LABELS) // 3))  # unlike the labels' pattern
NAMES = list(streams.STREAMS)
SEVERAL = [name for name in NAMES if name != "iid"]  # iid takes one domain
WHOLE = [name for name in SEVERAL if name not in streams.SUBSAMPLING]  # the others leave images out


def runs(values: Array) -> list[tuple[int, int]]:
    """Values and lengths of the runs of equal neighbours, one by one."""
    return [(int(value), len(list(group))) for value, group in groupby(values.tolist())]


def same(labels: Array) -> float:
    """The fraction of neighbours with the same label."""
    return sum(a == b for a, b in pairwise(labels.tolist())) / (len(labels) - 1)


@st.composite
def images(draw: st.DrawFn) -> tuple[Array, Array]:
    n = draw(st.integers(1, 40))
    labels = draw(st.lists(st.integers(0, 5) | st.just(2**40), min_size=n, max_size=n))
    domains = draw(st.lists(st.integers(0, 3) | st.just(2**40), min_size=n, max_size=n))
    return np.array(labels), np.array(domains)


SEEDS = st.integers(0, 2**70)


@settings(deadline=None, max_examples=50)
@given(data=images(), seed=SEEDS)
def test_every_image_comes_once(data: tuple[Array, Array], seed: int) -> None:
    labels, domains = data
    before = labels.copy(), domains.copy()
    for name in SEVERAL:
        order = streams.order(name, labels, domains, seed)
        assert order.dtype == np.int64
        seen = Counter(order.tolist())
        assert set(seen.values()) == {1}
        assert (
            set(seen) <= set(range(len(labels)))
            if name in streams.SUBSAMPLING
            else set(seen) == set(range(len(labels)))
        )
    assert sorted(streams.iid(labels, np.zeros_like(domains), seed)) == list(range(len(labels)))
    assert np.array_equal(labels, before[0])
    assert np.array_equal(domains, before[1])


@settings(deadline=None, max_examples=50)
@given(data=images(), seed=SEEDS, concentration=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 1e6]), slots=st.integers(1, 50))
def test_every_image_comes_once_in_any_slots(
    data: tuple[Array, Array], seed: int, concentration: float, slots: int
) -> None:
    order = streams.dirichlet(*data, seed, concentration=concentration, slots=slots)
    assert sorted(order) == list(range(len(data[0])))
    for _, size in runs(data[1][order]):  # at most one run of a class in a slot
        assert len(runs(data[0][order[:size]])) <= slots * len(set(data[0][order[:size]].tolist()))
        order = order[size:]


@settings(deadline=None, max_examples=50)
@given(data=images(), seed=SEEDS, name=st.sampled_from([n for n in SEVERAL if n != "mixed"]))
def test_a_domain_does_not_feel_the_others(data: tuple[Array, Array], seed: int, name: str) -> None:
    labels, domains = data
    order = streams.order(name, labels, domains, seed)
    for domain in set(domains.tolist()):
        mine = np.array([i for i in range(len(labels)) if domains[i] == domain])
        alone = mine[streams.order(name, labels[mine], domains[mine], seed)]
        assert [i for i in order.tolist() if domains[i] == domain] == alone.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_decides(name: str) -> None:
    state = np.random.get_state()
    order = streams.order(name, LABELS, ONE, 0)
    np.random.seed(1)
    middle = np.random.get_state()
    assert np.array_equal(order, streams.order(name, LABELS, ONE, 0))
    assert np.array_equal(order, streams.order(name, LABELS.tolist(), ONE.astype(np.uint8), np.int64(0)))
    assert all(np.array_equal(a, b) for a, b in zip(middle, np.random.get_state(), strict=True))
    np.random.set_state(state)
    for other in (1, 2**32, 2**64):
        assert not np.array_equal(order, streams.order(name, LABELS, ONE, other))


def test_seeds_and_domains_do_not_collide() -> None:
    """As words of 32 bits, seed 2**32 in domain 0 and seed 0 in domain 1 are alike."""
    assert not np.array_equal(streams.iid(LABELS, ONE, 2**32), streams.iid(LABELS, ONE + 1, 0))
    first = streams.continual(np.r_[LABELS, LABELS], np.r_[ONE, ONE + 1], 0)
    assert not np.array_equal(first[: len(LABELS)], first[len(LABELS) :] - len(LABELS))


def test_iid_neighbours_are_independent() -> None:
    """A neighbour is one of n-1 others, EACH-1 of them of the same class."""
    expected = (EACH - 1) / (len(LABELS) - 1)
    measured = [same(LABELS[streams.iid(LABELS, ONE, seed)]) for seed in range(50)]
    assert np.mean(measured) == pytest.approx(expected, abs=0.007)  # three standard errors are 0.005


def test_dirichlet_correlates_the_more_the_lower_the_concentration() -> None:
    def mean(concentration: float) -> float:
        orders = [streams.dirichlet(LABELS, ONE, seed, concentration=concentration) for seed in range(20)]
        return float(np.mean([same(LABELS[order]) for order in orders]))

    measured = [mean(concentration) for concentration in (100.0, 1.0, 0.1, 0.01, 1e-6)]
    assert measured[0] > 0.5  # iid: 0.1
    assert all(b > a + 0.005 for a, b in pairwise(measured)), measured
    assert measured[-1] == pytest.approx(1 - (CLASSES - 1) / (len(LABELS) - 1), abs=1e-3)  # a class has one slot


@pytest.mark.parametrize("concentration", [1.0, 3.0, 10.0])
def test_dirichlet_shares_of_slots_have_the_right_spread(concentration: float) -> None:
    """With two slots, a class's share of the first is Beta(a, a): its mean 1/2, its variance 1 / (4 (2a + 1))."""
    labels, shares = np.arange(400) % 2, []
    for seed in range(600):
        order = streams.dirichlet(labels, labels * 0, seed, concentration=concentration, slots=2)
        blocks = runs(labels[order])
        if len(blocks) == 4:  # in about half of the draws, two runs of one class meet and cannot be told apart
            shares += [size / 200 for _, size in blocks[:2]]
    assert len(shares) > 400
    assert np.mean(shares) == pytest.approx(0.5, abs=0.04)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * concentration + 1)), rel=0.2)


def test_slots() -> None:
    """One slot is class-sorted; many equal ones give a run of every class in each; default: as many as classes."""
    assert len(runs(LABELS[streams.dirichlet(LABELS, ONE, 0, slots=1)])) == CLASSES
    order = streams.dirichlet(LABELS, ONE, 0, concentration=1e6, slots=6)
    for batch in streams.batches(order, CLASSES * EACH // 6):
        assert sorted(runs(LABELS[batch])) == [(k, EACH // 6) for k in range(CLASSES)]
    default = streams.dirichlet(LABELS, ONE, 0)
    assert np.array_equal(default, streams.dirichlet(LABELS, ONE, 0, slots=CLASSES, concentration=0.1))
    many = np.arange(300) % 150
    assert np.array_equal(streams.dirichlet(many, many * 0, 0), streams.dirichlet(many, many * 0, 0, slots=100))


def test_cases_shuffles_patients_and_leaves_their_slices_as_they_lie() -> None:
    """Patients of one to ten slices, some of two scans that lie apart."""
    patients = np.concatenate([np.repeat(np.arange(10), np.arange(10) + 1), [3, 3, 7]])
    orders = [streams.cases(patients, np.zeros_like(patients), seed) for seed in range(20)]
    for order in orders:
        assert len(runs(patients[order])) == 10
        for patient in range(10):
            own = [i for i in order.tolist() if patients[i] == patient]
            assert own == sorted(own)
    firsts = Counter(int(patients[order[0]]) for order in orders)
    assert len(firsts) > 5


def test_class_sorted_changes_class_as_rarely_as_can_be() -> None:
    labels = LABELS[streams.class_sorted(LABELS, THREE, 0)]
    sequences = []
    for part in np.split(labels, 3):
        blocks = runs(part)
        assert len(blocks) - 1 == CLASSES - 1
        sequences.append([value for value, _ in blocks])
    assert sequences[0] != sorted(sequences[0])
    assert sequences[0] != sequences[1]
    order = streams.class_sorted(LABELS, ONE, 0)
    assert order[:EACH].tolist() != sorted(order[:EACH].tolist())  # the images of a class are shuffled too


@pytest.mark.parametrize("name", ["continual", "dirichlet", "class-sorted", "cases", *streams.SUBSAMPLING])
def test_domains_come_in_the_order_of_their_numbers(name: str) -> None:
    domains = np.array([5, 0, 11])[THREE]  # in the order of the images, 5 may come first
    order = streams.order(name, LABELS, domains, 0)
    assert [value for value, _ in runs(domains[order])] == [0, 5, 11]


def test_continual_is_shuffled_within_a_domain() -> None:
    order = streams.continual(LABELS, THREE, 0)
    for part in np.split(order, 3):
        assert abs(np.corrcoef(part, np.arange(len(part)))[0, 1]) < 0.3
    assert same(LABELS[order]) < 0.2


def test_gradual_goes_up_and_down() -> None:
    rng = np.random.default_rng(0)
    domains = rng.permutation(np.repeat([0, 1, 2, 3], [101, 100, 7, 30]))
    order = streams.gradual(domains * 0, domains, 0)
    assert runs(domains[order]) == [(0, 51), (1, 50), (2, 4), (3, 30), (2, 3), (1, 50), (0, 50)]
    up, down = order[:51], order[-50:]
    assert abs(np.mean(up) - np.mean(down)) < 45  # both ways see early and late images: indices go to 237
    assert runs(np.array([0, 1, 1])[streams.gradual([0, 0, 0], [0, 1, 1], 0)]) == [(0, 1), (1, 2)]


def test_mixed_spreads_every_domain() -> None:
    domains = THREE[streams.mixed(LABELS, THREE, 0)]
    for domain in (0, 1, 2):
        in_first_half = np.mean(np.flatnonzero(domains == domain) < len(domains) / 2)
        assert in_first_half == pytest.approx(0.5, abs=0.12)  # 200 images: a standard error of 0.03
    assert same(domains) == pytest.approx(1 / 3, abs=0.08)


@pytest.mark.parametrize("imbalance", [1.0, 2, 10.0, 50.0])
def test_label_shift_is_geometric(imbalance: float) -> None:
    order = streams.label_shift(LABELS, ONE, 0, imbalance=imbalance)
    kept = sorted(Counter(LABELS[order].tolist()).values(), reverse=True)
    target = [EACH * imbalance ** (-r / (CLASSES - 1)) for r in range(CLASSES)]
    assert kept == pytest.approx(target, abs=0.51)
    assert kept[0] == EACH  # as many as there are
    assert same(LABELS[order]) < 0.4


def test_label_shift_with_classes_of_unequal_size() -> None:
    labels = np.repeat(np.arange(5), [40, 200, 90, 60, 120])
    for seed in range(20):
        kept = Counter(labels[streams.label_shift(labels, labels * 0, seed, imbalance=8)].tolist())
        sizes = sorted(kept.values(), reverse=True)
        assert sizes == pytest.approx([sizes[0] * 8 ** (-r / 4) for r in range(5)], abs=0.8)
        assert any(kept[k] == n for k, n in enumerate([40, 200, 90, 60, 120]))  # no larger stream would fit


def test_label_shift_spreads_rare_and_frequent_classes_over_the_whole_stream() -> None:
    for rank in (0, -1):
        places: list[float] = []
        for seed in range(60):
            labels = LABELS[streams.label_shift(LABELS, ONE, seed)]
            chosen = Counter(labels.tolist()).most_common()[rank][0]
            places += (np.flatnonzero(labels == chosen) / (len(labels) - 1)).tolist()
        assert np.mean(places) == pytest.approx(0.5, abs=0.05)  # at least 360 places: a standard error of 0.015
        assert np.var(places) == pytest.approx(1 / 12, rel=0.2)


def test_label_shift_keeps_one_of_each_and_the_same_ranks_in_every_domain() -> None:
    assert sorted(Counter(LABELS[streams.label_shift(LABELS, ONE, 0, imbalance=1e6)].tolist()).values())[:3] == [1] * 3
    labels, domains = np.tile(LABELS, 2), np.repeat([0, 1], len(LABELS))
    order = streams.label_shift(labels, domains, 0)
    first, second = np.split(labels[order], 2)
    assert Counter(first.tolist()) == Counter(second.tolist())
    heads = {Counter(LABELS[streams.label_shift(LABELS, ONE, s)].tolist()).most_common(1)[0][0] for s in range(30)}
    assert len(heads) > 5  # the seed says which class is frequent


@pytest.mark.parametrize("classes", [1, 3, 10, 40])
def test_few_classes_has_all_images_of_the_same_classes_in_every_domain(classes: int) -> None:
    order = streams.few_classes(LABELS, THREE, 0, classes=classes)
    chosen = set(LABELS[order].tolist())
    assert len(chosen) == min(classes, CLASSES)
    assert sorted(order.tolist()) == [i for i, label in enumerate(LABELS.tolist()) if label in chosen]
    for domain in range(3):
        assert set(LABELS[order[THREE[order] == domain]].tolist()) == chosen


def test_few_classes_are_drawn_by_the_seed_and_shuffled() -> None:
    orders = [streams.few_classes(LABELS, ONE, seed) for seed in range(40)]
    drawn = Counter(label for order in orders for label in set(LABELS[order].tolist()))
    assert sorted(drawn) == list(range(CLASSES))
    assert max(drawn.values()) < 25  # 12 are expected, with a deviation of 3
    measured = [same(LABELS[order]) for order in orders]
    assert np.mean(measured) == pytest.approx((EACH - 1) / (3 * EACH - 1), abs=0.02)


@given(n=st.integers(0, 50), size=st.integers(1, 60))
def test_batches_cover_the_order(n: int, size: int) -> None:
    order = np.random.default_rng(0).permutation(n)
    parts = list(streams.batches(order, size))
    assert [i for part in parts for i in part.tolist()] == order.tolist()
    assert [len(part) for part in parts] == [size] * (n // size) + [n % size] * (n % size > 0)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_batches_of_no_size_are_refused_at_once(size: Any) -> None:
    with pytest.raises(ValueError, match=r"size=.* at least 1"):
        streams.batches(np.arange(3), size)


@pytest.mark.parametrize("name", WHOLE)
def test_one_image_is_a_stream(name: str) -> None:
    assert streams.order(name, [3], [9], 0).tolist() == [0]


def test_iid_names_the_ways_out() -> None:
    with pytest.raises(ValueError, match=r"got 3 \(0, 1, 2\).*'continual'.*'mixed'"):
        streams.order("iid", LABELS, THREE, 0)
    with pytest.raises(ValueError, match=r"got 600 \(0, 1, 2, 3, 4, \.\.\.\)"):
        streams.iid(LABELS, np.arange(600), 0)
    assert sorted(streams.iid(LABELS, ONE + 4, 0)) == list(range(len(LABELS)))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("class_sorted", {}, r"'class_sorted'; did you mean 'class-sorted'\? There are: iid, dirichlet, class-sorted"),
        ("zzz", {}, r"'zzz'\. There are: iid"),
        ("dirichlet", {"slot": 3}, r"no option 'slot'; did you mean 'slots'\? It has: concentration, slots"),
        ("mixed", {"slots": 3}, r"'mixed' has no option 'slots'\. It has none"),
        ("mixed", {"labels_": 3}, r"'mixed' has no option 'labels_'"),
        ("dirichlet", {"concentration": 0}, r"concentration=0 must lie between"),
        ("dirichlet", {"concentration": float("nan")}, r"concentration=nan must"),
        ("dirichlet", {"concentration": float("inf")}, r"concentration=inf must"),
        ("dirichlet", {"concentration": "low"}, r"concentration='low' must"),
        ("dirichlet", {"slots": 0}, r"slots=0 must be a whole number of at least 1: use None"),
        ("dirichlet", {"slots": 2.5}, r"slots=2\.5 must"),
        ("label-shift", {"imbalance": 0.5}, r"imbalance=0\.5 must lie between 1"),
        ("label-shift", {"imbalance": float("inf")}, r"imbalance=inf must"),
        ("label-shift", {"imbalance": True}, r"imbalance=True must"),
        ("few-classes", {"classes": 0}, r"classes=0 must be a whole number of at least 1"),
        ("few-classes", {"class": 2}, r"no option 'class'; did you mean 'classes'"),
    ],
)
def test_names_and_options_are_checked(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        streams.order(name, LABELS, ONE, 0, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("labels", "domains", "seed", "words"),
    [
        ([], [], 0, r"has shape \(0,\): give a 1-d array"),
        ([[0, 1]], [0, 0], 0, r"labels has shape \(1, 2\)"),
        (0, 0, 0, r"has shape \(\)"),
        ([0, 1], [0], 0, r"2 labels and 1 domains: give one of each"),
        ([0.0, 1.0], [0, 0], 0, r"labels has dtype float64: give whole numbers"),
        ([0, 1], [False, True], 0, r"domains has dtype bool"),
        (["a", "b"], [0, 0], 0, r"labels has dtype <U1"),
        ([0, -1], [0, 0], 0, r"labels contains -1: number them from 0"),
        ([0, 1], [-3, -3], 0, r"domains contains -3"),
        ([0, 1], [0, 0], -1, r"seed=-1 must be a whole number of at least 0"),
        ([0, 1], [0, 0], None, r"seed=None must"),
        ([0, 1], [0, 0], 0.0, r"seed=0\.0 must"),
    ],
)
def test_inputs_are_checked(name: str, labels: Any, domains: Any, seed: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        streams.order(name, labels, domains, seed)
