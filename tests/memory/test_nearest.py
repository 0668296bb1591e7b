"""The search over a large bank, part by part: it finds what a full sort finds, and holds little at a time."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trueup.memory import nearest
from trueup.memory.bank import Bank


def bank_of(z: Tensor, order: int = 2, *, half: bool = False) -> Bank:
    """Everything of one class, in this order; each entry's only probability is its number."""
    bank, n = Bank(1, z.shape[1], None, z[:0], order=order, half=half), len(z)
    number = torch.arange(n, dtype=z.dtype).unsqueeze(1)
    bank.insert(z, number, torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=z.dtype))
    return bank


def found(bank: Bank, queries: Tensor, k: int) -> list[list[int]]:
    return [sorted(int(i) for i in row) for row in bank.neighbors(queries, k)[1].flatten(1)]


def sought(queries: Tensor, z: Tensor, k: int, order: int = 2) -> list[list[int]]:
    """By a full sort of all pairs: the most similar, of equals the newest."""
    answers = []
    for a in queries.double():
        near = []
        for i, b in enumerate(z.double()):
            norm = max(float(a.norm(p=order)), 1e-12) * max(float(b.norm(p=order)), 1e-12)
            near.append((-round(float(a @ b) / norm, 9), -i))
        answers.append(sorted(-i for _, i in sorted(near)[:k]))
    return answers


@settings(max_examples=150, deadline=None)
@given(
    entries=st.lists(st.tuples(*[st.integers(-2, 2)] * 3), min_size=1, max_size=40),
    limit=st.integers(1, 80),
    k=st.integers(1, 9),
    order=st.sampled_from([1, 2]),
    away=st.booleans(),
)
def test_parts_of_any_size_find_what_a_full_sort_finds(
    entries: list, limit: int, k: int, order: int, away: bool
) -> None:
    """With many equals on both sides of the borders of parts."""
    z = torch.tensor(entries, dtype=torch.float64)
    bank, queries = bank_of(z, order), z[:: max(1, len(z) // 4)][:4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "is_cpu", not away)
        patch.setattr(nearest, "MAX_SIMILARITIES", limit)
        assert found(bank, queries, k) == sought(queries, z, k, order)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("part", [1, 7, 64, 65, 100, 1000])
def test_the_newest_of_copies_win_wherever_they_are(monkeypatch: pytest.MonkeyPatch, part: int, away: bool) -> None:
    """In float32, where products with copies differ by rounding; the copies are spread over all parts."""
    g = torch.Generator().manual_seed(0)
    once = torch.randn(64, 256, generator=g)
    z = torch.cat([once[torch.randperm(64, generator=g)] for _ in range(5)])
    bank = bank_of(z)
    monkeypatch.setattr(Tensor, "is_cpu", not away)
    monkeypatch.setattr(nearest, "MAX_SIMILARITIES", 64 * part)
    for k in (1, 2, 4, 5):
        copies = [(z == a).all(dim=1).nonzero().flatten().tolist() for a in once]
        assert found(bank, once, k) == [numbers[-k:] for numbers in copies]


def test_what_is_certain_is_taken_before_the_newest_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best stands in the first part, its runners-up are copies in all the others."""
    z = torch.tensor([[1.0, 0.0]] + [[1.0, 1.0]] * 20 + [[0.0, 1.0]] * 5)
    monkeypatch.setattr(nearest, "MAX_SIMILARITIES", 4)
    assert found(bank_of(z), torch.tensor([[1.0, 0.1]]), 3) == [[0, 19, 20]]


def test_an_empty_bank_has_no_neighbours() -> None:
    similarity, probs = Bank(2, 3, 5, torch.zeros(0)).neighbors(torch.ones(4, 3), 3)
    assert (similarity.shape, probs.shape) == ((4, 0), (4, 0, 2))


class Work(TorchDispatchMode):
    """Notes which operations run, and how many bytes of the tensors that they make are alive at once."""

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.peak = 0
        self._alive: list[tuple[Any, int, int]] = []
        self._old = {b.untyped_storage().data_ptr() for b in bank.buffers()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.ran.append(func._schema.name.removeprefix("aten::"))
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self._old:
                self._alive.append((weakref.ref(t), t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()))
        self._alive = [entry for entry in self._alive if entry[0]() is not None]
        self.peak = max(self.peak, sum({at: size for _, at, size in self._alive}.values()))
        return made


def test_more_queries_than_fit_are_searched_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    z, queries = torch.randn(30, 4, generator=g), torch.randn(50, 4, generator=g)
    monkeypatch.setattr(nearest, "MAX_SIMILARITIES", 36)
    assert found(bank_of(z), queries, 3) == sought(queries, z, 3)
    with Work(bank := bank_of(z)) as work:
        bank.neighbors(queries, 3)
    assert work.ran.count("mm") == 8 * 5 + 2  # eight times 6 queries with 6 entries each, then the last 2 with 18


@pytest.mark.parametrize("half", [False, True])
def test_memory_does_not_grow_with_the_bank(monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    g, limit, peaks = torch.Generator().manual_seed(0), 64_000, []
    monkeypatch.setattr(nearest, "MAX_SIMILARITIES", limit)
    queries = torch.randn(64, 128, generator=g)
    for n in (5_000, 50_000):
        bank = bank_of(torch.randn(n, 128, generator=g), half=half)
        with Work(bank) as work:
            bank.neighbors(queries, 3)
        assert work.ran.count("mm") == n // (500 if half else 1000)  # each part is read once
        peaks.append(work.peak)
    # One part of similarities, and of half precision as many values in float32; the queries, and small things.
    assert peaks[0] == peaks[1] <= 4 * limit * (2.4 if half else 1.4)


@pytest.mark.parametrize("away", [False, True])
def test_nor_with_how_many_are_equal(monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    """All entries are copies, so that every query has to look at all ages."""
    limit, peaks = 64_000, []
    monkeypatch.setattr(Tensor, "is_cpu", not away)
    monkeypatch.setattr(nearest, "MAX_SIMILARITIES", limit)
    for n in (5_000, 50_000):
        bank = bank_of(torch.ones(n, 8))
        with Work(bank) as work:
            bank.neighbors(torch.ones(64, 8), 3)
        assert work.ran.count("mm") == 2 * n // 1000
        peaks.append(work.peak)
    assert peaks[0] == peaks[1] <= 4 * limit * 3.7  # similarities, ages of twice their bytes, two masks


def test_a_bank_of_one_part_costs_no_more_than_the_product_and_the_choice() -> None:
    g = torch.Generator().manual_seed(0)
    bank = bank_of(torch.randn(1000, 16, generator=g))
    with Work(bank) as work:
        bank.neighbors(torch.randn(64, 16, generator=g), 3)
    assert [work.ran.count(name) for name in ("mm", "mul_", "topk", "sort")] == [1, 1, 1, 0]
    assert not {"gather", "masked_fill_", "where"} & set(work.ran)
