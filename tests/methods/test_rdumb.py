import math
from pathlib import Path

import pytest
import torch
from byhand import PROBS, X, entropy, identity_head, loss_of

import trueup
from trueup.testing import convnet, images

XS = [images(16, seed=s, shift=1.0)[0] for s in range(8)]


def test_loss_by_hand() -> None:
    """E0 = 0.9 ln 2 keeps the first and the second."""
    threshold = 0.9 * math.log(2)
    h = [entropy(p) for p in PROBS[:2]]
    assert loss_of("rdumb", margin=0.9) == pytest.approx(sum(math.exp(threshold - v) * v for v in h) / 2)


def test_everything_starts_afresh_after_the_interval() -> None:
    """Then the stream is answered as at first: by ETA on a new adapter."""
    adapter = trueup.adapt(convnet(), "rdumb", every=3, lr=0.05, example=XS[0])
    for start in (0, 3):
        eta = trueup.adapt(convnet(), "eta", lr=0.05)
        for i in range(start, start + 3):
            assert int(adapter.state.count) == i - start
            assert torch.equal(adapter(XS[i]), eta(XS[i]))
        assert eta.updates > 0
        assert (adapter.batches, int(adapter.state.count)) == (start + 3, 0)
        assert not adapter.state.mean.any()
        assert not adapter.optimizer.state
        assert all(
            torch.equal(p, q) for p, q in zip(adapter.net.model.parameters(), convnet().parameters(), strict=True)
        )


def test_before_the_interval_is_over_it_is_eta() -> None:
    adapter, eta = trueup.adapt(convnet(), "rdumb"), trueup.adapt(convnet(), "eta")
    assert all(torch.equal(adapter(x), eta(x)) for x in XS)
    assert adapter.method.every == 1000


def test_the_count_goes_on_after_loading(tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "rdumb", every=3)
    for x in XS[:2]:
        adapter(x)
    adapter.save(tmp_path / "state")
    later = trueup.adapt(convnet(), "rdumb", every=3)
    later.load(tmp_path / "state")
    assert int(later.state.count) == 2
    later(XS[2])
    assert (later.batches, int(later.state.count)) == (3, 0)


def test_batches_count_not_steps_and_also_those_without_an_update() -> None:
    adapter = trueup.adapt(identity_head(), "rdumb", every=3, steps=2, params="all", margin=0.9)
    for count, x in ((1, X), (2, X[2:]), (0, X)):
        adapter(x)
        assert int(adapter.state.count) == count


@pytest.mark.parametrize("every", [0, 1.5, None])
def test_meaningless_intervals_are_refused(every: object) -> None:
    with pytest.raises(ValueError, match="every"):
        trueup.adapt(identity_head(), "rdumb", every=every)
