"""Training with masks, end to end in seconds: what it computes, what it keeps, and that a kill changes nothing.

An image says by its colours what its mask is, so a plain loop can do the same from what the network was shown.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scans
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup.source.train as training
from trueup.bench.sweep import run
from trueup.core import files
from trueup.data.datasets import Dataset
from trueup.source.checkpoints import Store
from trueup.source.networks import build_network
from trueup.source.recipe import Recipe, Training
from trueup.source.tasks import split_holdout
from trueup.source.train import train

SOURCES = ("amber", "blue")
STEPS = 6
SEEN: list[tuple[bool, Tensor]] = []  # whether in training mode, and the images, of each batch that the spy was shown


class Spy(nn.Sequential):
    """Remembers what it is shown, and wraps its answer as torchvision does."""

    def forward(self, x: Tensor) -> Any:
        SEEN.append((self.training, x.clone()))
        return {"out": super().forward(x), "aux": None}


def spy(channels: int) -> nn.Module:
    first = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return Spy(*first, nn.Conv2d(8, channels, 1))


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[tuple[bool, Tensor]]]:
    SEEN.clear()
    yield SEEN
    SEEN.clear()


def recipe(network: str = "small-unet", **changed: Any) -> Recipe:
    values = {
        "iterations": STEPS, "batch": 3, "lr": 1e-2, "augment": "none", "normalize": "half", "size": scans.SIDE,
        "first": 2, "every": 2, "holdout": 0.4, **changed,
    }  # fmt: skip
    made = Training(**values)
    name = f"{__name__}:{network}" if network == "spy" else network
    outputs = scans.dataset().outputs(multilabel=made.multilabel)
    return Recipe(dataset="scans", sources=SOURCES, classes=outputs, network=name, training=made)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return files.read(path, "source")


def same(a: Path, b: Path) -> bool:
    """Weights to the bit, and the report."""
    (mine, header), (yours, other) = read(a), read(b)
    return header == other and mine.keys() == yours.keys() and all(torch.equal(t, yours[n]) for n, t in mine.items())


def start(chosen: Recipe) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(chosen.seed)
        return build_network(chosen.network, chosen.classes, size=scans.SIDE)


def answer(logits: Tensor, *, multilabel: bool) -> list[Any]:
    """The mask of each structure."""
    if multilabel:
        return [(logits[:, k] > 0).numpy() for k in range(2)]
    return [np.isin(logits.argmax(dim=1).numpy(), part) for part in scans.STRUCTURES.values()]


def score(model: nn.Module, *, multilabel: bool, patients: int = 5) -> float:
    """Dice of all held-out pixels of a domain, mean over structures, then over domains; pixel by pixel."""
    means = []
    for name in SOURCES:
        domain = scans.dataset(patients).domain(name)
        _, held = split_holdout(domain, 0.4, 0)
        x = scans.tensor(np.stack([domain.image(i) for i in held.tolist()]))
        y = np.stack([domain.mask(i) for i in held.tolist()])  # type: ignore[attr-defined]
        with torch.no_grad():
            found = answer(model.eval()(x), multilabel=multilabel)
        each = [scans.dice(f, np.isin(y, part)) for f, part in zip(found, scans.STRUCTURES.values(), strict=True)]
        means.append(np.mean([d for d in each if d is not None]))
    return float(np.mean(means))


# The finished file


@pytest.mark.parametrize("multilabel", [False, True])
def test_what_is_kept_has_the_best_dice_on_patients_it_was_not_trained_on(multilabel: bool, tmp_path: Path) -> None:
    store, chosen = Store(tmp_path), recipe(multilabel=multilabel)
    train(chosen, scans.dataset(), store)
    model, report = store.load(chosen)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 2 if multilabel else 3, 32, 32)
    assert [set(entry) for entry in report["history"]] == [{"iteration", "dice", "loss"}] * 3
    assert [entry["iteration"] for entry in report["history"]] == [2, 4, 6]
    best = max(report["history"], key=lambda entry: entry["dice"])
    assert report["kept"] == {"dice": best["dice"], "iteration": best["iteration"]}
    assert report["kept"]["dice"] == pytest.approx(score(model, multilabel=multilabel))
    assert report["broken"] == []


def test_validation_in_several_batches_is_of_all_pixels_together(tmp_path: Path) -> None:
    """Of 24 patients ten are held out: twenty slices, which take two batches."""
    store, chosen = Store(tmp_path), recipe(iterations=2)
    train(chosen, scans.dataset(patients=24), store)
    model, report = store.load(chosen)
    assert report["kept"]["dice"] == pytest.approx(score(model, multilabel=False, patients=24))


def test_it_learns(tmp_path: Path) -> None:
    """From red alone the class of a pixel is plain."""
    chosen = recipe(iterations=80, first=80, batch=4)  # 40 are enough on some processors, and just not on others
    _, header = read(train(chosen, scans.dataset(), Store(tmp_path)))
    assert header["report"]["kept"]["dice"] > 0.9
    assert score(start(chosen), multilabel=False) < 0.5


@pytest.mark.parametrize("multilabel", [False, True])
def test_training_is_what_plain_torch_does_with_the_same_batches(multilabel: bool, tmp_path: Path) -> None:
    chosen = recipe("spy", multilabel=multilabel, first=STEPS, optimizer="sgd", lr=0.1)
    tensors, _ = read(train(chosen, scans.dataset(), Store(tmp_path)))
    shown = [x for training_mode, x in SEEN if training_mode]
    assert len(shown) == STEPS
    model = start(chosen).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=False)
    for x in shown:
        y = torch.cat([scans.decode(x[:3])[0], scans.decode(x[3:], level=25)[0]])  # amber, then blue
        logits = nn.Sequential.forward(model, x)  # type: ignore[arg-type]
        if multilabel:
            truth = torch.stack([y > 0, y == 2], dim=1).float()
            probs, loss = logits.sigmoid(), F.binary_cross_entropy_with_logits(logits, truth)
        else:
            truth = torch.stack([y == 0, y == 1, y == 2], dim=1).float()
            probs, loss = torch.softmax(logits, dim=1), F.cross_entropy(logits, y)
        for k in range(truth.shape[1]):
            both, sizes = (probs[:, k] * truth[:, k]).sum(), probs[:, k].sum() + truth[:, k].sum()
            loss = loss + (1 - (2 * both + 1) / (sizes + 1)) / truth.shape[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, t in model.state_dict().items():
        torch.testing.assert_close(tensors[name], t, rtol=1e-4, atol=1e-5)


def test_patients_that_are_held_out_are_never_trained_on(tmp_path: Path) -> None:
    train(recipe("spy", iterations=12, batch=6), scans.dataset(), Store(tmp_path))
    shown: dict[bool, set[tuple[str, int]]] = {True: set(), False: set()}
    for training_mode, x in SEEN:
        for image in x:
            level = int((image[0] * 127.5 + 127.5).round().min())  # 0 in amber, 25 in blue
            shown[training_mode].add((SOURCES[level // 25], scans.decode(image[None], level)[1][0][0]))
    assert not shown[True] & shown[False]
    assert shown[True] | shown[False] == {(name, patient) for name in SOURCES for patient in range(5)}
    assert len(shown[False]) == 4


def test_validation_sees_each_held_out_slice_once_and_as_it_is(tmp_path: Path) -> None:
    train(recipe("spy", iterations=2, augment="affine"), scans.dataset(), Store(tmp_path))
    held = [x for training_mode, x in SEEN if not training_mode]
    assert [len(x) for x in held] == [4, 4]
    for x, name in zip(held, SOURCES, strict=True):
        domain = scans.dataset().domain(name)
        _, expected = split_holdout(domain, 0.4, 0)
        assert torch.equal(x, scans.tensor(np.stack([domain.image(i) for i in expected.tolist()])))


# Kills


class Stop(BaseException):
    """Somebody pulls the plug."""


class Clock:
    """Stands still while work is done and ticks before every step: each step is saved, at no cost."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def until(self, stop: int) -> Callable[[int, int], None]:
        def tick(done: int, of: int) -> None:
            self.now += 1
            if done == stop:
                raise Stop

        return tick


@pytest.mark.parametrize("changed", [{"augment": "affine"}, {"multilabel": True}, {"algorithm": "swad", "refresh": 2}])
def test_a_training_that_was_stopped_ends_as_an_undisturbed_one(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(**changed)
    undisturbed = train(chosen, scans.dataset(), Store(tmp_path / "whole"))
    clock, store = Clock(), Store(tmp_path / "killed")
    monkeypatch.setattr(training, "time", clock)
    for at in (1, 3, 5):
        with pytest.raises(Stop):
            train(chosen, scans.dataset(), store, keep_every=0, progress=clock.until(at))
        assert read(store.partial(chosen))[1]["done"] == at
    begun: list[int] = []
    train(chosen, scans.dataset(), store, progress=lambda done, of: begun.append(done))
    assert begun == [5, 6]
    assert same(store.path(chosen), undisturbed)


def test_an_unfinished_file_from_before_there_were_masks_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its best was called accuracy then."""
    chosen, clock, store = recipe(), Clock(), Store(tmp_path)
    monkeypatch.setattr(training, "time", clock)
    with pytest.raises(Stop):
        train(chosen, scans.dataset(), store, keep_every=0, progress=clock.until(3))
    tensors, header = read(store.partial(chosen))
    header["best"] = {"accuracy": header["best"]["score"], "iteration": header["best"]["iteration"]}
    files.write(store.partial(chosen), tensors, header, "source")
    assert same(train(chosen, scans.dataset(), store), train(chosen, scans.dataset(), Store(tmp_path / "undisturbed")))


# What goes wrong


def test_a_case_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = recipe(iterations=4, batch=8)
    with caplog.at_level(logging.WARNING, logger="trueup"):
        _, header = read(train(chosen, scans.dataset(lost=(1, 3)), Store(tmp_path)))
    expected = [f"{name}-{n}[{z}]" for name in SOURCES for n in (1, 3) for z in (0, 1)]
    assert header["report"]["broken"] == expected
    assert "cut short" in caplog.text


def test_a_domain_of_one_patient_alone_has_nobody_to_hold_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no held-out image can be read; a source domain needs at least two patients"):
        train(recipe(), scans.dataset(patients=1), Store(tmp_path))


def test_a_classifier_is_refused_for_masks_and_the_other_way_round(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a mask needs a segmenter"):
        train(recipe("digits-net"), scans.dataset(), Store(tmp_path))
    plain = scans.dataset()
    classes = Dataset("scans", ("a", "b", "c", "d", "e"), plain.targets, plain.open)
    with pytest.raises(ValueError, match="one class per image needs a classifier"):
        train(recipe(augment="none"), classes, Store(tmp_path))


def test_a_size_that_the_network_cannot_take_is_said_in_a_sentence(tmp_path: Path) -> None:
    settings = {"iterations": 1, "batch": 2, "size": 40, "augment": "none"}
    with pytest.raises(ValueError, match=r"cannot take images of shape \(3, 40, 40\).*divisible by 16"):
        run(
            tmp_path, dataset="fundus-sim", target="screening", method="source",
            network="smp:deeplabv3plus/mobilenet_v2", weights="none", training=settings, limit=8,
        )  # fmt: skip
