"""The drift alarm: moments of features, shares of predictions, and when it speaks."""

import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup import Guard, rules
from trueup.guard.drift_alarm import PooledMoments, watching_moments
from trueup.norm.policy import batchnorms
from trueup.testing import convnet, images, scenes, segnet
from trueup.testing.case import play

CLEAN = [images(32, seed=i)[0] for i in range(16)]


def alarm(**hyper: Any) -> trueup.Adapter:
    return trueup.adapt(convnet(), "source", guard=Guard(rules=(rules.Shift(**hyper),)))


class OneLayer(nn.Module):
    """BatchNorm with moments that are known, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bn, self.head = nn.BatchNorm2d(2), nn.Linear(2, 3)
        self.bn.running_mean = torch.tensor([1.0, -2.0])
        self.bn.running_var = torch.tensor([4.0, 0.25])
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Pool and classify."""
        return self.head(self.bn(x).mean(dim=(2, 3)))


def test_the_shift_of_features_is_a_divergence_of_normal_distributions() -> None:
    """Worked out by hand from all images, each weighted by e^(-images after its batch / memory)."""
    model, random = OneLayer().double(), torch.Generator().manual_seed(1)
    pooled, batches = PooledMoments([layer.num_features for layer in batchnorms(model)], 100.0), [40, 24, 8, 30]
    xs = [1.5 * torch.randn(n, 2, 3, 3, generator=random, dtype=torch.float64) - i for i, n in enumerate(batches)]
    for i, x in enumerate(xs):
        with watching_moments(model) as seen, torch.no_grad():
            model(x)
            model(x + 100)  # of several calls the first counts
        pooled.add(model, seen, sum(batches[: i + 1]))
    weights = [math.exp(-sum(batches[i + 1 :]) / 100) for i in range(4)]
    total = sum(w * n for w, n in zip(weights, batches, strict=True))
    first = sum(w * x.mean(dim=(2, 3)).sum(dim=0) for w, x in zip(weights, xs, strict=True)) / total
    second = sum(w * x.square().mean(dim=(2, 3)).sum(dim=0) for w, x in zip(weights, xs, strict=True)) / total
    expected = 0.0
    for m, s, big_m, big_v in zip(first.tolist(), second.tolist(), [1.0, -2.0], [4.0, 0.25], strict=True):
        v, big_v = s - m * m + model.bn.eps, big_v + model.bn.eps
        expected += ((v + (m - big_m) ** 2) / big_v - 1 - math.log(v / big_v)) / 2 / 2
    source = {name: t.clone() for name, t in model.named_buffers()}
    model.bn.running_mean.zero_()  # a policy may have moved them
    found = pooled.shift(model, source)
    assert found is not None
    assert found.layer == "bn"
    assert found.size == pytest.approx(expected, rel=1e-12)
    assert PooledMoments([layer.num_features for layer in batchnorms(model)], 100.0).shift(model, source) is None


def test_images_of_the_source_raise_no_alarm() -> None:
    adapter = trueup.adapt(convnet(), "source", guard=True)
    plain = [convnet()(x) for x in CLEAN]
    assert all(torch.equal(a, b) for a, b in zip(play(adapter, CLEAN), plain, strict=True))
    assert adapter.health.events["drift"] == 0
    assert adapter.health.numbers["feature_shift"] < 0.01
    assert adapter.health.state == "healthy"


def test_a_shift_is_told_with_the_time_and_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    told: list[trueup.Event] = []
    adapter = trueup.adapt(convnet(), "source", guard=Guard(rules=(rules.Shift(),), notify=told.append))
    play(adapter, CLEAN)
    with caplog.at_level(logging.WARNING, "trueup.guard"):
        play(adapter, [3 * x + 2 for x in CLEAN])
    assert told
    assert {event.name for event in told} == {"drift"}
    assert told[0].images > 512
    assert any("nats per channel from the source's BatchNorm moments, most in 'bn" in event.reason for event in told)
    assert f"after {told[0].images} images: drift" in caplog.text
    assert adapter.health.events["drift"] == len(told) <= 3


def test_it_tells_from_the_first_images_that_features_are_elsewhere() -> None:
    adapter = alarm(predictions=1.0, entropy=1.0)
    play(adapter, [3 * x + 2 for x in CLEAN[:6]])
    assert adapter.health.events["drift"] == 1
    assert adapter.health.numbers["feature_shift"] > 0.05


def test_predictions_of_other_classes() -> None:
    """The share is the total variation of class shares against those of the first images."""
    adapter = alarm(features=100.0, entropy=1.0, memory=64)
    model = convnet()
    x = torch.cat(CLEAN)
    with torch.no_grad():
        said = model(x).argmax(dim=1)
    play(adapter, CLEAN[:4])
    same = x[said == said.mode().values]
    for _ in range(12):
        adapter(same[:32])
    start = torch.cat([model(c).argmax(dim=1) for c in CLEAN[:2]]).bincount(minlength=adapter.net.channels) / 64
    now = torch.zeros_like(start, dtype=torch.float64)
    for x in (*CLEAN[:4], *[same[:32]] * 12):
        now = now * math.exp(-32 / 64) + model(x).argmax(dim=1).bincount(minlength=len(now))
    expected = float((start - now / now.sum()).abs().sum() / 2)
    assert adapter.health.numbers["prediction_shift"] == pytest.approx(expected, rel=1e-5)
    assert adapter.health.events["drift"] == 1  # once, although it goes on


def test_an_alarm_is_armed_again_when_the_shift_is_over() -> None:
    adapter = alarm(predictions=1.0, entropy=1.0, memory=32)
    play(adapter, CLEAN)
    for _ in range(2):
        before = adapter.health.events["drift"]
        play(adapter, [3 * x + 2 for x in CLEAN] * 4)
        assert adapter.health.events["drift"] == before + 1
        play(adapter, CLEAN * 4)
        assert adapter.health.numbers["feature_shift"] < 0.04


def test_saved_resumed_and_reset(tmp_path: Path) -> None:
    xs = [*CLEAN[:9], *(3 * x + 2 for x in CLEAN)]
    whole = alarm()
    play(whole, xs)
    first, second = alarm(), alarm()
    play(first, xs[:11])
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    play(second, xs[11:])
    assert second.health == whole.health
    whole.reset()
    play(whole, xs)
    assert second.health == whole.health


def test_older_guards_have_no_count_of_drifts(tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "tent", guard=True)
    play(adapter, CLEAN[:3])
    assert adapter.monitor is not None
    del adapter.monitor.marks.events["drift"]
    adapter.save(tmp_path / "state")
    other = trueup.adapt(convnet(), "tent", guard=True)
    other.load(tmp_path / "state")
    assert other.health.events["drift"] == 0
    assert other.health.images == 96


def test_no_hook_is_left_and_other_methods_can_have_the_alarm() -> None:
    adapter = trueup.adapt(convnet(), "tent", guard=Guard(rules=(*rules.RULES, rules.Shift())))
    plain = trueup.adapt(convnet(), "tent", guard=True)
    for x in CLEAN[:4]:
        assert torch.equal(adapter(x), plain(x))
    assert not any(m._forward_pre_hooks for m in adapter.net.model.modules())
    assert "feature_shift" in adapter.health.numbers


def test_masks_and_models_without_batchnorm() -> None:
    masks = trueup.adapt(segnet(), "source", guard=True)
    play(masks, [scenes(8, seed=i)[0] for i in range(10)])
    assert {"feature_shift", "prediction_shift", "entropy"} <= set(masks.health.numbers)
    bare = trueup.adapt(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), "source", guard=True)
    bare(torch.zeros(4, 3, 2, 2))
    assert set(bare.health.numbers) == {"prediction_shift", "entropy"}


@pytest.mark.parametrize("hyper", [{"features": 0.0}, {"predictions": 2.0}, {"entropy": 0.0}, {"memory": 0.0}], ids=str)
def test_limits_that_mean_nothing(hyper: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(hyper))):
        rules.Shift(**hyper)


def test_large_batches_and_policies_that_follow_the_stream() -> None:
    """The reference is the source's also where estimates move; from the second batch on every other one is measured."""
    far = [3 * x + 2 for x in CLEAN]
    large = trueup.adapt(convnet(), "source", guard=True)
    for _ in range(2):
        large(torch.cat(far))
    assert large.health.numbers["feature_shift"] > 0.05
    guard = Guard(rules=(*rules.RULES, rules.Shift()))
    ema = trueup.adapt(convnet(), "bn", norm="ema:0.5", guard=guard)
    play(ema, far)
    assert ema.health.numbers["feature_shift"] > 0.05


def test_whoever_is_notified_may_call_any_adapter() -> None:
    """Two adapters whose alarms call each other, in two threads: neither lock is held while they are told."""
    other: dict[str, trueup.Adapter] = {}
    heard: list[str] = []

    def made(name: str) -> trueup.Adapter:
        def hear(event: trueup.Event) -> None:
            heard.append(name)
            other[name].reset()

        return trueup.adapt(convnet(), "source", guard=Guard(rules=(rules.Shift(),), notify=hear), example=CLEAN[0])

    first, second = made("first"), made("second")
    other |= {"first": second, "second": first}
    threads = [
        threading.Thread(target=lambda a=a: [a.answer(3 * x + 2) for x in CLEAN for _ in range(4)], daemon=True)
        for a in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert heard


def test_a_pass_that_failed_leaves_nothing_in_the_pooled_moments() -> None:
    adapter = trueup.adapt(convnet(), "tent", guard=Guard(rules=(*rules.RULES, rules.Shift())))
    play(adapter, [images(64, seed=i, shift=1.0)[0] for i in range(5)])
    with torch.no_grad():
        adapter.net.model.bn0.weight[0] = float("inf")  # as an adaptation that went wrong
    play(adapter, [images(64, seed=i, shift=1.0)[0] for i in range(5, 9)])
    assert adapter.health.events["rollback"] == 1
    assert math.isfinite(adapter.health.numbers["feature_shift"])
    assert adapter.monitor.moments.first.isfinite().all()
