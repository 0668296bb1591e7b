"""The search by sketches: candidates from short projections, compared exactly."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bank import Waits, offered
from test_nearest import Work, found, sought
from torch import Tensor

import trueup
from trueup.core import files
from trueup.memory import nearest
from trueup.memory.bank import Bank
from trueup.testing import convnet, images
from trueup.testing.case import difference, play, same

CLASSES = 4


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short features have sketches, too, and a bank that is not large is searched by them."""
    monkeypatch.setattr(nearest, "MIN_SKETCH", 1)
    monkeypatch.setattr(nearest, "MIN_ROWS", 1500)


def bank_of(z: Tensor, order: int = 2, **kinds: Any) -> Bank:
    """Everything of one class, in this order; each entry's only probability is its number."""
    bank, n = Bank(1, z.shape[1], None, z[:0], order=order, sketch=True, **kinds), len(z)
    bank.insert(z, torch.arange(n, dtype=z.dtype).unsqueeze(1), torch.zeros(n, dtype=torch.int64), torch.zeros(n))
    return bank


@settings(max_examples=100, deadline=None)
@given(
    entries=st.lists(st.tuples(*[st.integers(-2, 2)] * 4), min_size=1, max_size=40),
    limit=st.integers(1, 80),
    k=st.integers(1, 9),
    order=st.sampled_from([1, 2]),
    away=st.booleans(),
)
def test_with_all_as_candidates_it_is_a_full_sort(entries: list, limit: int, k: int, order: int, away: bool) -> None:
    """Ties and all, in parts of any size."""
    z = torch.tensor(entries, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearest, "MIN_ROWS", 0)
        patch.setattr(nearest, "MIN_SKETCH", 1)
        patch.setattr(nearest, "MAX_SIMILARITIES", limit)
        patch.setattr(Tensor, "is_cpu", not away)
        bank, queries = bank_of(z, order), z[:: max(1, len(z) // 4)][:4]
        assert found(bank, queries, k) == sought(queries, z, k, order)


def clusters(g: torch.Generator, n: int, dim: int = 256, kinds: int = 50, common: float = 0.0) -> Tensor:
    """Rectified features around some centres, as a network has them; they may have a large part in common."""
    centres = torch.randn(kinds, dim, generator=torch.Generator().manual_seed(7)) + common
    return (centres[torch.randint(kinds, (n,), generator=g)] + 0.4 * torch.randn(n, dim, generator=g)).relu()


@pytest.mark.parametrize("common", [0.0, 8.0])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("order", [1, 2])
def test_it_finds_nearly_all_neighbours(order: int, half: bool, common: float) -> None:
    g = torch.Generator().manual_seed(0)
    z, queries = clusters(g, 8000, common=common), clusters(g, 64, common=common)
    bank = bank_of(z, order, half=half)
    # The numbers of entries, which are their probabilities, are not exact in halves: rows say which they are.
    exact = torch.nn.functional.normalize(queries, p=order) @ torch.nn.functional.normalize(z, p=order).T
    near = set(map(tuple, _pairs(exact.topk(5, dim=1).indices)))
    rows = nearest.search(_index(bank), torch.nn.functional.normalize(queries, p=order), 5)[1]
    assert len(near & set(map(tuple, _pairs(rows)))) >= 0.98 * len(near)


def _pairs(rows: Tensor) -> list[list[int]]:
    return [[i, row] for i, each in enumerate(rows.tolist()) for row in each]


def _index(bank: Bank) -> nearest.SearchIndex:
    n, sketches = bank.size, (bank.sketches, bank.centre, bank.projection)
    return nearest.SearchIndex(bank.features, bank.scale, bank.weight, bank.arrival, bank.counts.sum(), n, n, *sketches)


@pytest.mark.parametrize("away", [False, True])
def test_of_many_copies_the_newest_win(away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a picture that does not change there are more copies than candidates."""
    monkeypatch.setattr(Tensor, "is_cpu", not away)
    g = torch.Generator().manual_seed(0)
    still = clusters(g, 1)
    z = torch.cat([clusters(g, 1500), still.expand(900, -1), clusters(g, 100)])
    for limit in (2**24, 1024):
        monkeypatch.setattr(nearest, "MAX_SIMILARITIES", limit)
        assert found(bank_of(z), still, 3) == [[2397, 2398, 2399]]


def test_short_features_are_searched_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sketches would say too little."""
    monkeypatch.undo()
    assert not bank_of(torch.ones(2, 256)).sketch
    assert bank_of(torch.ones(2, 257)).sketch
    assert nearest.make_projection(512, torch.ones(0)).shape == (512, 256)
    assert nearest.make_projection(2048, torch.ones(0)).shape == (2048, 512)


def test_sketches_of_another_width_are_refused() -> None:
    for name in ("projection", "sketches"):
        bank = bank_of(torch.ones(4, 8))
        bank.verify()
        setattr(bank, name, getattr(bank, name)[:, :-1].clone())
        with pytest.raises(ValueError, match="do not fit together"):
            bank.verify()


def test_similarities_are_those_of_the_features() -> None:
    g = torch.Generator().manual_seed(0)
    z, queries = clusters(g, 4000), clusters(g, 64)
    similarity, number = bank_of(z).neighbors(queries, 3)
    rows = number.squeeze(2).long()
    expected = torch.nn.functional.cosine_similarity(queries.unsqueeze(1), z[rows], dim=2)
    torch.testing.assert_close(similarity, expected)


def test_an_entry_just_inserted_is_its_own_nearest() -> None:
    """Also where older copies are in the bank."""
    g = torch.Generator().manual_seed(0)
    once = clusters(g, 1500)
    bank = bank_of(torch.cat([once, once[:300], once[:64]]))
    _, number = bank.neighbors(once[:64], 1)
    assert number.flatten().tolist() == list(range(1800, 1864))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("away", [False, True])
def test_sketches_stay_with_their_features(away: bool, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As entries displace one another; on a device, where those who do not stay are written in vain."""
    monkeypatch.setattr(Tensor, "is_cpu", not away)
    monkeypatch.setattr(nearest, "MIN_ROWS", 12)
    g, bank = torch.Generator().manual_seed(0), Bank(CLASSES, 8, 5, torch.zeros(0), sketch=True, half=half)
    for i in range(20):
        z, q, y, h = offered(g)
        bank.insert(z, q, y, h - i / 100)
    unit = bank.features.float() * bank.scale.unsqueeze(1) - bank.centre
    expected = torch.cat([unit @ bank.projection, unit @ bank.centre.unsqueeze(1)], dim=1)
    assert bank.sketches.dtype == bank.features.dtype
    torch.testing.assert_close(bank.sketches[: bank.size].float(), expected[: bank.size], rtol=1e-3, atol=1e-3)
    assert expected[: bank.size].abs().amin(dim=0).max() > 0


def test_a_small_bank_is_searched_exactly() -> None:
    g = torch.Generator().manual_seed(0)
    z, queries = torch.randn(nearest.MIN_ROWS - 1, 16, generator=g), torch.randn(20, 16, generator=g)
    plain = Bank(1, 16, None, z[:0])
    n = len(z)
    plain.insert(z, torch.arange(n).float().unsqueeze(1), torch.zeros(n, dtype=torch.int64), torch.zeros(n))
    assert same(bank_of(z).neighbors(queries, 3), plain.neighbors(queries, 3))


def test_a_search_holds_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    g, limit, peaks = torch.Generator().manual_seed(0), 64_000, []
    monkeypatch.setattr(nearest, "MAX_SIMILARITIES", limit)
    monkeypatch.setattr(nearest, "MAX_GATHERED", limit)
    queries = torch.randn(64, 128, generator=g)
    for n in (5_000, 50_000):
        bank = bank_of(torch.randn(n, 128, generator=g))
        with Work(bank) as work:
            bank.neighbors(queries, 3)
        assert work.ran.count("mm") == n // 1000 + 1  # each part is read once, and the queries are projected
        peaks.append(work.peak)
    # A part of similarities, one of candidates' features; values and rows of candidates: kept, new, both, and chosen.
    assert peaks[0] == peaks[1] <= 4 * limit * 2.5 + 64 * 200 * 12 * 5


@pytest.mark.parametrize("per_class", [60, 10**6])
def test_a_step_does_not_wait_for_a_device(per_class: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cpu", False)
    monkeypatch.setattr(nearest, "MIN_ROWS", 0)
    g, bank = torch.Generator().manual_seed(0), Bank(CLASSES, 8, per_class, torch.zeros(0), sketch=True)
    for _ in range(20):
        batch = offered(g)
        bank.insert(*batch)
    bank.neighbors(batch[0], 3)
    with Waits() as mode:
        for _ in range(3):
            batch = offered(g)
            bank.insert(*batch)
            bank.neighbors(batch[0], 3)
    assert mode.found == []


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small banks are searched by sketches, too, and not by all."""
    monkeypatch.setattr(nearest, "MIN_ROWS", 0)
    monkeypatch.setattr(nearest, "CANDIDATES", 8)
    monkeypatch.setattr(nearest, "SKETCH_RATIO", 2)


XS = [images(16, seed=i, shift=1.0)[0] for i in range(8)]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("memory", ["usual", "low"])
def test_an_adapter_goes_on_to_the_bit(memory: str, tmp_path: Path) -> None:
    def fresh() -> trueup.Adapter:
        return trueup.adapt(convnet(), "tsd", search="sketch", memory=memory, lr=1e-2)

    adapter = fresh()
    play(adapter, XS[:5])
    adapter.save(tmp_path / "state")
    later, twin = fresh(), copy.deepcopy(adapter)
    later.load(tmp_path / "state")
    assert difference(adapter, later) == []
    answers = play(adapter, XS[5:])
    assert same(answers, play(later, XS[5:]))
    assert same(answers, play(twin, XS[5:]))
    adapter.reset()
    assert same(play(adapter, XS[:5]), play(fresh(), XS[:5]))


@pytest.mark.usefixtures("always")
def test_it_is_used_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    way = nearest._exact_similarities
    monkeypatch.setattr(nearest, "_exact_similarities", lambda *args: (used.append(1), way(*args))[1])
    play(trueup.adapt(convnet(), "tsd"), XS[:2])
    assert used == []
    play(trueup.adapt(convnet(), "tsd", search="sketch"), XS[:2])
    assert len(used) == 2
    without = trueup.adapt(convnet(), "tsd", search="sketch", alignment=0, example=XS[0])
    assert "sketches" not in dict(without.state.named_buffers())  # nobody asks for neighbours


def test_a_state_of_the_other_search_is_refused(tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "tsd", search="sketch")
    play(adapter, XS[:2])
    adapter.save(tmp_path / "state")
    with pytest.raises(ValueError, match="other hyper-parameters"):
        trueup.adapt(convnet(), "tsd").load(tmp_path / "state")


def test_a_state_from_before_there_was_a_choice_is_taken(tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "tsd")
    play(adapter, XS[:2])
    adapter.save(tmp_path / "state")
    tensors, header = files.read(tmp_path / "state")
    hyper = {k: v for k, v in header["hyperparameters"].items() if k != "search"}
    files.write(tmp_path / "old", tensors, {**header, "hyperparameters": hyper})
    later = trueup.adapt(convnet(), "tsd")
    later.load(tmp_path / "old")
    assert difference(adapter, later) == []
    with pytest.raises(ValueError, match=r"other hyper-parameters: \{'search': 'exact'\}, here \{'search': 'sketch'\}"):
        trueup.adapt(convnet(), "tsd", search="sketch").load(tmp_path / "old")


@pytest.mark.parametrize("value", ["faiss", None, True])
def test_a_search_that_there_is_not_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="search="):
        trueup.adapt(convnet(), "tsd", search=value)
