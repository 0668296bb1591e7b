"""Images that must not enter: answered by zeros, disturbing no other; and batches that are refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup import Event, Guard
from trueup.core.guarded_batch import bad_rows
from trueup.core.saving import to_file
from trueup.testing import convnet, images, scenes, segnet
from trueup.testing.case import difference, play, same

XS = [images(16, seed=70 + i, shift=1.0)[0] for i in range(24)]
WINDOW = 32  # two of these batches


def vital(adapter: trueup.Adapter) -> dict[str, Tensor]:
    """Weights, statistics, memory and optimiser; not what the guard remembers, nor the random stream."""
    tensors = {n: t for n, t in to_file(adapter)[0].items() if not n.startswith(("watch", "kept", "random"))}
    return {n: t.detach().clone() for n, t in tensors.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("method", ["tent", "tsd", "t3a", "lame", "eta"])
@pytest.mark.parametrize("norm", ["batch", "robust"])
def test_bad_rows_are_left_out(method: str, norm: str) -> None:
    told: list[Event] = []
    hyper: dict[str, Any] = {} if method == "lame" else {"norm": norm}
    adapter = trueup.adapt(convnet(), method, guard=Guard(notify=told.append), **hyper)
    twin = trueup.adapt(convnet(), method, guard=True, **hyper)
    for i, x in enumerate(XS[:8]):
        bad = sorted({0, i, 15 - i})
        harm = [torch.nan, torch.inf, -torch.inf, 1e13, None][i % 5]
        x = x.clone()
        for row in bad:
            if harm is None:
                x[row] *= 1e6
            else:
                x[row, 1, 2, 3] = harm
        good = [row for row in range(16) if row not in bad]
        answer = adapter(x)
        assert not answer[bad].any()
        assert torch.equal(answer[good], twin(x[good]))
        assert adapter.health.quarantined == tuple(bad)
        assert twin.health.quarantined == ()
    assert equal(vital(adapter), vital(twin))
    assert adapter.health.events["quarantined"] == len(told) == 8
    assert adapter.health.images == twin.health.images
    adapter(XS[8])
    assert adapter.health.quarantined == ()


def test_a_batch_of_bad_rows_is_answered_by_zeros_and_changes_nothing() -> None:
    adapter = trueup.adapt(convnet(), "tsd", guard=True)
    play(adapter, XS[:3])
    before = copy.deepcopy(adapter)
    for bad in (XS[3] * torch.nan, XS[3][:1] * torch.inf, XS[3] * 1e7):
        answer = adapter(bad)
        assert answer.shape == (len(bad), 6)
        assert answer.dtype == torch.float32
        assert not answer.any()
        assert adapter.health.quarantined == tuple(range(len(bad)))
    assert equal(vital(before), vital(adapter))
    assert same(play(before, XS[3:6]), play(adapter, XS[3:6]))


def test_a_first_batch_of_bad_rows_is_an_error_and_changes_nothing() -> None:
    told: list[Event] = []
    adapter, fresh = (trueup.adapt(convnet(), "tsd", guard=Guard(notify=told.append)) for _ in "ab")
    with pytest.raises(ValueError, match="no row of the first batch"):
        adapter(XS[0] * torch.nan)
    assert adapter.health == fresh.health
    assert told == []
    assert difference(fresh, adapter) == []
    assert same(play(fresh, XS[:2]), play(adapter, XS[:2]))


@pytest.mark.parametrize("built", [False, True])
def test_a_refused_batch_changes_nothing(built: bool) -> None:
    adapter, twin = (trueup.adapt(convnet(), "tent", norm="robust", guard=True) for _ in range(2))
    if built:
        play(adapter, XS[:3])
        play(twin, XS[:3])
    wrong = 5 * XS[3][:, :2].clone()
    wrong[0] = torch.nan
    for x in (wrong, 5 * XS[3][:, :2], 5 * XS[3].double(), XS[3].to(torch.uint8), XS[3][:0], XS[3].flatten(1)):
        with pytest.raises(ValueError, match=r"x |images of shape"):
            adapter(x)
        assert adapter.health == twin.health
        assert adapter.monitor.marks == twin.monitor.marks
        assert difference(twin, adapter) == []


def test_a_batch_that_no_state_can_answer_changes_nothing() -> None:
    """Rows may pass the check and yet be too much for the model: that is no reason to take a healthy adapter back."""

    class Cubes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x[:, :, :2, :2].flatten(1)) + x[:, :, :2, :2].flatten(1) ** 3)

    adapter = trueup.adapt(Cubes(), "tent", lr=1e-2, guard=Guard(window=WINDOW, largest=1e30))
    play(adapter, XS[:4])
    before = copy.deepcopy(adapter)
    assert not adapter(XS[4] * 1e11).any()
    assert adapter.health.state == "healthy"
    assert adapter.health.quarantined == tuple(range(len(XS[4])))
    assert equal(vital(before), vital(adapter))


def test_what_was_huge_may_become_usual() -> None:
    """Black frames for a while, or a first batch of them, must not make all later images huge for ever."""
    faint = [1e-7 * x for x in XS[:1]]
    for first in (XS[:1], faint):
        adapter = trueup.adapt(convnet(), "bn", guard=True)
        play(adapter, [*first, *(torch.zeros(4, 3, 16, 16) for _ in range(100))])
        play(adapter, XS[:20])
        assert adapter(XS[20]).any()


def test_leaving_rows_out_leaves_nothing_more_to_be_left_out() -> None:
    """What remains of a batch is judged the same without the rows that were left out."""
    sizes = torch.tensor([1.0, 1.0, 1e6, 1e6, 1e10])
    bad, usual = bad_rows(sizes.view(5, 1), 1000.0, 0.0)
    again, same_usual = bad_rows(sizes[~bad].view(-1, 1), 1000.0, 0.0)
    assert not again.any()
    assert usual == same_usual


def test_zeros_have_the_shape_of_an_answer_to_such_images() -> None:
    adapter = trueup.adapt(segnet(), "tent", guard=True)
    adapter(scenes(4, seed=0)[0])
    bad = torch.full((2, 3, 64, 64), torch.nan)
    assert adapter(bad).shape == (2, 3, 64, 64)
