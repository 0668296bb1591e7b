"""Methods side by side without labels: both estimates by hand, guards, and what is refused."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from trueup.core.adapter import Adapter
from trueup.core.method import Info, Method
from trueup.core.registry import make_method
from trueup.deploy.compare_methods import Aetta, Trial, _with_dropout, aetta_error, compare_methods
from trueup.deploy.estimates import Score, advise
from trueup.guard.config import Guard
from trueup.model.split_model import Output, SplitModel
from trueup.testing import convnet, images, segnet

SOURCE = make_method("source", {})


def trials(*names: str) -> dict[str, Trial]:
    return {name: Trial(make_method(name, {})) for name in ("source", *names)}


def value(score: Score | None) -> float:
    assert score is not None
    return score.value


def cut(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Any]]:
    return [(x[i : i + size], y[i : i + size].numpy()) for i in range(0, len(x), size)]


def masks(shape: torch.Size, random: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=random) >= 0.4).float() / 0.6


@torch.no_grad()
def by_hand(passes: list[tuple[SplitModel, Tensor]], seed: int) -> float:
    """AETTA of networks and what each saw: ten masks that drop 0.4, the power 3, eight even images."""
    random = torch.Generator().manual_seed(seed)
    changed, total = [], []
    for net, x in passes:
        out = net(x)
        for _ in range(10):
            p = net.classify(out.features * masks(out.features.shape, random)).double().softmax(dim=1)
            changed.append(p.argmax(dim=1) != out.logits.argmax(dim=1))
            total.append(p)
    rows = torch.cat(total)
    classes, n = rows.shape[1], sum(len(x) for _, x in passes)
    middle = (rows.sum(dim=0) / 10 + 8 / classes) / (n + 8)
    diversity = min(1.0, float(-(middle * middle.log()).sum()) / math.log(classes))
    return min(1 - 1 / classes, float(torch.cat(changed).double().mean()) / diversity**3)


def test_aetta_by_hand_over_ragged_batches() -> None:
    x = images(41, seed=0, shift=1.0)[0]
    judge = Aetta(seed=3)
    adapter = Adapter(convnet(), SOURCE)
    judge.observe(adapter)
    answers = torch.cat([adapter(part) for part in (x[:40], x[40:])])
    score = judge.score(answers)
    assert score is not None
    assert score.value == pytest.approx(1 - by_hand([(adapter.net, x[:40]), (adapter.net, x[40:])], 3), abs=1e-9)
    assert len(score.without) == 41


def test_aetta_asks_the_head_that_answered() -> None:
    x = images(96, seed=5, shift=0.3)[0]
    method, judge = make_method("tent-clf", {"lr": 0.5}), Aetta(seed=0)
    watched = Adapter(convnet(), method)
    judge.observe(watched)
    plain, passes, answers = Adapter(convnet(), method, example=x[:2]), [], []
    for part in x.split(32):
        passes.append((copy.deepcopy(plain.net), part))
        answers.append(watched(part))
        assert torch.equal(answers[-1], plain(part))
    score = judge.score(torch.cat(answers))
    assert score is not None
    assert score.value == pytest.approx(1 - by_hand(passes, 0), abs=1e-6)
    after = by_hand([(plain.net, part) for part in x.split(32)], 0)
    assert score.value != pytest.approx(1 - after, abs=1e-2)  # the step did change the head


def test_aetta_without_each_image_is_that_of_the_others() -> None:
    judge, rows = Aetta(), torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.6, 0.1, 0.3]], dtype=torch.float64)
    changed, answers = torch.tensor([0.3, 0.0, 0.1], dtype=torch.float64), rows.log()
    judge.parts = [(answers[:2], changed[:2], rows[:2]), (answers[2:], changed[2:], rows[2:])]
    score = judge.score(answers)
    assert score is not None
    for i, left in enumerate(score.without.tolist()):
        others = [k for k in range(3) if k != i]
        middle = [(sum(float(rows[k, c]) for k in others) + 8 / 3) / 10 for c in range(3)]
        diversity = -sum(m * math.log(m) for m in middle) / math.log(3)
        assert left == pytest.approx(1 - sum(float(changed[k]) for k in others) / 2 / diversity**3)
    assert judge.score(answers.flip(0)) is None  # a guard answered otherwise
    judge.parts = judge.parts[1:]
    alone = judge.score(answers[2:])
    assert alone is not None
    assert alone.without.tolist() == [alone.value]


def error_of(images: int, changed: float, total: torch.Tensor) -> float:
    return float(aetta_error(torch.tensor([changed]).double(), total.double()[None], images)[0])


def test_one_sure_image_is_no_collapse_and_many_are() -> None:
    assert Aetta().score(torch.zeros(1, 10)) is None
    sure = torch.tensor([1.0, *[0.0] * 9])
    assert 0.1 <= error_of(1, 0.1, sure) < 0.12
    assert error_of(300, 30.0, 300 * sure) == pytest.approx(0.9)  # guessing among ten


def test_few_images_of_many_classes_are_diverse_enough() -> None:
    assert error_of(100, 10.0, torch.cat((torch.ones(100), torch.zeros(900)))) == pytest.approx(0.1)


@pytest.mark.parametrize("size", [1, 64])
def test_neither_batches_nor_order_move_the_sources_estimates(size: int) -> None:
    x, y = images(129, seed=5, shift=0.3)
    whole = compare_methods(convnet(), trials(), lambda: cut(x, y, 129))[0]
    order = y.argsort()
    for stream in (cut(x, y, size), cut(x[order], y[order], size)):
        (found,) = compare_methods(convnet(), trials(), lambda stream=stream: stream)
        assert value(found.aetta) == pytest.approx(value(whole.aetta), abs=0.06)
        assert value(found.gde) == pytest.approx(value(whole.gde), abs=0.08)
        assert value(found.accuracy) == pytest.approx(value(whole.accuracy))


@dataclass(frozen=True, kw_only=True)
class Shifty(Method):
    info = Info("shifty", "", "")

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        return out.logits if len(out.logits) > 8 else out.logits + 1


def test_answers_that_are_not_all_the_heads_are_not_estimated_by_aetta() -> None:
    x, y = images(40, seed=0, shift=1.0)
    methods = {**trials("t3a"), "shifty": Trial(Shifty())}
    source, *others = compare_methods(convnet(), methods, lambda: cut(x, y, 36))
    assert source.aetta is not None
    for finding in others:
        assert finding.aetta is None
        assert finding.gde is not None


def test_disagreement_by_hand() -> None:
    x, y = images(48, seed=0, shift=1.0)
    net = Adapter(convnet(), SOURCE, example=x[:2]).net
    random, same = torch.Generator().manual_seed(8), []
    torch.rand(2, net(x).features.shape[1], generator=random)  # the pass that finds the head
    for part in x.split(32):
        out = net(part)
        dropped = net.classify(out.features * masks(out.features.shape, random))
        same.append(dropped.argmax(dim=1) == out.logits.argmax(dim=1))
    (found,) = compare_methods(convnet(), trials(), lambda: cut(x, y, 32), seed=7)
    expected = float(torch.cat(same).double().mean())
    assert 0 < expected < 1
    assert value(found.gde) == pytest.approx(expected)


def test_methods_one_after_the_other_do_not_disturb_each_other() -> None:
    x, y = images(48, seed=0, shift=1.0)
    two = compare_methods(convnet(), {**trials(), "again": Trial(SOURCE)}, lambda: cut(x, y, 16))
    assert value(two[0].gde) == value(two[1].gde)
    assert value(two[0].aetta) == value(two[1].aetta)


def test_features_are_dropped_in_a_pass_and_not_when_the_head_is_asked_again() -> None:
    model, x = convnet().eval(), images(8, seed=0)[0]
    net = Adapter(model, SOURCE, example=x[:2]).net
    assert net.head is not None
    twin = _with_dropout(model, net.head, 0).eval()
    features = net(x).features
    assert not torch.equal(twin(x), model(x))
    assert torch.equal(twin.get_submodule(net.head)(features), model.get_submodule(net.head)(features))
    assert torch.equal(model(x), net(x).logits)  # the original drops nothing


def test_findings_are_those_of_plain_adapters() -> None:
    x, y = images(64, seed=0, shift=0.5)
    first, second = compare_methods(convnet(), trials("tent"), lambda: cut(x, y, 32))
    logits = []
    for name in ("source", "tent"):
        adapter = Adapter(convnet(), make_method(name, {}))
        logits.append(torch.cat([adapter(part) for part in x.split(32)]).double())
    assert first.agreement == 1.0
    answers = [z.argmax(dim=1) for z in logits]
    assert second.agreement == pytest.approx(float((answers[0] == answers[1]).double().mean()))
    assert torch.equal(second.answers, answers[1])
    assert value(second.accuracy) == pytest.approx(float((answers[1] == y).double().mean()))
    p = logits[1].softmax(dim=1)
    assert second.confidence.value == pytest.approx(float(p.max(dim=1).values.mean()))
    assert second.entropy == pytest.approx(float(-(p * p.log()).sum(dim=1).mean()))
    middle = p.mean(dim=0)
    assert second.classes == pytest.approx(math.exp(-float((middle * middle.log()).sum())))


def test_what_cannot_run_is_refused_before_anything_does() -> None:
    x, y = images(8, seed=0)
    ran: list[int] = []

    def tick() -> None:
        ran.append(1)

    def nothing() -> Iterator[Any]:
        yield from ()

    astray = {**trials(), "tsd:params=nosuch": Trial(make_method("tsd", {"params": "nosuch"}))}
    with pytest.raises(ValueError, match="tsd:params=nosuch: nothing to update"):
        compare_methods(convnet(), astray, lambda: cut(x, y, 4), tick=tick)
    with pytest.raises(ValueError, match="none of the images can be read"):
        compare_methods(convnet(), trials(), nothing, tick=tick)
    with pytest.raises(ValueError, match="answers with maps, not classes"):
        compare_methods(segnet(), trials(), lambda: cut(x, y, 4), tick=tick)
    assert ran == []


def test_a_model_without_a_head_has_no_estimates() -> None:
    class Sure(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convnet()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.inner(x)
            return 3 * logits.tanh()

    x, y = images(16, seed=0)
    findings = compare_methods(Sure(), trials("tent"), lambda: [(part, None) for part, _ in cut(x, y, 8)])
    assert [(f.aetta, f.gde, f.accuracy) for f in findings] == [(None, None, None)] * 2
    advice = advise(findings)
    assert advice.take == ("source",)
    assert "cannot be estimated on this data" in advice.reasons[0]


def test_a_guard_watches_both_runs() -> None:
    x, y = images(480, seed=0, shift=1.0)
    wild = make_method("tent", {"lr": 1.0})
    free, guarded = compare_methods(
        convnet(), {"free": Trial(wild), "guarded": Trial(wild, guard=True)}, lambda: cut(x, y, 32)
    )
    adapter = Adapter(convnet(), wild, guard=Guard())
    expected = torch.cat([adapter(part) for part in x.split(32)]).argmax(dim=1)
    assert torch.equal(guarded.answers, expected)
    assert not torch.equal(free.answers, expected)
