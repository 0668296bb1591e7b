"""The bank equals one that keeps all of history and looks at it anew each time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trueup import memory
from trueup.memory import Bank

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
    monkeypatch.setattr(memory, "SEARCH_LIMIT", 2 * bank.size)
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
