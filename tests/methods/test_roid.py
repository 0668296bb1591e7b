import math
from typing import Any

import pytest
import torch
from byhand import PROBS, X, entropy, identity_head
from torch import Tensor

import trueup
from trueup.model.split_model import Output
from trueup.testing import convnet, images

VIEW = [[0.6, 0.4], [0.2, 0.8], [0.7, 0.3]]


def scaled(values: list[float]) -> list[float]:
    return [(v - min(values)) / (max(values) - min(values)) for v in values]


def ratio(p: list[float]) -> float:
    return -sum(min(v, 0.99) * math.log(min(v, 0.99) / (1 - min(v, 0.99)) + 1e-5) for v in p)


def cross(p: list[float], q: list[float]) -> float:
    return -sum(a * math.log(b) for a, b in zip(p, q, strict=True))


def weights(probs: list[list[float]], mean: list[float], temperature: float = 1 / 3) -> list[float]:
    cosines = [sum(a * b for a, b in zip(p, mean, strict=True)) / math.hypot(*p) / math.hypot(*mean) for p in probs]
    distance, certainty = scaled([1 - c for c in cosines]), scaled([-entropy(p) for p in probs])
    least = sum(distance) / len(distance)
    return [math.exp(d * c / temperature) if d >= least else 0.0 for d, c in zip(distance, certainty, strict=True)]


def loss_of(x: Tensor = X, seen: list[list[float]] = VIEW, mean: list[float] | None = None, **hyper: Any) -> Tensor:
    adapter = trueup.adapt(identity_head(), "roid", params="all", example=X, **hyper)
    assert adapter.state.mean.tolist() == [0.5, 0.5]
    if mean is not None:
        adapter.state.mean.copy_(torch.tensor(mean, dtype=torch.float64))
    out, logits = adapter.net(x), torch.tensor(seen, dtype=torch.float64).log()
    out.memo["view"] = Output(x, logits, logits, logits)
    return adapter.method.loss(adapter.net, out, adapter.state)


@pytest.mark.parametrize("hyper", [{}, {"temperature": 2.0}], ids=str)
def test_loss_by_hand(hyper: dict) -> None:
    """Far from the uniform mean are the second and a fourth, from (0.1, 0.9) the first and the fourth."""
    probs, seen = [*PROBS, [0.9, 0.1]], [*VIEW, [0.6, 0.4]]
    x = torch.tensor(probs, dtype=torch.float64).log()
    each = [ratio(p) + (cross(p, q) + cross(q, p)) / 2 for p, q in zip(probs, seen, strict=True)]
    for mean, kept in (([0.5, 0.5], [1, 3]), ([0.1, 0.9], [0, 3])):
        w = weights(probs, mean, **hyper)
        assert [i for i in range(4) if w[i]] == kept
        expected = sum(a * b for a, b in zip(w, each, strict=True)) / 4
        assert float(loss_of(x, seen, mean, **hyper).detach()) == pytest.approx(expected, abs=1e-8)


def test_the_likelihood_ratio_is_clipped() -> None:
    """At s = (0.999, 0.001) the first counts as 0.99."""
    x = torch.tensor([[math.log(999.0), 0.0]], dtype=torch.float64)
    seen = [[0.5, 0.5]]
    p = [0.999, 0.001]
    expected = ratio(p) + (cross(p, seen[0]) + cross(seen[0], p)) / 2
    assert float(loss_of(x, seen).detach()) == pytest.approx(expected, abs=1e-8)


def test_both_sides_of_the_consistency_learn_and_weights_are_constants() -> None:
    """Numerical derivatives of Σ w_i (…)_i with the weights held."""
    w = weights(PROBS, [0.5, 0.5])
    x = X.clone().requires_grad_()
    loss_of(x).backward()

    def value(row: list[float]) -> float:
        total = sum(math.exp(v) for v in row)
        p = [math.exp(v) / total for v in row]
        return w[1] * (ratio(p) + (cross(p, VIEW[1]) + cross(VIEW[1], p)) / 2) / 3

    for k in (0, 1):
        high, low = ([v + e * (j == k) for j, v in enumerate(X[1].tolist())] for e in (1e-5, -1e-5))
        assert x.grad[1, k].item() == pytest.approx((value(high) - value(low)) / 2e-5, abs=1e-7)


def test_equal_samples_and_single_ones_have_weight_one() -> None:
    for n in (1, 4):
        loss = loss_of(X[:1].expand(n, 2), VIEW[:1] * n)
        expected = ratio(PROBS[0]) + (cross(PROBS[0], VIEW[0]) + cross(VIEW[0], PROBS[0])) / 2
        assert float(loss.detach()) == pytest.approx(expected, abs=1e-8)


def smoothed_prior() -> list[float]:
    """(p̄ + g) / (1 + 2 g) of three samples, with g = (1/2) / max p̄."""
    mean = [sum(p[k] for p in PROBS) / 3 for k in (0, 1)]
    g = 0.5 / max(mean)
    return [(m + g) / (1 + 2 * g) for m in mean]


def answer_of(x: Tensor, **hyper: Any) -> Tensor:
    adapter = trueup.adapt(identity_head(), "roid", params="all", example=x, **hyper)
    return adapter.method.predict(adapter.net, adapter.net(x), adapter.state)


def test_prior_correction_of_probabilities_by_hand() -> None:
    """Each probability times the prior, made to sum to one."""
    prior = smoothed_prior()
    for row, p in zip(answer_of(X, prior="probabilities").softmax(dim=1).tolist(), PROBS, strict=True):
        total = p[0] * prior[0] + p[1] * prior[1]
        assert row == pytest.approx([p[k] * prior[k] / total for k in (0, 1)], abs=1e-8)


@pytest.mark.parametrize("hyper", [{}, {"prior": "logits"}], ids=str)
def test_prior_correction_of_logits_by_hand(hyper: dict) -> None:
    """Each logit times the prior; this is the default."""
    prior = smoothed_prior()
    for row, logits in zip(answer_of(X, **hyper).tolist(), X.tolist(), strict=True):
        assert row == pytest.approx([logits[k] * prior[k] for k in (0, 1)], abs=1e-8)


def test_without_prior_correction_the_answers_are_the_logits() -> None:
    assert torch.equal(answer_of(X, prior="none"), X)


def test_only_probabilities_favour_the_frequent_class_whatever_the_sign_of_its_logit() -> None:
    x = torch.tensor([[-4.0, -3.0]] * 3 + [[-3.0, -3.0]], dtype=torch.float64)
    answer = answer_of(x, prior="probabilities")
    assert answer[3, 1] > answer[3, 0]
    assert (answer_of(x, prior="logits")[3] * torch.tensor([1, -1])).sum() > 0
    answer = answer_of(x + 10, prior="logits")
    assert answer[3, 1] > answer[3, 0]


def test_the_consistency_is_with_its_own_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its view, without blur and noise, is the one that is drawn."""
    x, drawn = images(16, seed=0, shift=1.0)[0], []
    monkeypatch.setattr("trueup.methods.roid.roid_view", lambda x, pixels: drawn.append(pixels) or x)
    trueup.adapt(convnet(), "roid", mean=0.5, std=0.25)(x)
    assert [pixels.mean for pixels in drawn] == [(0.5,)]


def test_running_mean_and_pull_to_the_source_by_hand() -> None:
    """The same step with keep=1 and keep=0.9: there a tenth of the way back."""
    x = images(16, seed=0, shift=1.0)[0].double()
    model = convnet().double()
    free, held = (trueup.adapt(model, "roid", keep=keep, lr=0.05) for keep in (1.0, 0.9))
    free(x)
    held(x)
    for name, p in free.net.selected.items():
        expected = 0.9 * p + 0.1 * model.get_parameter(name)
        torch.testing.assert_close(held.net.selected[name], expected, rtol=0, atol=1e-8)
        assert not torch.equal(p, model.get_parameter(name))
    still = trueup.adapt(model, "bn")
    mean = still(x).softmax(dim=1).mean(dim=0)
    torch.testing.assert_close(held.state.mean, 0.9 * torch.full_like(mean, 1 / 6) + 0.1 * mean, rtol=0, atol=1e-8)
    assert trueup.get_method("roid")().keep == 0.99


def test_the_source_is_no_alias_and_keep_zero_stays_there() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "roid", keep=0.0, lr=0.1)
    moving = trueup.adapt(model, "roid", lr=0.1)
    for s in range(3):
        x = images(16, seed=s, shift=1.0)[0]
        adapter(x)
        moving(x)
    assert adapter.updates == 3
    assert all(torch.equal(p, q) for p, q in zip(adapter.net.model.parameters(), model.parameters(), strict=True))
    kept = list(moving.state.source.buffers())
    for name, value in zip(moving.net.selected, kept, strict=True):
        assert torch.equal(value, model.get_parameter(name))
        assert not torch.equal(value, moving.net.selected[name])


def test_a_model_that_is_moved_to_high_precision_still_goes_back() -> None:
    model, x = convnet(), images(16, seed=0, shift=1.0)[0]
    adapter = trueup.adapt(model, "roid", keep=0.0, lr=0.1, example=x)
    adapter(x)
    adapter.double()
    assert adapter(x.double()).isfinite().all()
    assert adapter.updates == 2
    for name, p in adapter.net.selected.items():
        assert p.dtype == torch.float64
        assert torch.equal(p, model.get_parameter(name).double())


def test_several_labels_go_back_once() -> None:
    x, model = images(16, seed=0, shift=1.0)[0].double(), convnet().double()
    free, held = (trueup.adapt(model, "roid", keep=keep, lr=0.05, multilabel=True) for keep in (1.0, 0.9))
    assert free(x).shape == held(x).shape == (16, 6)
    for name, p in free.net.selected.items():
        expected = 0.9 * p + 0.1 * model.get_parameter(name)
        torch.testing.assert_close(held.net.selected[name], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("norm", ["ema", "instance"])
def test_views_move_no_statistics(norm: str) -> None:
    x = images(16, seed=0, shift=1.0)[0]
    adapter, plain = (trueup.adapt(convnet(), name, norm=norm) for name in ("roid", "bn"))
    adapter(x)
    plain(x)
    for mine, theirs in zip(adapter.net.model.buffers(), plain.net.model.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_no_image_is_refused_before_anything_changes() -> None:
    adapter = trueup.adapt(identity_head(), "roid", params="all")
    with pytest.raises(ValueError, match="views are made of images"):
        adapter(X)
    assert adapter.batches == 0


@pytest.mark.parametrize("bad", [{"temperature": 0}, {"keep": 1.1}, {"prior": "log"}], ids=str)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        trueup.adapt(identity_head(), "roid", **bad)
