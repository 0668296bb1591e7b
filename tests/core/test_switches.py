"""Pausing, adapting now and then, the source's answer beside the adapted one, health without a guard."""

from pathlib import Path
from typing import Any

import pytest
import torch

import trueup
from trueup.core.saving import to_file
from trueup.testing import convnet, images, scenes, segnet
from trueup.testing.case import difference, play

XS = [images(16, seed=i, shift=1.0)[0] for i in range(8)]
FEW = {"memo": {"views": 2}, "cotta": {"views": 2}, "rotta": {"every": 8}, "note": {"every": 8}}


@pytest.mark.parametrize("method", trueup.list_methods("classification"))
def test_a_paused_adapter_changes_nothing(method: str) -> None:
    adapter = trueup.adapt(convnet(), method, **FEW.get(method, {}))
    play(adapter, XS[:3])
    before = to_file(adapter)[0]
    before = {name: t.clone() for name, t in before.items() if not name.startswith("random")}
    adapter.pause()
    answers = [adapter(x) for x in XS[3:5]]
    assert all(a.isfinite().all() for a in answers)
    after = to_file(adapter)[0]
    assert {name for name, t in before.items() if not torch.equal(t, after[name])} == set()
    assert adapter.updates <= 3 * 16
    assert adapter.batches == 5


def test_a_paused_adapter_answers_with_what_it_has_learnt() -> None:
    """Tent's answer comes before its step, so a paused adapter gives the same answer as one that goes on."""
    paused, going = (trueup.adapt(convnet(), "tent", lr=0.05) for _ in range(2))
    play(paused, XS[:2])
    play(going, XS[:2])
    paused.pause()
    assert torch.equal(paused(XS[2]), going(XS[2]))
    assert not torch.equal(paused(XS[2]), going(XS[2]))  # the other has learnt from it
    paused.resume()
    paused(XS[3])
    assert paused.updates == 3


@pytest.mark.parametrize("method", ["tent", "tsd", "t3a"])
def test_every_k_th_batch_is_learnt_from(method: str, tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), method, every=3)
    by_hand = trueup.adapt(convnet(), method)
    expected = []
    for i, x in enumerate(XS):
        by_hand.pause() if i % 3 else by_hand.resume()
        expected.append(by_hand(x))
    assert all(torch.equal(a, b) for a, b in zip(play(adapter, XS), expected, strict=True))
    if method != "t3a":
        assert adapter.updates == 3
    first = trueup.adapt(convnet(), method, every=3)
    play(first, XS[:4])
    first.save(tmp_path / "state")
    second = trueup.adapt(convnet(), method, every=3)
    second.load(tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(play(second, XS[4:]), expected[4:], strict=True))


def test_methods_with_an_every_of_their_own_get_it() -> None:
    adapter = trueup.adapt(convnet(), "rotta", every=8)
    assert (adapter.method.every, adapter.every) == (8, 1)
    assert trueup.adapt(convnet(), trueup.get_method("tent")(), every=4).every == 4
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises((TypeError, ValueError), match="every"):
            trueup.adapt(convnet(), "tent", every=wrong)


@pytest.mark.parametrize("more", [{}, {"guard": True}, {"norm": "ema"}], ids=str)
def test_the_source_answers_beside_the_adapter(more: dict[str, Any]) -> None:
    model = convnet()
    with_source, alone = (trueup.adapt(model, "tent", lr=0.05, **more) for _ in range(2))
    with torch.no_grad():
        assert torch.equal(with_source.frozen(XS[0]), model(XS[0]))  # also before the first batch
    for x in XS[:4]:
        answer = with_source.answer(x)
        assert torch.equal(answer.adapted, alone(x))
        with torch.no_grad():
            assert torch.equal(answer.source, model(x))
    assert difference(with_source, alone) == []
    with torch.no_grad():
        assert torch.equal(with_source.frozen(XS[5]), model(XS[5]))
    assert difference(with_source, alone) == []
    with pytest.raises(ValueError, match="shape"):
        with_source.frozen(torch.zeros(0, 3, 8, 8))


def test_health_without_a_guard() -> None:
    adapter = trueup.adapt(convnet(), "tent")
    assert adapter.health == trueup.Health("unguarded", "", 0, {"batches": 0.0, "updates": 0.0}, {}, ())
    answer = adapter(XS[0])
    p = answer.softmax(dim=1)
    entropy = float(-(p * p.log()).sum(dim=1).mean() / torch.tensor(float(p.shape[1])).log())
    health = adapter.health
    assert (health.state, health.images, health.quarantined) == ("unguarded", 16, ())
    assert health.numbers["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert (health.numbers["batches"], health.numbers["updates"]) == (1, 1)
    assert "agreement" not in health.numbers
    both = adapter.answer(XS[1])
    share = float((both.adapted.argmax(dim=1) == both.source.argmax(dim=1)).float().mean())
    assert adapter.health.numbers["agreement"] == pytest.approx(share)
    assert "unguarded after 32 images" in str(adapter.health)
    adapter.reset()
    assert adapter.health.images == 0


def test_images_are_counted_over_a_resume(tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "tent")
    play(adapter, XS[:3])
    adapter.save(tmp_path / "state")
    other = trueup.adapt(convnet(), "tent")
    other.load(tmp_path / "state")
    assert (other.images, other.health.images) == (48, 48)


def test_health_of_masks_and_labels() -> None:
    masks = trueup.adapt(segnet(), "tent")
    masks.answer(scenes(2, seed=0)[0])
    assert 0 <= masks.health.numbers["agreement"] <= 1
    labels = trueup.adapt(convnet(), "tent", multilabel=True)
    labels.answer(XS[0])
    assert 0 < labels.health.numbers["entropy"] <= 1
