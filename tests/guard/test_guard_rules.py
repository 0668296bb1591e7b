"""Rules of a guard, each against numbers worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import trueup
from trueup.guard.rules import BatchSignals, batch_signals
from trueup.rules import Action, Agreement, Concentration, Diversity, Drift, Rule, Spike
from trueup.testing import convnet, images

G = torch.Generator().manual_seed(0)


def compared(
    ours: Tensor, theirs: Tensor | None = None, drift: float | None = None, multilabel: bool = False
) -> BatchSignals:
    step: dict[str, Any] = {"loss": None, "updates": 0, "multilabel": multilabel}
    source = None if theirs is None else batch_signals(theirs, source=None, drift=None, **step)
    return batch_signals(ours, source=source, drift=drift, **step)


def told(
    rule: Rule, classes: int, stream: list[tuple[Tensor, Tensor | None]]
) -> tuple[list[Action | None], dict[str, float]]:
    state, numbers = rule.init(classes), {}
    return [rule.after(compared(*pair), state, numbers) for pair in stream], numbers


def kinds(actions: list[Action | None]) -> list[str | None]:
    return [None if action is None else action.kind for action in actions]


def answers(classes: list[int], count: int, height: float = 6.0) -> Tensor:
    """Logits that say these classes."""
    return height * torch.nn.functional.one_hot(torch.tensor(classes), count).float()


def softmax(row: list[float]) -> list[float]:
    parts = [math.exp(v - max(row)) for v in row]
    return [p / math.fsum(parts) for p in parts]


def entropy(p: list[float]) -> float:
    return -math.fsum(v * math.log(v) for v in p if v > 0)


def test_signs_of_images() -> None:
    logits = 3 * torch.randn(7, 4, generator=G)
    seen = compared(logits)
    probs = [softmax(row) for row in logits.tolist()]
    torch.testing.assert_close(seen.probs, torch.tensor(probs))
    assert seen.entropy == pytest.approx(math.fsum(map(entropy, probs)) / 7 / math.log(4), rel=1e-5)
    assert seen.classes.tolist() == [row.index(max(row)) for row in logits.tolist()]
    torch.testing.assert_close(seen.mean_logits, logits.mean(dim=0))


def test_signs_of_pixels_and_labels() -> None:
    logits = 3 * torch.randn(3, 4, 2, 5, generator=G)
    seen, flat = compared(logits), logits.movedim(1, -1).reshape(-1, 4)
    probs = [softmax(row) for row in flat.tolist()]
    torch.testing.assert_close(seen.probs, torch.tensor(probs).view(3, 10, 4).mean(dim=1))
    assert seen.entropy == pytest.approx(math.fsum(map(entropy, probs)) / 30 / math.log(4), rel=1e-5)
    assert seen.classes.shape == (3, 2, 5)
    torch.testing.assert_close(seen.mean_logits, flat.mean(dim=0))
    logits = 3 * torch.randn(5, 3, generator=G)
    seen = compared(logits, multilabel=True)
    present = torch.tensor([[1 / (1 + math.exp(-v)) for v in row] for row in logits.tolist()])
    torch.testing.assert_close(seen.probs[:, 1], present.mean(dim=1))
    assert torch.equal(seen.classes, (logits > 0).long())
    each = [entropy([1 - p, p]) for p in present.flatten().tolist()]
    assert seen.entropy == pytest.approx(math.fsum(each) / 15 / math.log(2), rel=1e-5)


def test_diversity_by_hand() -> None:
    ours, theirs, ratio = [0.0] * 5, [0.0] * 5, 0.0
    stream = [(torch.randn(n, 5, generator=G) * 2, torch.randn(n, 5, generator=G) * 2) for n in (40, 16, 1, 30)]
    for a, b in stream:
        kept = math.exp(-len(a) / 128)
        for sums, logits in ((ours, a), (theirs, b)):
            probs = [softmax(row) for row in logits.tolist()]
            for k in range(5):
                sums[k] = kept * sums[k] + math.fsum(p[k] for p in probs)
        ratio = entropy([v / sum(ours) for v in ours]) / entropy([v / sum(theirs) for v in theirs])
    _, numbers = told(Diversity(), 5, stream)
    assert numbers["diversity_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert numbers["effective_classes"] == pytest.approx(math.exp(entropy([v / sum(ours) for v in ours])), rel=1e-4)


ALL = [i % 6 for i in range(32)]


@pytest.mark.parametrize(
    ("ours", "kind"),
    [
        (ALL, None),
        ([i % 4 for i in range(32)], None),  # ln 4 / ln 6 = 0.77
        ([3 + i % 3 for i in range(32)], "suspect"),  # ln 3 / ln 6 = 0.61
        ([0] * 16 + [1] * 16, "suspect"),  # 0.39
        ([0] * 32, "rollback"),
    ],
)
def test_fewer_classes_than_the_source_sees(ours: list[int], kind: str | None) -> None:
    pair = answers(ours, 6, 9.0), answers(ALL, 6, 9.0)
    found = kinds(told(Diversity(), 6, [pair] * 4)[0])
    assert found == [None, kind, kind, kind]  # 64 images are needed


def test_more_classes_than_the_source_sees_are_no_sign() -> None:
    few, many = answers([0] * 20 + [1] * 12, 6, 9.0), answers(ALL, 6, 9.0)
    assert kinds(told(Diversity(), 6, [(many, few)] * 4)[0]) == [None] * 4


@pytest.mark.parametrize("rule", [Diversity(), Agreement()])
@pytest.mark.parametrize("classes", [2, 3, 6, 1000])
def test_a_stream_of_one_class_that_both_see_is_no_sign(rule: Rule, classes: int) -> None:
    """Both say class 1 of everything, more or less surely: they agree in all."""
    more = 8 if classes == 1000 else 0  # so that the other 999 together say little
    found = {}
    for heights in ((4, 4), (6, 9), (9, 6), (8, 9), (20, 20), (5, 20), (20, 5), (100, 100)):
        ours, theirs = (answers([1] * 32, classes, height + more) for height in heights)
        found[heights] = set(kinds(told(rule, classes, [(ours, theirs)] * 12)[0])) - {None, "check"}
    assert not any(found.values()), found


def test_labels_that_are_absent_for_both_are_no_sign() -> None:
    logits = -4 - torch.rand(32, 8, generator=G)
    for rule in (Diversity(), Agreement()):
        state = rule.init(2)
        found = [rule.after(compared(logits, logits * 1.1, multilabel=True), state, {}) for _ in range(12)]
        assert not {"suspect", "rollback", "fallback"} & set(kinds(found))


def test_a_rare_class_of_two_is_no_sign() -> None:
    """One image in 64 is of the other class; that the two models find different ones is no collapse."""
    ours, theirs = ([1] * 64 for _ in range(2))
    ours[3] = theirs[40] = 0
    found = told(Agreement(), 2, [(answers(ours, 2), answers(theirs, 2))] * 12)[0]
    assert not {"suspect", "rollback", "fallback"} & set(kinds(found))


@pytest.mark.parametrize("rule", [Diversity(), Agreement()])
def test_a_source_that_knows_nothing_gives_no_verdict(rule: Rule) -> None:
    collapsed, uniform = answers([0] * 32, 6), torch.zeros(32, 6)
    assert set(kinds(told(rule, 6, [(collapsed, uniform)] * 12)[0])) <= {None, "check"}
    assert set(kinds(told(rule, 6, [(collapsed, None)] * 12)[0])) <= {None, "check"}


@pytest.mark.parametrize("rule", [Diversity(), Agreement(), Concentration()])
@pytest.mark.parametrize(
    "logits", [torch.zeros(1, 1000), torch.zeros(32, 2), torch.full((8, 6), -1e30), 1e30 * torch.eye(6)]
)
def test_degenerate_answers_give_finite_numbers(rule: Rule, logits: Tensor) -> None:
    state, numbers = rule.init(logits.shape[1]), {}
    for _ in range(300):
        action = rule.after(compared(logits, logits), state, numbers)
        assert action is None or action.kind == "check"
    assert all(math.isfinite(v) for v in numbers.values())
    assert all(t.isfinite().all() for t in state.buffers())


def kappa(table: list[list[float]]) -> tuple[float, float]:
    """Observed agreement and Cohen's kappa of a confusion table."""
    total = math.fsum(map(math.fsum, table))
    same = math.fsum(table[k][k] for k in range(len(table))) / total
    chance = math.fsum(math.fsum(table[k]) * math.fsum(row[k] for row in table) for k in range(len(table))) / total**2
    return same, (same - chance) / (1 - chance)


def test_agreement_is_cohens_kappa() -> None:
    table = [[0.0] * 4 for _ in range(4)]
    stream = []
    for n in (50, 20, 1, 33):
        ours, theirs = (torch.randint(4, (n,), generator=G).tolist() for _ in range(2))
        ours = [a if i % 3 else b for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
        table = [[v * math.exp(-n / 128) for v in row] for row in table]
        for a, b in zip(ours, theirs, strict=True):
            table[a][b] += 1
        stream.append((answers(ours, 4), answers(theirs, 4)))
    _, numbers = told(Agreement(), 4, stream)
    same, expected = kappa(table)
    assert numbers["agreement"] == pytest.approx(expected, abs=1e-5)
    assert numbers["flip_rate"] == pytest.approx(1 - same, abs=1e-5)


def test_agreement_by_chance_alone_is_a_sign() -> None:
    theirs = [i % 6 for i in range(36)]
    turned = [(i // 6) % 6 for i in range(36)]  # each pair of classes once: kappa is 0
    found = kinds(told(Agreement(), 6, [(answers(turned, 6), answers(theirs, 6))] * 5)[0])
    assert found == [None, None, None, "rollback", "rollback"]  # 128 images are needed
    half = [t if i < 2 else u for i, (t, u) in enumerate(zip(theirs, turned, strict=True))]
    value = kappa(
        [[float(sum((a, b) == (i, j) for a, b in zip(half, theirs, strict=True))) for j in range(6)] for i in range(6)]
    )[1]
    assert 0.02 < value < 0.06
    assert kinds(told(Agreement(), 6, [(answers(half, 6), answers(theirs, 6))] * 4)[0])[-1] == "suspect"
    agreed = told(Agreement(), 6, [(answers(theirs, 6), answers(theirs, 6))] * 5)
    assert kinds(agreed[0]) == [None] * 5
    assert agreed[1]["agreement"] == pytest.approx(1)


def test_comparisons_start_anew() -> None:
    for rule in (Diversity(), Agreement()):
        state, numbers = rule.init(6), {}
        collapsed = compared(answers([0] * 32, 6), answers(ALL, 6))
        while (action := rule.after(collapsed, state, numbers)) is None or action.kind == "check":
            pass
        rule.restart(state)
        action = rule.after(collapsed, state, numbers)
        assert action is None or action.kind == "check"


def test_a_fall_of_the_concentration_asks_for_a_comparison() -> None:
    rule, state, numbers = Concentration(), Concentration().init(3), {}
    mean = None
    for row in ([1.0, 0.0, 0.5], [0.0, 1.0, 0.2], [3.0, 0.0, 0.0], [6.0, 0.0, 0.0]):
        now = entropy(softmax(row))
        fallen = mean is not None and now < 0.5 * mean
        action = rule.after(compared(torch.tensor([row, row])), state, numbers)
        assert numbers["concentration"] == pytest.approx(now, rel=1e-5)
        assert (action is not None and action.kind == "check") == fallen
        mean = now if mean is None else mean + 0.05 * (now - mean)
        assert float(state.mean) == pytest.approx(mean, rel=1e-5)
    assert fallen


def test_the_limit_of_a_spike() -> None:
    rule = Spike(deviations=3.0, history=5, least=4)
    state, past = rule.init(2), []
    for i, value in enumerate([1.0, 2.0, 1.5, 1.2, 3.0, 2.5, 100.0, 100.0, 100.0, 100.0, 1.0, 1.03]):
        last = sorted(past[-5:])
        reason = rule.before(value, state)
        past.append(value)
        if i < 4:
            assert reason is None
            continue
        median = last[(len(last) - 1) // 2]
        away = sorted(abs(v - median) for v in last)[(len(last) - 1) // 2]
        assert (reason is not None) == (value > median + 3 * max(away, 0.01 * median)), i
    assert int(state.count) == 12


def test_drift() -> None:
    rule = Drift(limit=0.25, pull=0.1)
    numbers: dict[str, float] = {}
    assert rule.after(compared(torch.zeros(2, 3)), None, numbers) is None
    assert numbers == {}
    assert rule.after(compared(torch.zeros(2, 3), drift=0.25), None, numbers) is None
    action = rule.after(compared(torch.zeros(2, 3), drift=0.26), None, numbers)
    assert action is not None
    assert (action.kind, action.share) == ("pull", 0.1)
    assert numbers == {"drift": 0.26}


def test_drift_of_an_adapter() -> None:
    adapter = trueup.adapt(convnet(), "tent", lr=0.1, guard=trueup.Guard(rules=(Drift(limit=100),), window=16))
    adapter(images(16, seed=1, shift=1.0)[0])
    pairs = [
        (p.detach().double(), dict(convnet().named_parameters())[n].detach().double())
        for n, p in adapter.net.selected.items()
    ]
    away = math.sqrt(math.fsum(float((p - q).square().sum()) for p, q in pairs))
    expected = away / math.sqrt(math.fsum(float(q.square().sum()) for _, q in pairs))
    assert adapter.health.numbers["drift"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        (Diversity, {"rollback": -0.1}), (Diversity, {"suspect": -1.0}),
        (Diversity, {"blind": 2.0}), (Diversity, {"memory": 0.0}),
        (Agreement, {"suspect": 2.0}), (Agreement, {"rollback": 0.5}), (Agreement, {"sees": -1.0}),
        (Agreement, {"memory": -1.0}), (Concentration, {"fall": -1.0}), (Concentration, {"momentum": 2.0}),
        (Spike, {"deviations": -1.0}), (Spike, {"history": 5}), (Spike, {"least": 0}), (Spike, {"least": 1.5}),
        (Drift, {"limit": -1.0}), (Drift, {"pull": 1.5}), (Drift, {"pull": float("nan")}),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_by_name(rule: type[Rule], settings: dict[str, Any]) -> None:
    name = next(iter(settings))
    with pytest.raises(ValueError, match=f"{name}="):
        rule(**settings)
