"""The bank equals one that keeps all of history and looks at it anew each time."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trueup.memory import bank as memory
from trueup.memory import nearest
from trueup.memory.bank import Bank

CLASSES, DIM = 4, 3


class History:
    """Every entry ever offered, in order."""

    def __init__(self, per_class: int | None) -> None:
        self.per_class = per_class
        self.entries: list[tuple[int, Tensor, Tensor, int, float]] = []

    def insert(self, z: Tensor, q: Tensor, y: Tensor, h: Tensor) -> None:
        for each in zip(z, q, y.tolist(), h.tolist(), strict=True):
            self.entries.append((len(self.entries), *each))

    def kept(self) -> list[tuple[int, Tensor, Tensor, int, float]]:
        kept = []
        for k in range(CLASSES):
            members = sorted((e for e in self.entries if e[3] == k), key=lambda e: (e[4], e[0]))
            kept += members if self.per_class is None else members[: self.per_class]
        return kept


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Batches with many ties: few entropies, small whole-number features."""
    batches = []
    for _ in range(draw(st.integers(1, 6))):
        n = draw(st.integers(1, 12))
        z = draw(st.lists(st.lists(st.integers(-2, 2), min_size=DIM, max_size=DIM), min_size=n, max_size=n))
        y = draw(st.lists(st.integers(0, CLASSES - 1), min_size=n, max_size=n))
        h = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=n, max_size=n))
        q = torch.rand(n, CLASSES, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        batches.append((torch.tensor(z, dtype=torch.float64), q, torch.tensor(y), torch.tensor(h, dtype=torch.float64)))
    return batches


def stored(bank: Bank) -> list[int]:
    return sorted(bank.arrival[: bank.size].tolist())


@settings(max_examples=150, deadline=None)
@given(stream=streams(), per_class=st.sampled_from([1, 2, 5, 100, None]), unit=st.booleans())
def test_equals_the_whole_history(stream: list, per_class: int | None, unit: bool) -> None:
    bank, history = Bank(CLASSES, DIM, per_class, torch.zeros(0, dtype=torch.float64), unit=unit), History(per_class)
    for batch in stream:
        bank.insert(*batch)
        history.insert(*batch)
        kept = history.kept()
        assert stored(bank) == sorted(e[0] for e in kept)
        rows = {int(t): r for r, t in enumerate(bank.arrival[: bank.size])}
        for t, z, q, y, h in kept:
            r = rows[t]
            assert torch.equal(bank.features[r], z)
            assert torch.equal(bank.probs[r], q)
            assert (int(bank.labels[r]), float(bank.entropy[r])) == (y, h)
        for k in range(CLASSES):
            members = [z / max(float(z.norm()), 1e-12) if unit else z for _, z, _, y, _ in kept if y == k]
            expected = sum(members) / len(members) if members else torch.zeros(DIM, dtype=torch.float64)
            torch.testing.assert_close(bank.prototypes()[k], expected, rtol=1e-9, atol=1e-9)
            assert int(bank.counts[k]) == len(members)
        if per_class is not None:
            assert len(bank.labels) <= CLASSES * per_class
        assert len(bank.labels) <= max(2 * bank.size, bank.size + len(batch[2]))


@settings(max_examples=150, deadline=None)
@given(stream=streams(), per_class=st.sampled_from([1, 5, None]), k=st.integers(1, 6), order=st.sampled_from([1, 2]))
def test_neighbours_equal_a_full_sort(stream: list, per_class: int | None, k: int, order: int) -> None:
    bank, history = Bank(CLASSES, DIM, per_class, torch.zeros(0, dtype=torch.float64), order=order), History(per_class)
    for batch in stream:
        bank.insert(*batch)
        history.insert(*batch)
    queries = stream[-1][0]
    similarity, probs = bank.neighbors(queries, k)
    kept = history.kept()
    assert similarity.shape == (len(queries), min(k, len(kept)))
    for i, a in enumerate(queries):
        near = []
        for t, z, q, *_ in kept:
            norm = max(float(a.norm(p=order)), 1e-12) * max(float(z.norm(p=order)), 1e-12)
            near.append((float(a @ z) / norm, t, q))
        near = sorted(near, key=lambda n: (-round(n[0], 9), -n[1]))[:k]
        expected = sorted((round(s, 9), *q.tolist()) for s, _, q in near)
        found = sorted((round(float(s), 9), *q.tolist()) for s, q in zip(similarity[i], probs[i], strict=True))
        for left, right in zip(expected, found, strict=True):
            assert left == pytest.approx(right, abs=1e-8)


def filled(per_class: int | None, batches: int = 30, dim: int = 8) -> tuple[Bank, Tensor]:
    g = torch.Generator().manual_seed(0)
    bank = Bank(CLASSES, dim, per_class, torch.zeros(0))
    z = torch.zeros(0)
    for _ in range(batches):
        z = torch.randn(16, dim, generator=g)
        q = torch.rand(16, CLASSES, generator=g)
        bank.insert(z, q, torch.randint(CLASSES, (16,), generator=g), torch.rand(16, generator=g))
    return bank, z


def test_a_search_in_parts_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, z = filled(None)
    whole = bank.neighbors(z, 3)
    monkeypatch.setattr(nearest, "MAX_SIMILARITIES", 2 * bank.size)
    parts = bank.neighbors(z, 3)
    torch.testing.assert_close(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])


def test_an_entry_just_inserted_is_its_own_nearest() -> None:
    """In float32, where products of copies differ by rounding, and with older copies in the bank."""
    g = torch.Generator().manual_seed(0)
    bank, z = Bank(CLASSES, 512, None, torch.zeros(0)), torch.randn(64, 512, generator=g)
    y, h = torch.zeros(64, dtype=torch.int64), torch.zeros(64)
    for visit in range(5):
        bank.insert(z, torch.full((64, CLASSES), float(visit)), y, h)
        for k in range(1, visit + 2):
            newest = torch.arange(visit, visit - k, -1).expand(64, k)
            found = bank.neighbors(z, k)[1][:, :, 0]
            assert torch.equal(found.sort(dim=1, descending=True).values, newest.to(found))


def test_float32_sums_do_not_drift() -> None:
    """After thousands of replacements the prototypes are still the means of what is stored."""
    g = torch.Generator().manual_seed(0)
    bank = Bank(CLASSES, 6, 5, torch.zeros(0))
    for t in range(3000):
        z = torch.randn(8, 6, generator=g) * (1000.0 if t == 10 else 1.0)
        h = torch.rand(8, generator=g) + 5 - t / 1000  # ever more certain, so that nearly all are replaced
        bank.insert(z, torch.rand(8, CLASSES, generator=g), torch.randint(CLASSES, (8,), generator=g), h)
    for k in range(CLASSES):
        members = bank.features[: bank.size][bank.labels[: bank.size] == k]
        assert len(members) == 5
        torch.testing.assert_close(bank.prototypes()[k], members.double().mean(dim=0).float(), rtol=1e-6, atol=1e-6)


def test_a_giant_that_leaves_leaves_no_trace() -> None:
    bank = Bank(1, 1, 5, torch.zeros(0))
    z = torch.tensor([[0.3], [0.3], [0.3], [0.3], [1e16]])
    bank.insert(z, torch.ones(5, 1), torch.zeros(5, dtype=torch.int64), torch.tensor([0.1, 0.1, 0.1, 0.1, 0.9]))
    bank.insert(z[:1], torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), torch.tensor([0.2]))
    torch.testing.assert_close(bank.prototypes(), torch.tensor([[0.3]]))


def test_giants_that_leave_one_after_the_other_leave_no_trace() -> None:
    bank = Bank(1, 1, 4, torch.zeros(0, dtype=torch.float64))
    for i, value in enumerate([9e5**3, 9e5**2, 9e5, 1.1, 0.1, 0.1, 0.1]):
        z = torch.tensor([[value]], dtype=torch.float64)
        bank.insert(z, torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), torch.tensor([1 - i / 10]))
    torch.testing.assert_close(bank.prototypes(), torch.tensor([[1.4 / 4]], dtype=torch.float64))


@pytest.mark.parametrize("order", [1, 2])
def test_close_neighbours_are_told_apart(order: int) -> None:
    """Similarities of L1-normalised features are about 1/D: rounding is no reason to take them for equal."""
    g = torch.Generator().manual_seed(0)
    bank, n, d = Bank(1, 1024, None, torch.zeros(0), order=order), 4000, 1024
    z = torch.randn(n, d, generator=g).relu() + 0.1 * torch.rand(n, d, generator=g)
    bank.insert(z, torch.arange(n).unsqueeze(1).float(), torch.zeros(n, dtype=torch.int64), torch.zeros(n))
    queries = torch.randn(32, d, generator=g).relu()
    exact = [t.double() / t.double().norm(p=order, dim=1, keepdim=True) for t in (queries, z)]
    expected = (exact[0] @ exact[1].T).topk(3, dim=1).indices.sort(dim=1).values
    found = bank.neighbors(queries, 3)[1][:, :, 0].long().sort(dim=1).values
    assert int((expected == found).all(dim=1).sum()) >= 31


def test_memory_is_bounded_and_follows_what_is_stored() -> None:
    bank, _ = filled(5, batches=200)
    assert bank.size == len(bank.labels) == CLASSES * 5
    assert bank.table.shape == (CLASSES, 5)
    few, _ = filled(10**9, batches=1)
    assert len(few.labels) <= 32
    assert few.table.shape[1] <= 32
    everything, _ = filled(None, batches=10)
    assert everything.size == 160
    assert everything.table.numel() == 0


@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_at_least_float32(given_dtype: torch.dtype, dtype: torch.dtype) -> None:
    assert Bank(2, 2, 1, torch.zeros(1, dtype=given_dtype)).features.dtype == dtype


# What makes a host wait for its device: reading a value, or a shape that follows from values.
WAITING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static", "argwhere"}
WAITING |= {"masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
WAITING |= {"bincount", "repeat_interleave"}


class Waits(TorchDispatchMode):
    """Counts the operations for which a host would wait, had the tensors been on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"):
            masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
            self.found += [f"{name} by a mask"] if masks else []
        self.found += [name] if name in {w.rstrip("_") for w in WAITING} else []
        return func(*args, **(kwargs or {}))


def test_waiting_is_noticed() -> None:
    x = torch.arange(4)
    ways = [lambda: int(x[0]), lambda: bool(x[1]), lambda: x[x > 1], lambda: x.nonzero(), lambda: x.unique()]
    ways += [lambda: x[x > 1].add_(1), lambda: x.unique_consecutive(), lambda: torch.equal(x, x), lambda: x[x[1]]]
    ways += [lambda: x.__setitem__(x > 1, torch.zeros(2, dtype=x.dtype)), lambda: x.masked_select(x > 1)]
    for way in ways:
        with Waits() as mode:
            way()
        assert mode.found
    with Waits() as mode:
        x[torch.tensor([0, 1])] = x.where(x > 1, 0)[:2]
    assert mode.found == []


def offered(g: torch.Generator, n: int = 16, dim: int = 8, classes: int = CLASSES) -> tuple[Tensor, ...]:
    labels = torch.randint(classes, (n,), generator=g)
    return torch.randn(n, dim, generator=g), torch.rand(n, classes, generator=g), labels, torch.rand(n, generator=g)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are treated as if they were on a device for which the host waits."""
    monkeypatch.setattr(Tensor, "is_cpu", False)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("per_class", [5, 100, 1000])
@pytest.mark.parametrize(("unit", "order", "half"), [(False, 2, False), (True, 1, False), (False, 2, True)])
def test_a_step_does_not_wait(per_class: int, unit: bool, order: int, half: bool) -> None:
    """In a full bank, in one that is half full, and in one whose arena is half full."""
    g = torch.Generator().manual_seed(0)
    bank = Bank(CLASSES, 8, per_class, torch.zeros(0), unit=unit, order=order, half=half)
    for _ in range(12):
        batch = offered(g)
        bank.insert(*batch)
    bank.neighbors(batch[0], 3)
    with Waits() as mode:
        for i in range(3):
            batch = offered(g)
            bank.insert(*batch[:3], batch[3] - float(i == 2))  # the last time all are better than what is stored
            bank.prototypes()
            bank.neighbors(batch[0], 3)
    assert mode.found == []
    assert bank.size == min(15 * 16, CLASSES * per_class)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("classes", [4, 64])
def test_without_a_filter_a_step_waits_once_at_most(classes: int) -> None:
    g, bank = torch.Generator().manual_seed(0), Bank(classes, 8, None, torch.zeros(0))
    for _ in range(5):
        with Waits() as mode:
            batch = offered(g, classes=classes)
            bank.insert(*batch)
            bank.prototypes()
            bank.neighbors(batch[0], 3)
        assert len(mode.found) <= 1 + (bank.size == 16)  # and once in its life to see that there are three
    assert bank.size == 80


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("per_class", [10, 10**6])
def test_to_look_at_the_size_is_rare(per_class: int) -> None:
    """Also where the bound runs away from the size, as nearly all that is offered is refused, or nothing is."""
    g, bank = torch.Generator().manual_seed(0), Bank(1000, 8, per_class, torch.zeros(0))
    with Waits() as mode:
        for _ in range(8 * memory.BATCHES_AHEAD):
            z, q, y, h = offered(g, classes=1000)
            bank.insert(z, q, y % 3, h)
            bank.neighbors(z, 3)
    assert len(mode.found) <= 2 * 8 + 1
    assert bank.size == (30 if per_class == 10 else 8 * memory.BATCHES_AHEAD * 16)
    assert len(bank.labels) <= 2 * (bank.size + memory.BATCHES_AHEAD * 16)  # memory follows what is stored all the same


def pair(monkeypatch: pytest.MonkeyPatch, stream: list, *args: Any, **kwargs: Any) -> tuple[Bank, Bank]:
    """The same stream, with and without waiting."""
    banks = Bank(*args, **kwargs), Bank(*args, **kwargs)
    for bank, away in zip(banks, (False, True), strict=True):
        monkeypatch.setattr(Tensor, "is_cpu", not away)
        for batch in stream:
            bank.insert(*batch)
    return banks


@settings(max_examples=100, deadline=None)
@given(stream=streams(), per_class=st.sampled_from([1, 2, 5, None]), unit=st.booleans(), k=st.integers(1, 6))
def test_both_ways_are_the_same_to_the_bit(stream: list, per_class: int | None, unit: bool, k: int) -> None:
    like, queries = torch.zeros(0, dtype=torch.float64), stream[-1][0]
    with pytest.MonkeyPatch.context() as patch:
        near, far = pair(patch, stream, CLASSES, DIM, per_class, like, unit=unit)
        loose = far.neighbors(queries, k)  # by bounds of the size
        assert near.size == far.size  # from here on it is known to both
        for name in ("features", "probs", "labels", "entropy", "scale", "weight", "arrival"):
            assert torch.equal(getattr(near, name)[: near.size], getattr(far, name)[: near.size]), name
        for name in ("counts", "sums", "peak", "seen"):
            assert torch.equal(getattr(near, name), getattr(far, name)), name
        width = min(near.table.shape[1], far.table.shape[1])
        assert torch.equal(near.table[:, :width], far.table[:, :width])
        assert torch.equal(near.prototypes(), far.prototypes())
        distant = far.neighbors(queries, k)
        patch.setattr(Tensor, "is_cpu", True)
        exact = near.neighbors(queries, k)
    assert all(torch.equal(a, b) for a, b in zip(distant, exact, strict=True))
    for i in range(len(queries)):
        found = [
            sorted((round(float(s), 9), *q.tolist()) for s, q in zip(near[i], probs[i], strict=True))
            for near, probs in (loose, exact)
        ]
        assert found[0] == [pytest.approx(row, abs=1e-8) for row in found[1]]


def test_giants_leave_no_trace_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several classes at once, summed anew a few classes at a time."""
    g, stream = torch.Generator().manual_seed(0), []
    for i in range(20):
        z, q, y, h = offered(g)
        stream.append((z * 1e15 if i == 3 else z, q, y, h - i / 10))
    monkeypatch.setattr(memory, "MAX_SUMMED", 2 * 5 * 8)
    near, far = pair(monkeypatch, stream, CLASSES, 8, 5, torch.zeros(0))
    assert torch.equal(near.sums, far.sums)
    for k in range(CLASSES):
        members = near.features[near.labels == k].double()
        torch.testing.assert_close(far.sums[k], members.sum(dim=0))


def test_a_class_that_none_leaves_is_not_summed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries cancel out, so that any of them is long beside the sum; it has room, so that its table has gaps."""
    z, labels = torch.tensor([[2.0], [-2.0], [3.0]]), torch.tensor([0, 0, 1])
    near, far = pair(monkeypatch, [(z, torch.ones(3, 2), labels, torch.ones(3))], 2, 1, 5, torch.zeros(0))
    for bank in (near, far):
        assert bank.sums.tolist() == [[0.0], [3.0]]
        assert bank.peak.tolist() == [2.0, 3.0]


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("batches", [0, 4])
def test_a_batch_of_which_nobody_stays_changes_nothing(batches: int) -> None:
    g, bank = torch.Generator().manual_seed(0), Bank(CLASSES, 8, 2, torch.zeros(0))
    z, q, y, h = offered(g)
    bank.insert(z, q, y, h * torch.nan)  # there is room now
    assert not bool(bank.peak.any())
    for _ in range(batches):
        bank.insert(*offered(g))
    assert bank.size == min(batches, 2) * CLASSES
    before = copy.deepcopy(bank)
    bank.insert(z * 1e20, q, y, h + (10 if batches else torch.inf))
    bank.insert(z, q, y, h * torch.nan)
    assert int(bank.seen) == (3 + batches) * 16
    for name, kept in before.named_buffers():
        assert name == "seen" or torch.equal(kept, bank.get_buffer(name)), name


@pytest.mark.usefixtures("far")
def test_rows_that_are_not_in_use_are_never_found() -> None:
    """Not even if all that is stored is as unlike the query as can be."""
    bank, queries = Bank(2, 3, 10, torch.zeros(0)), torch.ones(1, 3)
    for i in range(4):
        bank.insert(-torch.ones(6, 3), torch.ones(6, 2), torch.zeros(6, dtype=torch.int64), torch.ones(6))
        if i == 1:
            assert bank.neighbors(queries, 10)[0].shape == (1, 10)  # so many are known of
    assert len(bank.labels) == 20
    with Waits() as mode:
        similarity, found = bank.neighbors(queries, 10)
    assert mode.found == []
    torch.testing.assert_close(similarity, -torch.ones(1, 10))
    assert bool((found == 1).all())
    assert bank.neighbors(queries, 11)[0].shape == (1, 10)


@pytest.mark.usefixtures("far")
def test_a_class_that_grows_of_a_sudden_keeps_all_its_entries() -> None:
    """The arena has room for long, the table has not."""
    bank, n = Bank(64, 1, 10**4, torch.zeros(0)), 64
    for i in range(64 + 50):
        labels = torch.arange(n) if i < 64 else torch.zeros(n, dtype=torch.int64)
        bank.insert(torch.ones(n, 1), torch.ones(n, 64), labels, torch.ones(n))
    assert (bank.size, int(bank.counts[0])) == (114 * 64, 64 + 50 * 64)


@pytest.mark.usefixtures("far")
def test_a_bank_whose_buffers_were_put_in_place_knows_how_many_it_holds() -> None:
    """Assigned as saved states are, copied in place, moved, or copied as a whole."""
    g = torch.Generator().manual_seed(0)
    large, small = Bank(CLASSES, 8, 100, torch.zeros(0)), Bank(CLASSES, 8, 100, torch.zeros(0))
    for bank, batches in ((large, 9), (small, 2)):
        for _ in range(batches):
            bank.insert(*offered(g))
    query, (probs, labels) = torch.full((1, 8), 2.0), (torch.full((1, CLASSES), 7.0), torch.zeros(1, dtype=torch.int64))
    for mine, other, size in ((small, large, 9 * 16), (large, small, 2 * 16)):
        assigned, loaded = copy.deepcopy(mine), copy.deepcopy(mine)
        for bank in (assigned, loaded):
            bank.neighbors(query, 1)  # now it knows how many it holds
        version = assigned.counts._version
        for name, buffer in other.named_buffers():
            setattr(assigned, name, buffer.clone())
        while assigned.counts._version < version:
            assigned.counts.add_(0)  # as often written to as those in whose place it stands
        loaded.load_state_dict(other.state_dict())
        for bank in (assigned, loaded, copy.deepcopy(other), copy.deepcopy(other).to(torch.float64)):
            bank.insert(query, probs, labels, torch.zeros(1))
            assert float(bank.neighbors(query, 1)[1][0, 0, 0]) == 7
            assert bank.size == size + 1
            bank.verify()
            torch.testing.assert_close(bank.arrival[: bank.size].sort().values, torch.arange(size + 1))


def test_a_table_that_does_not_hold_the_entries_is_refused() -> None:
    bank, _ = filled(5)
    bank.verify()
    bank.table[1, 2] = -1
    with pytest.raises(ValueError, match="do not fit together"):
        bank.verify()


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("order", [1, 2])
def test_half_precision_rounds_and_no_more(unit: bool, order: int) -> None:
    g, entry = torch.Generator().manual_seed(0), torch.zeros(0)
    banks = [Bank(CLASSES, 64, 20, entry, unit=unit, order=order, half=half) for half in (False, True)]
    for _ in range(30):
        batch = offered(g, dim=64)
        for bank in banks:
            bank.insert(*batch)
    full, half = banks
    size, eps = full.size, torch.finfo(torch.float16).eps
    assert torch.equal(full.arrival[:size], half.arrival[:size])
    assert (half.features.dtype, half.probs.dtype) == (torch.float16, torch.float16)
    assert (half.sums.dtype, half.scale.dtype, half.prototypes().dtype) == (torch.float64, torch.float32, torch.float32)
    torch.testing.assert_close(half.features[:size].float(), full.features[:size], rtol=eps, atol=1e-7)
    torch.testing.assert_close(half.prototypes(), full.prototypes(), rtol=eps, atol=4 * eps)
    near, far = full.neighbors(batch[0], 3), half.neighbors(batch[0], 3)
    assert far[0].dtype == far[1].dtype == torch.float32
    torch.testing.assert_close(far[0], near[0], rtol=0, atol=2 * eps)
    same = ((far[1] - near[1]).abs() <= eps).all(dim=2).float().mean()
    assert float(same) > 0.95
    held = [sum(t.nbytes for t in (b.features, b.probs)) for b in banks]
    assert held[1] * 2 == held[0]
    # Sums are those of what is stored, and follow it without drift.
    for k in range(CLASSES):
        members = half.features[:size][half.labels[:size] == k].float()
        members = members / members.norm(dim=1, keepdim=True) if unit else members
        torch.testing.assert_close(half.prototypes()[k], members.mean(dim=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [7e4, 1e30, -1e30])
def test_half_precision_keeps_giants_finite(value: float) -> None:
    bank = Bank(1, 2, 5, torch.zeros(0), half=True)
    z = torch.tensor([[value, 1.0], [1.0, 2.0]])
    bank.insert(z, torch.ones(2, 1), torch.zeros(2, dtype=torch.int64), torch.tensor([0.5, 0.6]))
    assert torch.equal(bank.features, torch.tensor([[value, 1.0], [1.0, 2.0]]).clamp(-65504, 65504).half())
    assert bool(bank.prototypes().isfinite().all())
    similarity, _ = bank.neighbors(torch.tensor([[1.0, 0.0]]), 2)
    expected = sorted([1.0 if value > 0 else -1.0, 5**-0.5], reverse=True)
    torch.testing.assert_close(similarity, torch.tensor([expected]))


def test_half_precision_searches_in_single(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of halves are not rounded to halves: entries that differ little are told apart, in parts as well."""
    bank, n = Bank(1, 512, None, torch.zeros(0), half=True), 300
    z = torch.ones(n, 512)
    z[torch.arange(n), torch.arange(n)] += 2.0**-9  # every one a little towards an axis of its own
    bank.insert(z, torch.arange(n).unsqueeze(1).float(), torch.zeros(n, dtype=torch.int64), torch.zeros(n))
    axis = torch.eye(512)[:n] + 1
    for limit in (2**24, 512 * 64):
        monkeypatch.setattr(nearest, "MAX_SIMILARITIES", limit)
        assert torch.equal(bank.neighbors(axis, 1)[1].flatten(), torch.arange(n).half().float())


@pytest.mark.parametrize("away", [False, True])
def test_in_inference_mode_too(monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    """Where tensors do not count how often they were written to."""
    monkeypatch.setattr(Tensor, "is_cpu", not away)
    g = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        bank = Bank(CLASSES, 8, 5, torch.zeros(0))
        for _ in range(6):
            batch = offered(g)
            bank.insert(*batch)
            assert bank.neighbors(batch[0], 3)[0].shape == (16, 3)
        assert bank.size == 5 * CLASSES
