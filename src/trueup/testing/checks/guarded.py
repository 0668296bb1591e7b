"""A method under a guard: watching changes nothing, a bad row disturbs no other, robust statistics serve."""

import torch

from trueup.testing.case import Case, difference, play, reload, same
from trueup.testing.checks.contract import check


@check
def guard_only_watches(case: Case) -> None:
    """Check that a guard changes no bit of the answers while nothing is wrong."""
    xs = case.stream(6)
    assert same(play(case.adapter(), xs), play(case.adapter(guard=True), xs))


@check
def guarded_reset_and_resume(case: Case) -> None:
    """With a guard, too, reset and resume are exact."""
    xs = case.stream(14)
    adapter, fresh = case.adapter(guard=True), case.adapter(guard=True, example=xs[0])
    play(adapter, xs[:12])
    later = reload(adapter, case.adapter(guard=True))
    assert difference(adapter, later) == []
    assert same(play(adapter, xs[12:]), play(later, xs[12:]))
    adapter.reset()
    assert difference(fresh, adapter) == []


@check
def bad_rows_disturb_nobody(case: Case) -> None:
    """Check that rows with NaN, infinite or huge values are answered by zeros, the others as if alone."""
    xs = case.stream(4)
    adapter, twin = case.adapter(guard=True), case.adapter(guard=True)
    for i, x in enumerate(xs):
        bad = torch.zeros(len(x), dtype=torch.bool)
        bad[[i, 7, -1]] = True
        harmed = x.clone()
        harmed[i, ..., 0, 0] = torch.nan
        harmed[7, ..., 1, 1] = -torch.inf
        harmed[-1] *= 1e6
        answer = adapter(harmed)
        assert not answer[bad].any()
        assert torch.equal(answer[~bad], twin(x[~bad]))
        assert adapter.health.quarantined == tuple(bad.nonzero().flatten().tolist())


@check
def robust_statistics(case: Case) -> None:
    """With robust statistics reset and resume are exact, and answers stay finite on single images."""
    xs = case.stream(6)
    adapter, fresh = case.adapter(norm="robust"), case.adapter(norm="robust", example=xs[0])
    play(adapter, [*xs[:3], xs[0][:1]])
    later = reload(adapter, case.adapter(norm="robust"))
    answers = play(adapter, [*xs[3:], xs[1][:1]])
    assert all(a.isfinite().all() for a in answers)
    assert same(answers, play(later, [*xs[3:], xs[1][:1]]))
    adapter.reset()
    assert difference(fresh, adapter) == []
