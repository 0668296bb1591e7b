"""Streams of rubbish: whatever comes, nothing that is not finite stays, and clean images are answered as ever."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import trueup
from trueup.core.saving import to_file

METHODS = ["tent", "tsd", "eta", "shot-im", "pl", "t3a", "lame", "bn"]
WAYS: list[dict[str, Any]] = [{"guard": True}, {"preset": "safe"}]
SHAPE = (3, 4, 4)
CLEAN = 2 * torch.randn(512, *SHAPE, generator=torch.Generator().manual_seed(0)) + 1

# What a row may be, made of a clean one; the first may enter, the others must not.
FINE = {
    "clean": lambda x: x,
    "black": torch.zeros_like,
    "constant": torch.ones_like,
    "denormal": lambda x: torch.full_like(x, 1e-42),
    "large": lambda x: 100 * x,
    "one large": lambda x: x.index_fill(1, torch.tensor([2]), 150.0),
}
BAD = {
    "nan": lambda x: x.index_fill(1, torch.tensor([1]), torch.nan),
    "all nan": lambda x: x * torch.nan,
    "inf": lambda x: x.index_fill(2, torch.tensor([0]), torch.inf),
    "-inf": lambda x: x.index_fill(0, torch.tensor([2]), -torch.inf),
    "both": lambda x: torch.stack((x[0] * torch.inf, -x[1] * torch.inf, x[2])),
    "1e38": lambda x: x.sign() * 1e38,
    "1e13": lambda x: x.index_fill(1, torch.tensor([3]), 1e13),
    "-1e12": lambda x: x.index_fill(1, torch.tensor([3]), -1e12),
    "huge": lambda x: 1e6 * x,
}
WRONG = {
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "bytes": lambda x: x.clamp(0, 9).to(torch.uint8),
    "channels": lambda x: 9 * x[:, :2],
    "channels with nan": lambda x: x[:, :2].index_fill(0, torch.tensor([0]), torch.nan),
    "flat": lambda x: x.flatten(1),
    "one image": lambda x: x[0],
    "empty": lambda x: x[:0],
    "no pixels": lambda x: x[:, :, :0],
    "sparse": lambda x: x.to_sparse(),
    "list": lambda x: x.tolist(),
}

ROWS = st.lists(st.sampled_from([*FINE, *BAD]), min_size=1, max_size=5)
BATCH = st.tuples(ROWS, st.sampled_from([0, 0, 1, 18]), st.integers(0, 2**16))
STREAM = st.lists(st.one_of(BATCH, BATCH, BATCH, st.sampled_from(list(WRONG))), min_size=4, max_size=14)
# Not shrunk: a stream is short, and runs again in no time.
THOROUGH = settings(
    deadline=None,
    derandomize=True,
    max_examples=25,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


def network() -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        layers = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()]
        layers += [nn.Conv2d(6, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).eval()


def adapted(method: str, way: dict[str, Any]) -> trueup.Adapter:
    lr: dict[str, Any] = {"lr": 1e-2} if method in ("tent", "tsd", "eta", "shot-im", "pl") else {}
    return trueup.adapt(network(), method, **way, **lr)


def begun(method: str, way: dict[str, Any]) -> trueup.Adapter:
    """Return an adapter that has answered a clean batch, as another one of its kind does."""
    adapter, twin = adapted(method, way), adapted(method, way)
    assert torch.equal(adapter(CLEAN[:6]), twin(CLEAN[:6]))
    return adapter


def made(batch: tuple[list[str], int, int]) -> tuple[Tensor, list[int], list[int]]:
    """A batch with the numbers of its bad and of its clean rows; more clean ones are put in between."""
    kinds, more, seed = batch
    g = torch.Generator().manual_seed(seed)
    kinds = [*kinds, *["clean"] * more]
    kinds = [kinds[i] for i in torch.randperm(len(kinds), generator=g).tolist()]
    rows = CLEAN[torch.randint(len(CLEAN), (len(kinds),), generator=g)]
    x = torch.stack([{**FINE, **BAD}[kind](row) for kind, row in zip(kinds, rows, strict=True)])
    return x, [i for i, k in enumerate(kinds) if k in BAD], [i for i, k in enumerate(kinds) if k in FINE]


def whole(adapter: trueup.Adapter) -> tuple[dict[str, Tensor], Any]:
    tensors, header = to_file(adapter)
    model = adapter.net.model
    tensors = {**tensors, **dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t.detach().clone() for n, t in tensors.items()}, repr(header)


def check_finite(adapter: trueup.Adapter) -> None:
    for name, tensor in whole(adapter)[0].items():
        assert not tensor.is_floating_point() or bool(tensor.isfinite().all()), name


def check_finite_if_built(adapter: trueup.Adapter) -> None:
    if adapter.built:
        check_finite(adapter)


@pytest.mark.beyond_quick
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_clean_rows_are_answered_as_if_the_others_had_not_been_there(method: str, way: dict[str, Any]) -> None:
    first = begun(method, way)

    @THOROUGH
    @given(STREAM)
    def run(stream: list[Any]) -> None:
        adapter, twin = copy.deepcopy(first), copy.deepcopy(first)
        for batch in stream:
            if isinstance(batch, str):
                continue
            x, bad, fine = made(batch)
            answer = adapter(x)
            assert adapter.health.quarantined == tuple(bad)
            assert answer.isfinite().all()
            assert not answer[bad].any()
            if fine:
                assert torch.equal(answer[fine], twin(x[fine]))
            check_finite(adapter)
        ours, theirs = whole(adapter)[0], whole(twin)[0]
        assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []

    run()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_refused_batch_changes_nothing(method: str, way: dict[str, Any]) -> None:
    @settings(THOROUGH, max_examples=5)
    @given(STREAM, st.permutations(list(WRONG)))
    def run(stream: list[Any], wrong: list[str]) -> None:
        adapter = adapted(method, way)
        for batch in [([*FINE], 3, 0), *stream[:5], *wrong]:
            if isinstance(batch, str):
                before, health = whole(adapter), adapter.health
                with pytest.raises((ValueError, TypeError)):
                    adapter(WRONG[batch](CLEAN[:5]))
                after = whole(adapter)
                assert [n for n in before[0] if not torch.equal(before[0][n], after[0][n])] == []
                assert (before[1], health) == (after[1], adapter.health), batch
            else:
                assert adapter(made(batch)[0]).isfinite().all()

    run()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_any_beginning(method: str, way: dict[str, Any]) -> None:
    """The first batch may be anything, too: what is usual is not known then, and what is huge may enter."""
    kinds = [*FINE, *BAD]
    odd = st.tuples(st.lists(st.sampled_from(kinds), min_size=1, max_size=4), st.just(0), st.integers(0, 2**16))

    @settings(THOROUGH, max_examples=20)
    @given(odd, st.lists(BATCH, min_size=1, max_size=6))
    def run(first: Any, stream: list[Any]) -> None:
        adapter = adapted(method, way)
        for batch in [first, *stream]:
            x, bad, _ = made(batch)
            answer, refusal = None, ""
            try:
                answer = adapter(x)
            except ValueError as error:
                refusal = str(error)
            if answer is None:
                assert "no row of the first batch" in refusal or "not finite" in refusal
                check_finite_if_built(adapter)
                continue
            assert answer.isfinite().all()
            never = [i for i in bad if not bool(x[i].abs().max() <= 1e12)]
            assert set(never) <= set(adapter.health.quarantined)
            check_finite(adapter)

    run()
