"""Models that keep results of a forward for the next: what was learnt since is in the answers all the same."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import trueup
from trueup import Guard
from trueup.core.registry import get_method
from trueup.testing.case import difference, play, same

XS = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(5)]
PICTURES = [torch.randn(32, 3, 12, 12, generator=torch.Generator().manual_seed(i)) for i in range(3)]


class Table(nn.Module):
    """Adds a table that is worked out from a parameter, and in eval mode only once, as several models of timm do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.bias, self.kind = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4)), kind
        if kind == "dict":
            self.tables: dict[str, Tensor] = {}
        elif kind == "attribute":
            self.table: Tensor | None = None

    def train(self, mode: bool = True) -> "Table":
        if mode and self.kind == "dict":
            self.tables = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(x)
        return z + self._table().sum(dim=0)

    def _table(self) -> Tensor:
        made = self.bias * 2
        if self.kind == "dict":
            made = self.tables.setdefault("cpu", made)
        elif self.kind == "attribute":
            self.table = made = made if self.table is None else self.table
        elif self.kind == "new":
            if not hasattr(self, "later"):
                self.later = made
            made = self.later
        return made


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Sequential(Table(kind)), nn.Sequential(Table(kind)))
    return nn.Sequential(nn.Linear(4, 4), blocks, nn.Linear(4, 3))


def adapters(kind: str, **settings: Any) -> list[trueup.Adapter]:
    """One of a model that keeps nothing, one of the same model that does."""
    return [trueup.adapt(model(k), "tent", params="all", lr=1e-2, **settings) for k in ("nothing", kind)]


@pytest.mark.parametrize("memory", ["usual", "low"])
@pytest.mark.parametrize("kind", ["dict", "attribute", "new"])
def test_what_was_learnt_is_in_the_answers(kind: str, memory: str) -> None:
    plain, keeping = adapters(kind, memory=memory)
    assert same(play(plain, XS), play(keeping, XS))
    assert same(list(plain.net.model.parameters()), list(keeping.net.model.parameters()))
    assert plain.updates == len(XS)
    assert same([plain.unwrap()(XS[0])], [keeping.unwrap()(XS[0])])
    twin = copy.deepcopy(keeping)
    assert same(play(keeping, XS), play(twin, XS))
    keeping.reset()
    plain.reset()
    assert same(play(plain, XS), play(keeping, XS))


@pytest.mark.parametrize("kind", ["dict", "attribute", "new"])
def test_the_source_of_a_guard_has_its_own(kind: str) -> None:
    plain, keeping = adapters(kind, guard=Guard(compare=1))
    assert same(play(plain, XS), play(keeping, XS))
    assert plain.health.numbers == keeping.health.numbers


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_users_have_run_before_is_forgotten(how: Callable[[], Any]) -> None:
    used = model("dict").eval()
    with how():
        used(XS[0])
    tables = [table for m in used.modules() if isinstance(m, Table) for table in m.tables.values()]
    ours, theirs = (trueup.adapt(m, "tent", params="all", lr=1e-2) for m in (used, model("nothing")))
    assert same(play(ours, XS), play(theirs, XS))
    assert [t for m in used.modules() if isinstance(m, Table) for t in m.tables.values()] == tables  # still theirs


@pytest.mark.parametrize("kind", ["dict", "attribute", "new"])
@pytest.mark.parametrize("method", ["cotta", "rotta"])
def test_teachers_forget_too(method: str, kind: str) -> None:
    hyper: dict[str, Any] = {"views": 2, "every": 8, "capacity": 8}
    hyper = {k: v for k, v in hyper.items() if k in get_method(method)().hyperparameters()}
    plain, keeping = (
        trueup.adapt(images_of(k), method, lr=1e-1, params="all", momentum=0.5, **hyper) for k in ("nothing", kind)
    )
    assert same(play(plain, PICTURES), play(keeping, PICTURES))
    assert plain.updates > 0


def images_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), model(kind))


@pytest.mark.parametrize("kind", ["dict", "attribute", "new"])
def test_robust_statistics_answer_first(kind: str) -> None:
    """A pass without a gradient comes before the one that learns."""
    plain, keeping = (
        trueup.adapt(images_of(k), "tent", norm="robust", params="all", lr=1e-2) for k in ("nothing", kind)
    )
    assert same(play(plain, PICTURES), play(keeping, PICTURES))
    assert plain.updates == len(PICTURES)


class Late(nn.Module):
    """Fails when it is told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if Late.fails:
            raise RuntimeError("no memory")
        return x


@pytest.mark.parametrize("memory", ["usual", "low"])
@pytest.mark.parametrize("kind", ["dict", "attribute", "new"])
def test_a_forward_that_fails_leaves_nothing(kind: str, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(model(kind)[:2], Late(), nn.Linear(4, 3))
    for example in (None, XS[0]):
        ours, theirs = (trueup.adapt(whole, "tent", params="all", example=example, memory=memory) for _ in range(2))
        if example is None:
            assert same(play(ours, XS[:1]), play(theirs, XS[:1]))
        monkeypatch.setattr(Late, "fails", True)
        with pytest.raises(RuntimeError, match=r"^no memory$"):
            ours(XS[1])
        monkeypatch.undo()
        assert same(play(ours, XS[1:]), play(theirs, XS[1:]))


class Streaming(nn.Module):
    """Keeps the last batch's mean with its graph, and reads it without."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.last = nn.Linear(4, 3), nn.LayerNorm(4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x) + self.last.detach()
        self.last = z.mean(dim=0)
        out: Tensor = self.fc(z)
        return out


def test_what_a_stream_needs_is_no_cache() -> None:
    torch.manual_seed(0)
    stream = Streaming().eval()
    adapter = trueup.adapt(stream, "tent", params="norm", lr=0.0)
    answers = play(adapter, XS)
    with torch.no_grad():
        expected = [stream(x) for x in XS]
    assert same(answers, expected)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["usual", "low"])
def test_tables_of_biases_in_timm(memory: str) -> None:
    torch.manual_seed(0)
    vit = timm.create_model("tiny_vit_5m_224", num_classes=4)
    xs = [torch.randn(2, 3, 224, 224) for _ in range(3)]
    adapter = trueup.adapt(vit, "tsd", lr=1e-3, memory=memory, norm="source")
    play(adapter, xs)
    assert adapter.updates == len(xs)
    source = vit.state_dict()
    moved = {n for n, t in adapter.net.model.state_dict().items() if not torch.equal(t, source[n])}
    assert any("attention_biases" in name for name in moved)
    again = trueup.adapt(vit, "tsd", lr=1e-3, memory=memory, norm="source")
    play(again, xs)
    assert difference(adapter, again) == []
