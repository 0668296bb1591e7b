import math

import pytest
import torch
from byhand import X, identity_head, loss_of

import trueup


def test_loss_by_hand() -> None:
    """Above 0.6 are the first, labelled 0 with 3/4, and the second, labelled 1 with 10/11."""
    assert loss_of("pl", threshold=0.6) == pytest.approx(-(math.log(0.75) + math.log(10 / 11)) / 2)
    assert loss_of("pl") == pytest.approx(-math.log(10 / 11))


def test_the_threshold_is_strict() -> None:
    assert loss_of("pl", torch.zeros(1, 2, dtype=torch.float64), threshold=0.5) is None


def test_nothing_confident_changes_nothing() -> None:
    adapter = trueup.adapt(identity_head(), "pl", lr=0.1)
    adapter(X)
    before, state = adapter.net.model.weight.clone(), len(adapter.optimizer.state)
    for _ in range(3):
        adapter(X[2:])
    assert torch.equal(adapter.net.model.weight, before)
    assert adapter.updates == 1
    assert len(adapter.optimizer.state) == state


@pytest.mark.parametrize("threshold", [-0.1, 1.1, "high"])
def test_meaningless_thresholds_are_refused(threshold: object) -> None:
    with pytest.raises(ValueError, match="threshold"):
        trueup.adapt(identity_head(), "pl", threshold=threshold)
