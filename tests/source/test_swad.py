"""SWAD on loss sequences made by hand: segment i has the mean i, so that every average is a known number."""

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trueup.source.swad import Swad


def feed(swad: Swad, losses: Sequence[float], steps: int = 1, start: int = 0) -> int | None:
    """Segment i consists of steps around i; returns the validation that ended the training."""
    for i, loss in enumerate(losses, start):
        for k in range(steps):
            swad.step({"w": torch.tensor([i + k - (steps - 1) / 2], dtype=torch.float64)})
        if swad.validate(loss):
            return i
    return None


def mean(swad: Swad) -> float:
    return float(swad.average()["w"])


def brute(losses: Sequence[float], converge: int, tolerate: int, tolerance: float) -> tuple[int | None, int | None]:
    """The paper's algorithm over the whole list, in exact fractions: the first and the last segment."""
    v = [Fraction(loss) for loss in losses]
    start, threshold = None, Fraction(0)
    for i in range(len(v)):
        if start is None:
            if i >= converge - 1 and v[i - converge + 1] == min(v[i - converge + 1 : i + 1]):
                start = i - converge + 1
                threshold = (1 + Fraction(tolerance)) * sum(v[start : i + 1]) / converge
        elif i >= tolerate - 1 and min(v[i - tolerate + 1 : i + 1]) > threshold:
            return start, i - tolerate
    return start, None


# Known by hand


def test_starts_at_the_first_loss_that_the_next_two_do_not_beat_and_ends_before_six_above_the_threshold() -> None:
    losses = [5, 4, 3, 2, 2.5, 3, 2, 2, 9, 9, 9, 9, 9, 9]  # start 3: 2, 2.5, 3; threshold 1.3 × 2.5 = 3.25
    swad = Swad(3, 6, 0.3)
    assert feed(swad, losses) == 13
    assert (swad.start, swad.end) == (3, 7)
    assert swad.threshold == pytest.approx(3.25)
    assert mean(swad) == pytest.approx((3 + 4 + 5 + 6 + 7) / 5)


def test_without_overfitting_the_average_goes_to_the_last_segment() -> None:
    swad = Swad(3, 6, 0.3)
    assert feed(swad, [5, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]) is None
    assert (swad.start, swad.end) == (2, None)
    assert mean(swad) == pytest.approx((2 + 12) / 2)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_without_convergence_it_is_the_last_segment(count: int) -> None:
    swad = Swad(3, 6, 0.3)
    assert feed(swad, [10.0 - i for i in range(count)]) is None
    assert (swad.start, swad.threshold, swad.end) == (None, None, None)
    assert mean(swad) == count - 1


def test_a_tie_counts_as_convergence() -> None:
    swad = Swad(3, 6, 0.3)
    feed(swad, [3, 2, 2, 2])
    assert swad.start == 1


def test_losses_at_the_threshold_itself_do_not_end_it() -> None:
    swad = Swad(1, 2, 0.5)  # threshold 1.5 × 2 = 3
    assert feed(swad, [2, 3, 3, 3, 3]) is None
    assert mean(swad) == 2
    swad = Swad(1, 2, 0.5)
    assert feed(swad, [2, 3, 3.0001, 3.0001]) == 3
    assert (swad.start, swad.end) == (0, 1)
    assert mean(swad) == 0.5


def test_one_loss_below_the_threshold_starts_the_patience_anew() -> None:
    swad = Swad(1, 3, 0.5)
    assert feed(swad, [2, 4, 4, 3, 4, 4, 4]) == 6
    assert swad.end == 3
    assert mean(swad) == 1.5


def test_converge_of_one_starts_at_the_first_validation() -> None:
    swad = Swad(1, 6, 0.3)
    feed(swad, [9, 8, 7])
    assert swad.start == 0
    assert swad.threshold == pytest.approx(1.3 * 9)
    assert mean(swad) == 1


def test_tolerate_below_converge_may_end_inside_the_first_losses() -> None:
    swad = Swad(4, 1, 0.0)  # 2, 4, 2, 8: threshold 4
    assert feed(swad, [2, 4, 2, 8, 8]) == 4
    assert (swad.start, swad.end) == (0, 3)
    assert mean(swad) == 1.5


def test_tolerate_above_converge_holds_back_what_may_lie_after_the_end() -> None:
    swad = Swad(1, 5, 0.5)
    assert feed(swad, [2, 9, 9, 9, 9, 9]) == 5
    assert (swad.start, swad.end) == (0, 0)
    assert mean(swad) == 0


def test_equal_losses_never_end_it_though_their_mean_is_rounded() -> None:
    """With a tolerance of 0 the threshold is the mean, which in floating point can lie below each of its terms."""
    loss = 0.9383319372490717
    assert sum([loss] * 3) / 3 < loss
    swad = Swad(3, 6, 0.0)
    assert feed(swad, [loss] * 5) is None
    assert mean(swad) == 2


def test_a_segment_is_the_mean_of_its_steps() -> None:
    swad = Swad()
    for value in (1.0, 2.0, 6.0):
        swad.step({"w": torch.tensor([value, -value])})
    swad.validate(1.0)
    assert torch.allclose(swad.average()["w"], torch.tensor([3.0, -3.0]))


def test_segments_weigh_the_same_however_many_steps_they_have() -> None:
    swad = Swad(1, 6, 0.3)
    for segment in ([0.0], [3.0, 3.0, 3.0], [1.0, 5.0]):
        for value in segment:
            swad.step({"w": torch.tensor([value])})
        swad.validate(1.0)
    assert mean(swad) == pytest.approx((0 + 3 + 3) / 3)


def test_steps_after_the_last_validation_are_left_out() -> None:
    swad = Swad(1, 6, 0.3)
    feed(swad, [1, 1])
    swad.step({"w": torch.tensor([100.0], dtype=torch.float64)})
    assert mean(swad) == 0.5


def test_the_average_may_be_asked_for_at_any_time_and_changes_nothing() -> None:
    swad = Swad(1, 6, 0.3)
    for i in range(9):
        feed(swad, [1.0], start=i)
        assert mean(swad) == mean(swad) == pytest.approx(i / 2)


def test_weights_that_go_on_being_trained_do_not_change_what_was_taken() -> None:
    layer, swad = nn.Linear(1, 1), Swad(1, 6, 0.3)
    swad.step(dict(layer.named_parameters()))
    swad.validate(1.0)
    before = layer.weight.item()
    with torch.no_grad():
        layer.weight += 1
    assert swad.average()["weight"].item() == before
    assert not swad.average()["weight"].requires_grad


def test_asking_before_any_validation_says_what_to_do() -> None:
    swad = Swad()
    swad.step({"w": torch.ones(1)})
    with pytest.raises(ValueError, match="at least one validation; train longer, or validate more often"):
        swad.average()


# Against the algorithm over the whole list


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], int, int, float]:
    """Losses in quarters, so that sums and thresholds are exact and ties are frequent."""
    losses = draw(st.lists(st.integers(1, 16).map(lambda n: n / 4), min_size=1, max_size=30))
    converge, tolerate = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    return losses, converge, tolerate, draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(1, 3))
def test_equals_the_paper_over_the_whole_list(case: tuple[list[float], int, int, float], steps: int) -> None:
    losses, converge, tolerate, tolerance = case
    start, end = brute(losses, converge, tolerate, tolerance)
    swad = Swad(converge, tolerate, tolerance)
    stopped = feed(swad, losses, steps)
    assert (swad.start, swad.end) == (start, end)
    assert stopped == (None if end is None else end + tolerate)
    first, last = (len(losses) - 1 if start is None else start), (len(losses) - 1 if end is None else end)
    assert first <= last
    assert mean(swad) == pytest.approx(sum(range(first, last + 1)) / (last + 1 - first))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_memory_is_bounded_by_the_longer_patience(case: tuple[list[float], int, int, float]) -> None:
    losses, converge, tolerate, tolerance = case
    swad = Swad(converge, tolerate, tolerance)
    for i, loss in enumerate(losses):
        done = feed(swad, [loss], start=i) is not None
        assert len(swad.waiting) <= (max(1, converge - 1) if swad.threshold is None else tolerate)
        assert len(swad.tensors()) <= max(converge, tolerate) + 2
        if done:
            break


# State


def disk(swad: Swad) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state as a file would give it back."""
    return {name: t.clone() for name, t in swad.tensors().items()}, json.loads(json.dumps(swad.values()))


def again(swad: Swad) -> Swad:
    fresh = Swad(swad.converge, swad.tolerate, swad.tolerance)
    fresh.restore(*disk(swad))
    return fresh


@pytest.mark.parametrize(
    "losses",
    [[5, 4, 3, 2, 2.5, 3, 2, 2, 9, 9, 9, 9, 9, 9], [9, 8, 7, 6, 5, 4, 3, 2, 1], [5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
    ids=["ends", "never converges", "never ends"],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_going_on_from_any_step_gives_the_same_average_to_the_bit(losses: list[float], steps: int) -> None:
    values = torch.randn(len(losses), steps, 5, generator=torch.Generator().manual_seed(0))
    whole, fresh = Swad(), Swad()
    for segment, loss in zip(values, losses, strict=True):
        for row in segment:
            fresh = again(fresh)
            whole.step({"a.w": row, "b": row[:2]})
            fresh.step({"a.w": row, "b": row[:2]})
        fresh = again(fresh)
        assert whole.validate(loss) == fresh.validate(loss)
        a, b = whole.average(), fresh.average()
        assert a.keys() == b.keys() == {"a.w", "b"}
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert whole.values() == fresh.values()
        assert (whole.start, whole.end, whole.threshold) == (fresh.start, fresh.end, fresh.threshold)


def test_more_than_ten_waiting_segments_keep_their_order() -> None:
    swad = Swad(1, 12, 0.3)
    feed(swad, [1.0] * 12)
    assert [float(w["w"]) for w in again(swad).waiting] == list(range(12))
