"""Batches that are taken in several parts: by methods that update in between, or take one image at a time."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_monitor import Script
from torch import Tensor, nn

import trueup
from trueup import Guard
from trueup.testing import convnet, images
from trueup.testing.case import difference, play, same

X = images(14, seed=5, shift=1.0)[0]
METHODS = [("note", {"capacity": 4, "every": 4}), ("rotta", {"capacity": 4, "every": 4}), ("memo", {"views": 2})]


class Fragile(nn.Module):
    """Has no answer to an image with a very bright pixel. Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.asked = convnet(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += 1
        dark: Tensor = x.flatten(1).amax(dim=1, keepdim=True) < 50
        out: Tensor = self.inner(x)
        return torch.where(dark, out, torch.nan)


def broken(at: int) -> Tensor:
    x = X.clone()
    x[at, 0, 0, 0] = 100.0
    return x


@pytest.mark.parametrize(("method", "hyper"), METHODS, ids=lambda v: str(v))
def test_a_failure_in_a_later_part_changes_nothing(method: str, hyper: dict[str, Any]) -> None:
    adapter = trueup.adapt(Fragile(), method, **hyper)
    adapter(X[:6])
    before = copy.deepcopy(adapter)
    with pytest.raises(ValueError, match="not finite"):
        adapter(broken(9))
    assert difference(adapter, before) == []
    assert (adapter.batches, adapter.updates) == (before.batches, before.updates)
    assert same(play(adapter, [X]), play(before, [X]))


@pytest.mark.parametrize(("method", "hyper"), METHODS[:2], ids=lambda v: str(v))
def test_with_a_guard_the_other_rows_are_learnt_once(method: str, hyper: dict[str, Any]) -> None:
    """They are answered, and leave the adapter, as if the bad one had not been there."""
    some, all_of_it = (trueup.adapt(Fragile(), method, guard=True, **hyper) for _ in range(2))
    answers = [some(X[:6]), some(torch.cat([X[:9], X[10:]]))]
    assert torch.equal(all_of_it(X[:6]), answers[0])
    found = all_of_it(broken(9))
    assert torch.equal(found[9], torch.zeros_like(found[9]))
    assert torch.equal(torch.cat([found[:9], found[10:]]), answers[1])
    assert all_of_it.updates == some.updates
    assert all_of_it.health.images == some.health.images


def test_while_nothing_is_learnt_a_batch_is_not_cut_up() -> None:
    guard = Guard(rules=(Script(script={0: "suspect"}),), window=4096, compare=10**6)
    adapter = trueup.adapt(Fragile(), "note", guard=guard, every=8, capacity=8)
    adapter(X[:7])  # one to go, and under suspicion from here on
    assert adapter.health.state == "suspect"
    asked: Any = adapter.net.model
    adapter(X[:8])
    before = asked.asked
    adapter(X[:8])
    assert asked.asked - before <= 2  # the adapter and the source that it is compared with


@pytest.mark.parametrize("hyper", [{"norm": "robust"}, {"preset": "safe"}], ids=str)
def test_many_views_of_one_image_are_enough_to_learn_from(hyper: dict[str, Any]) -> None:
    adapter = trueup.adapt(convnet(), "memo", views=4, **hyper)
    adapter(X[:5])
    assert adapter.updates == 5


def test_a_state_of_images_that_were_normalised_otherwise_is_refused(tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "roid", mean=0.5, std=0.25)
    adapter(X)
    adapter.save(tmp_path / "state")
    for other in ({}, {"mean": 0.5, "std": 0.5}):
        with pytest.raises(ValueError, match="images that were normalised otherwise"):
            trueup.adapt(convnet(), "roid", **other).load(tmp_path / "state")
