"""Losses against values worked out by hand."""

import math

import pytest
import torch

from trueup import losses

LOGITS = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]], dtype=torch.float64)  # softmax: (1/4, 3/4), (1/2, 1/2)
QUARTER = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))


def test_entropy() -> None:
    assert losses.entropy(LOGITS).tolist() == pytest.approx([QUARTER, math.log(2)])


def test_entropy_of_certain_predictions_is_exactly_zero() -> None:
    assert losses.entropy(torch.tensor([[0.0, 1000.0, -1000.0]])).tolist() == [0.0]


def test_soft_cross_entropy() -> None:
    target = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    assert losses.soft_cross_entropy(target, LOGITS).tolist() == pytest.approx([math.log(4), math.log(2)])


def test_kl_divergence_is_of_the_first_from_the_second() -> None:
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert losses.kl_divergence(LOGITS[:1], LOGITS[1:]).tolist() == pytest.approx([expected])


def test_negative_diversity() -> None:
    mean = (0.375, 0.625)
    expected = sum(m * math.log(m + 1e-5) for m in mean)
    assert float(losses.negative_diversity(LOGITS)) == pytest.approx(expected)


def test_cosine_does_not_divide_by_zero() -> None:
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[4.0, 3.0], [-30.0, -40.0]])
    torch.testing.assert_close(losses.cosine(a, b), torch.tensor([[0.96, -1.0], [0.0, 0.0]]))


def test_pixels_are_as_images() -> None:
    """(N, C, H, W) gives what its pixels give as rows (N·H·W, C)."""
    maps = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    rows = maps.permute(0, 2, 3, 1).reshape(-1, 3)
    torch.testing.assert_close(losses.entropy(maps).flatten(), losses.entropy(rows))
    torch.testing.assert_close(losses.negative_diversity(maps), losses.negative_diversity(rows))
    torch.testing.assert_close(losses.kl_divergence(maps, 2 * maps).flatten(), losses.kl_divergence(rows, 2 * rows))
    s = maps.softmax(dim=1)
    found = losses.soft_cross_entropy(s, maps).flatten()
    torch.testing.assert_close(found, losses.soft_cross_entropy(rows.softmax(dim=1), rows))
