import math

import pytest
import torch
from byhand import X, identity_head
from torch import nn

import trueup


def test_answer_by_hand() -> None:
    """Class 0 holds w0 and x0, class 1 holds w1 and x1, which point the same way."""
    x = torch.tensor([[2.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    answer = trueup.adapt(identity_head(), "t3a")(x)
    unit = (2 / math.sqrt(5), 1 / math.sqrt(5))
    c0 = (1 + unit[0], unit[1])
    length = math.hypot(*c0)
    expected = [[(2 * c0[0] + c0[1]) / length, 1.0], [3 * c0[1] / length, 3.0]]
    torch.testing.assert_close(answer, torch.tensor(expected, dtype=torch.float64))


def test_only_the_most_certain_stay() -> None:
    adapter = trueup.adapt(identity_head(), "t3a", per_class=1)
    adapter(X)  # x0 is more certain than w0, x1 than w1
    bank = adapter.state
    assert sorted(bank.features[: bank.size].tolist()) == sorted(X[:2].tolist())


def test_a_class_without_entries_gets_zero() -> None:
    head = nn.Linear(2, 3).double()
    head.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 0.1]], dtype=torch.float64)
    head.bias.data = torch.tensor([0.0, 0.0, -9.0], dtype=torch.float64)
    answer = trueup.adapt(head, "t3a")(torch.tensor([[1.0, 0.2], [0.1, 1.0]], dtype=torch.float64))
    assert answer[:, 2].tolist() == [0.0, 0.0]


def test_unfiltered_bank_keeps_everything() -> None:
    adapter = trueup.adapt(identity_head(), "t3a", per_class=None)
    for _ in range(10):
        adapter(X)
    assert adapter.state.size == 2 + 30


def test_meaningless_values_are_refused() -> None:
    with pytest.raises(ValueError, match="per_class"):
        trueup.adapt(identity_head(), "t3a", per_class=-1)
