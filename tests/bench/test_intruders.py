"""Disturbances: intruders are what they are called, genuine images are untouched, the seed decides on all."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_streams import net

from trueup.bench import intruders as disturb
from trueup.bench.intruders import (
    Disturbance,
    Intruders,
    craft_attack,
    make_ood_images,
    mix_rows,
    normalize_disturbance,
    parse_disturbance,
)
from trueup.data.domains import ArrayDomain
from trueup.data.loading import ConcatDomains, Loader
from trueup.data.streams import batches
from trueup.testing import convnet, images, patchnet

ALL = ("nan", "huge", "ood:0.1", "ood:0.5", "replay:0.25", "crafted:0.25")
Batches = list[tuple[Tensor, Any]]


def loader(n: int = 50, shift: float = 0.5) -> Loader:
    x, y = images(n, seed=1, shift=shift)
    array = (40 * x + 127.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    array = np.ascontiguousarray(array)  # as images are
    return Loader(ConcatDomains([ArrayDomain("d", array, y.numpy())]), 16, "half", keep=True)


def intruders(text: str, *, batch: int = 16, seed: int = 0, n: int = 50, **more: Any) -> Intruders:
    what = parse_disturbance(text)
    stream = list(batches(np.random.default_rng(5).permutation(n), what.genuine(batch)))
    return Intruders(what, more.pop("model", None) or net(), more.pop("loader", None) or loader(n), stream, batch, seed)


def those(found: Batches) -> Tensor:
    """The intruders of all batches."""
    return torch.cat([x[torch.from_numpy(at < 0)] for x, at in found])


# Words


def test_a_share_is_of_the_whole_batch() -> None:
    assert [Disturbance("ood", 0.1).genuine(b) for b in (64, 16, 2, 1)] == [58, 14, 2, 1]
    assert [Disturbance("ood", 0.5).genuine(b) for b in (64, 3, 2, 1)] == [32, 2, 1, 1]
    assert Disturbance("ood", 0.99).genuine(8) == 1
    assert [Disturbance("ood", 0.5).intruders(n, 64) for n in (32, 16, 1)] == [32, 16, 1]
    assert [Disturbance("ood", 0.1).intruders(n, 64) for n in (58, 29, 1)] == [6, 3, 0]
    assert Disturbance("ood", 0.99).intruders(1, 8) == 7


def test_words_and_their_usual_form() -> None:
    assert parse_disturbance("crafted:0.25") == Disturbance("crafted", 0.25)
    assert [normalize_disturbance(text) for text in ("huge", "ood:.5", "replay:1e-1", "")] == [
        "huge",
        "ood:0.5",
        "replay:0.1",
        "",
    ]


# Genuine images


@pytest.mark.parametrize("text", ALL)
def test_genuine_images_are_untouched_in_order_and_once(text: str) -> None:
    all_of_them = intruders(text)
    plain = list(all_of_them.loader.batches(all_of_them.stream))
    found = list(all_of_them.batches())
    assert len(found) == len(plain)
    for (x, at), (y, indices) in zip(found, plain, strict=True):
        own = at >= 0
        assert at[own].tolist() == indices.tolist()
        assert torch.equal(x[torch.from_numpy(own)], y)
        assert x.is_contiguous(memory_format=torch.channels_last)
    assert len(all_of_them) == sum(int((at < 0).sum()) for _, at in found)
    if ":" in text:
        assert {len(x) for x, _ in found[:-1]} == {16}


@pytest.mark.parametrize("text", ALL)
def test_seed_alone_decides_and_keeping_changes_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = intruders(text)
    first, again = list(kept.batches()), list(kept.batches())
    assert len(kept.kept) == len(first)
    monkeypatch.setattr(disturb, "KEPT", 4 * 3 * 16 * 16 * len(kept) - 1)
    torch.manual_seed(9)
    fresh = intruders(text)
    last = list(fresh.batches())
    assert fresh.kept == {}
    for one, two, three in zip(first, again, last, strict=True):
        assert torch.equal(one[0].nan_to_num(7), two[0].nan_to_num(7))
        assert torch.equal(one[0].nan_to_num(7), three[0].nan_to_num(7))
        assert one[1].tolist() == two[1].tolist() == three[1].tolist()
    other = list(intruders(text, seed=1).batches())
    assert any(not torch.equal(a, b) for (a, _), (b, _) in zip(first, other, strict=True))


def test_intruders_stand_anywhere_among_the_rows() -> None:
    x, at = torch.zeros(3, 1, 2, 2), np.arange(3)
    places: Counter[int] = Counter()
    for seed in range(400):
        both, numbers = mix_rows(x, at, x[:1] + 1, np.random.default_rng(seed))
        assert numbers[numbers >= 0].tolist() == [0, 1, 2]
        (place,) = np.flatnonzero(numbers < 0)
        assert bool((both[place] == 1).all())
        places[int(place)] += 1
    assert sorted(places) == [0, 1, 2, 3]
    assert min(places.values()) > 70  # of 100, with a deviation of 9


def test_images_that_cannot_be_read_take_their_intruders_with_them() -> None:
    broken = loader()
    broken.read = lambda i, read=broken.read: None if i % 2 else read(i)  # type: ignore[method-assign, misc]
    found = list(intruders("ood:0.5", loader=broken).batches())
    assert sum(int((at >= 0).sum()) for _, at in found) == 25
    assert all(int((at < 0).sum()) == int((at >= 0).sum()) for _, at in found)


# One row


@pytest.mark.parametrize("text", ["nan", "huge"])
def test_one_row_comes_at_a_third_of_the_stream(text: str) -> None:
    found = list(intruders(text, batch=4).batches())
    assert [int((at < 0).sum()) for _, at in found] == [0, 0, 0, 0, 1, *[0] * 8]
    x, at = found[4]
    assert len(x) == 5
    row, rest = x[torch.from_numpy(at < 0)][0], x[torch.from_numpy(at >= 0)]
    if text == "nan":
        assert int(row.isnan().sum()) == 1
        assert any(int((row != genuine).sum()) == 1 for genuine in rest)
    else:
        assert any(torch.equal(row, genuine * 1_000_000) for genuine in rest)


# No class


def test_strangers_are_noise_textures_and_puzzles_in_turn() -> None:
    x = images(32, seed=3)[0]
    noise, texture, puzzle, noise2 = make_ood_images(x, 4, np.random.default_rng(0))
    rough = [float((row[:, :, 1:] - row[:, :, :-1]).std() / row.std()) for row in (noise, texture, noise2)]
    assert rough[0] > 1.2
    assert rough[2] > 1.2
    assert rough[1] < 0.6
    assert not torch.equal(noise, noise2)
    assert any(torch.equal(puzzle.flatten().sort().values, row.flatten().sort().values) for row in x)
    assert not any(torch.equal(puzzle, row) for row in x)
    assert torch.equal(make_ood_images(x, 1, np.random.default_rng(0), first=3)[0], noise)
    assert float(make_ood_images(x, 3, np.random.default_rng(0), first=1)[1].sub(x).abs().amax(dim=(1, 2, 3)).min()) > 0


def test_strangers_have_the_colours_and_the_range_of_the_batch() -> None:
    x = images(64, seed=3)[0] + torch.tensor([5.0, 0.0, -5.0]).view(1, 3, 1, 1)
    rows = make_ood_images(x, 90, np.random.default_rng(0))
    assert rows.min() >= x.min()
    assert rows.max() <= x.max()
    for kind in range(3):
        assert torch.allclose(rows[kind::3].mean(dim=(0, 2, 3)), x.mean(dim=(0, 2, 3)), atol=0.1)
        assert torch.allclose(rows[kind::3].std(dim=(0, 2, 3)), x.std(dim=(0, 2, 3)), rtol=0.1)


@pytest.mark.parametrize("side", [8, 10, 17])
def test_strangers_of_any_size(side: int) -> None:
    x = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(0))
    assert make_ood_images(x, 6, np.random.default_rng(0)).shape == (6, 3, side, side)


# Replay


def test_what_is_replayed_is_what_the_source_gets_wrong() -> None:
    replay = intruders("replay:0.25", n=80, loader=loader(80, shift=1.0))
    place = replay.loader.place
    ((x, _),) = replay.loader.batches([np.arange(80)])
    with torch.no_grad():
        wrong = [row for row, said, true in zip(x, net()(x).argmax(dim=1), place.labels, strict=True) if said != true]
    assert 1 < len(wrong) < 80
    rows = those(list(replay.batches()))
    assert len(rows) > 20
    hits = [next(i for i, row in enumerate(wrong) if torch.equal(row, one)) for one in rows]
    assert len(set(hits)) > 3


def test_where_nothing_is_wrong_the_most_doubtful_image_is_replayed() -> None:
    easy = loader(40)
    ((x, _),) = easy.batches([np.arange(40)])
    with torch.no_grad():
        logits = net()(x)
    easy.place.domains[0].labels[:] = logits.argmax(dim=1).numpy()
    rows = those(list(intruders("replay:0.25", n=40, loader=easy).batches()))
    doubtful = x[int(F.softmax(logits, dim=1).amax(dim=1).argmin())]
    assert all(torch.equal(row, doubtful) for row in rows)


# Attack


def batch_entropy(model: nn.Module, x: Tensor, rows: Tensor, y: Tensor) -> float:
    """Cross-entropy of genuine rows when all rows share their statistics, by torch's own training mode."""
    model = model.train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 0.0
    with torch.no_grad():
        return float(F.cross_entropy(model(torch.cat([x, rows]))[: len(x)], y))


def test_crafted_rows_harm_their_batch_mates_more_than_copies_or_noise_do() -> None:
    x = images(24, seed=2)[0]
    y = convnet()(x).argmax(dim=1)
    rows = craft_attack(convnet(), x, 6, np.random.default_rng(0))
    harm = batch_entropy(convnet(), x, rows, y)
    assert harm > 1.5 * batch_entropy(convnet(), x, x[:6], y)
    assert harm > 1.5 * batch_entropy(convnet(), x, make_ood_images(x, 6, np.random.default_rng(0)), y)


def test_crafted_rows_stay_in_range_and_within_reach_of_a_genuine_one() -> None:
    x = images(24, seed=2)[0]
    rows = craft_attack(convnet(), x, 6, np.random.default_rng(0))
    assert x.min() <= rows.min()
    assert rows.max() <= x.max()
    reach = (rows[:, None] - x[None]).abs().amax(dim=(2, 3, 4)).amin(dim=1)
    assert bool((reach <= 0.5 * (x.max() - x.min()) + 1e-5).all())
    assert bool((reach > 0.2 * (x.max() - x.min())).all())
    assert not rows.requires_grad


def test_without_shared_statistics_crafted_rows_are_confidently_wrong() -> None:
    x, model = images(24, seed=2)[0], patchnet()
    rows = craft_attack(model, x, 6, np.random.default_rng(0))
    with torch.no_grad():
        before, probs = model(x).softmax(dim=1), model(rows).softmax(dim=1)
    start = (rows[:, None] - x[None]).abs().amax(dim=(2, 3, 4)).argmin(dim=1)
    assert bool((probs.argmax(dim=1) != before.argmax(dim=1)[start]).all())
    assert bool((probs.amax(dim=1) > 0.95).all())


def test_attack_leaves_the_model_alone() -> None:
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    list(intruders("crafted:0.25", model=model).batches())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
