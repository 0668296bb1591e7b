"""Methods side by side without labels: both estimates by hand, what is refused, and what is recommended."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trueup.core.adapter import Adapter
from trueup.core.listening import heard
from trueup.core.method import Info, Method
from trueup.core.registry import make_method
from trueup.core.split import Output, SplitModel
from trueup.deploy.compare import Aetta, Finding, _disturbed, advise, look
from trueup.testing import convnet, images, segnet

BASE = Finding("source", 1.0, 0.8, 0.7, 9.0, 0.6, 0.65, None, 1.0)
SOURCE = make_method("source", {})


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
    adapter = Adapter(convnet(), heard(SOURCE, judge.hear, judge.first))
    for part in (x[:40], x[40:]):
        adapter(part)
    assert judge.error == pytest.approx(by_hand([(adapter.net, x[:40]), (adapter.net, x[40:])], 3), abs=1e-9)
    assert judge.images == 41


def test_aetta_asks_the_head_that_answered() -> None:
    x = images(96, seed=5, shift=0.3)[0]
    method, judge = make_method("tent-clf", {"lr": 0.5}), Aetta(seed=0)
    watched = Adapter(convnet(), heard(method, judge.hear, judge.first))
    plain, passes = Adapter(convnet(), method, example=x[:2]), []
    for part in x.split(32):
        passes.append((copy.deepcopy(plain.net), part))
        assert torch.equal(watched(part), plain(part))
    assert judge.error == pytest.approx(by_hand(passes, 0), abs=1e-6)
    after = by_hand([(plain.net, part) for part in x.split(32)], 0)
    assert judge.error != pytest.approx(after, abs=1e-2)  # the step did change the head


def test_one_sure_image_is_no_collapse_and_many_are() -> None:
    judge = Aetta()
    assert judge.error is None
    sure = torch.tensor([1.0, *[0.0] * 9], dtype=torch.float64)
    judge.images, judge.changed, judge.total = 1, 0.1, sure
    assert judge.error is not None
    assert 0.1 <= judge.error < 0.12
    judge.images, judge.changed, judge.total = 300, 30.0, 300 * sure
    assert judge.error == pytest.approx(0.9)  # guessing among ten


def test_few_images_of_many_classes_are_diverse_enough() -> None:
    judge = Aetta()
    judge.images, judge.changed = 100, 10.0
    judge.total = torch.cat((torch.ones(100), torch.zeros(900))).double()
    assert judge.error == pytest.approx(0.1)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_neither_batches_nor_order_move_the_sources_estimates(size: int) -> None:
    x, y = images(129, seed=5, shift=0.3)
    whole = look(convnet(), {"source": SOURCE}, lambda: cut(x, y, 129))[0]
    order = y.argsort()
    for stream in (cut(x, y, size), cut(x[order], y[order], size)):
        (found,) = look(convnet(), {"source": SOURCE}, lambda stream=stream: stream)
        assert found.aetta == pytest.approx(whole.aetta, abs=0.06)
        assert found.gde == pytest.approx(whole.gde, abs=0.08)
        assert found.accuracy == whole.accuracy


@dataclass(frozen=True, kw_only=True)
class Shifty(Method):
    info = Info("shifty", "", "")

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        return out.logits if len(out.logits) > 8 else out.logits + 1


def test_answers_that_are_not_all_the_heads_are_not_estimated_by_aetta() -> None:
    x, y = images(40, seed=0, shift=1.0)
    methods = {"source": SOURCE, "t3a": make_method("t3a", {}), "shifty": Shifty()}
    source, *others = look(convnet(), methods, lambda: cut(x, y, 36))
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
    (found,) = look(convnet(), {"source": SOURCE}, lambda: cut(x, y, 32), seed=7)
    expected = float(torch.cat(same).double().mean())
    assert 0 < expected < 1
    assert found.gde == pytest.approx(expected)


def test_methods_one_after_the_other_do_not_disturb_each_other() -> None:
    x, y = images(48, seed=0, shift=1.0)
    two = look(convnet(), {"source": SOURCE, "again": SOURCE}, lambda: cut(x, y, 16))
    assert (two[0].gde, two[0].aetta) == (two[1].gde, two[1].aetta)


def test_features_are_dropped_in_a_pass_and_not_when_the_head_is_asked_again() -> None:
    model, x = convnet().eval(), images(8, seed=0)[0]
    net = Adapter(model, SOURCE, example=x[:2]).net
    assert net.head is not None
    twin = _disturbed(model, net.head, 0).eval()
    features = net(x).features
    assert not torch.equal(twin(x), model(x))
    assert torch.equal(twin.get_submodule(net.head)(features), model.get_submodule(net.head)(features))
    assert torch.equal(model(x), net(x).logits)  # the original drops nothing


def test_findings_are_those_of_plain_adapters() -> None:
    x, y = images(64, seed=0, shift=0.5)
    methods = {name: make_method(name, {}) for name in ("source", "tent")}
    first, second = look(convnet(), methods, lambda: cut(x, y, 32))
    logits = []
    for name in methods:
        adapter = Adapter(convnet(), make_method(name, {}))
        logits.append(torch.cat([adapter(part) for part in x.split(32)]).double())
    assert first.agreement == 1.0
    answers = [z.argmax(dim=1) for z in logits]
    assert second.agreement == pytest.approx(float((answers[0] == answers[1]).double().mean()))
    assert second.accuracy == pytest.approx(float((answers[1] == y).double().mean()))
    p = logits[1].softmax(dim=1)
    assert second.confidence == pytest.approx(float(p.max(dim=1).values.mean()))
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

    astray = {"source": SOURCE, "tsd:params=nosuch": make_method("tsd", {"params": "nosuch"})}
    with pytest.raises(ValueError, match="tsd:params=nosuch: nothing to update"):
        look(convnet(), astray, lambda: cut(x, y, 4), tick=tick)
    with pytest.raises(ValueError, match="none of the images can be read"):
        look(convnet(), {"source": SOURCE}, nothing, tick=tick)
    with pytest.raises(ValueError, match="answers with maps, not classes"):
        look(segnet(), {"source": SOURCE}, lambda: cut(x, y, 4), tick=tick)
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
    methods = {"source": SOURCE, "tent": make_method("tent", {})}
    findings = look(Sure(), methods, lambda: [(part, None) for part, _ in cut(x, y, 8)])
    assert [(f.aetta, f.gde, f.accuracy) for f in findings] == [(None, None, None)] * 2
    advice = advise(findings)
    assert advice.name == "source"
    assert "nothing can be estimated" in advice.reasons[0]


def test_the_best_estimate_is_recommended() -> None:
    tent, tsd = (replace(BASE, name=name, agreement=0.6, aetta=e) for name, e in (("tent", 0.7), ("tsd", 0.8)))
    advice = advise([BASE, tent, tsd])
    assert advice.name == "tsd"
    assert "80.0%" in advice.reasons[0]
    assert "AETTA" in advice.reasons[0]


def test_labels_decide_where_there_are_any() -> None:
    source, tent = replace(BASE, accuracy=0.72), replace(BASE, name="tent", aetta=0.9, gde=0.9, accuracy=0.47)
    tsd = replace(BASE, name="tsd", aetta=0.1, classes=3.0, accuracy=0.75)
    advice = advise([source, tent])
    assert advice.name == "source"
    assert "accuracy on the labelled images is 72.0%" in advice.reasons[0]
    assert advise([source, tent, tsd]).name == "tsd"
    assert "the source's 72.0%" in advise([source, tent, tsd]).reasons[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"classes": 3.0}, "uses 3.0 classes"), ({"agreement": 0.1}, "agrees with the source in only 10%")],
)
def test_what_looks_collapsed_is_not(change: dict[str, float], reason: str) -> None:
    bad = replace(BASE, name="tent", aetta=0.99, **{"agreement": 0.6, **change})
    advice = advise([BASE, bad])
    assert advice.name == "source"
    assert "every other method shows signs of collapse" in advice.reasons[0]
    assert reason in advice.reasons[1]
    with_good = advise([BASE, bad, replace(BASE, name="tsd", aetta=0.7)])
    assert with_good.name == "tsd"
    assert reason in with_good.reasons[-1]


def test_without_a_lead_nothing_is_changed() -> None:
    assert advise([BASE, replace(BASE, name="tent", aetta=0.605)]).name == "source"
    assert advise([BASE]).reasons == ("no other method was tried",)


def test_who_was_not_judged_is_named_and_judged_by_disagreement_only_alone() -> None:
    lame = replace(BASE, name="lame", aetta=None, gde=0.8)
    advice = advise([BASE, replace(BASE, name="tent", aetta=0.7), lame])
    assert advice.name == "tent"
    assert "not judged" in advice.reasons[-1]
    assert "lame 80.0% (GDE beside each; the source's is 65.0%)" in advice.reasons[-1]
    assert advise([BASE, replace(BASE, name="tent", aetta=0.6), lame]).name == "source"
    alone = advise([BASE, lame])
    assert alone.name == "lame"
    assert "estimated by GDE is 80.0%, the source's 65.0%" in alone.reasons[0]
    assert "AETTA has no estimate of lame" in alone.reasons[-1]
    assert advise([BASE, replace(lame, gde=0.655)]).name == "source"
