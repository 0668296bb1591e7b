"""The plain model that an adapter leaves behind."""

import copy

import torch

from trueup.testing.case import Case, SkipCheck, difference
from trueup.testing.checks.contract import check


@check
def unwrapped_answers_alike(case: Case) -> None:
    """On a strong shift the unwrapped model is at most three points below what the adapter answered; it only copies.

    A method whose gain is not in weights and statistics says so in `Info.lost`.
    """
    if case.method.info.lost:
        raise SkipCheck(f"the plain model does not have {case.method.info.lost}")
    size = 96 if case.task == "classification" else 8
    batches = [case.images(size, seed=80_000 + i, shift=1.3) for i in range(6)]
    adapter = case.adapter()
    online = [case.right(adapter(x), y) for x, y in batches][-3:]
    before = copy.deepcopy(adapter)
    plain = adapter.unwrap()
    assert difference(before, adapter) == []
    assert not any(module.training for module in plain.modules())
    with torch.no_grad():
        alone = [case.right(plain(x), y) for x, y in batches[-3:]]
    ours, theirs = (float(torch.stack(part).mean()) for part in (alone, online))
    assert ours >= theirs - 0.03, f"{ours:.1%} unwrapped after {theirs:.1%}"
