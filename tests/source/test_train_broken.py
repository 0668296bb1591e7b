"""Images that cannot be read are left out of training and named."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toy_training import (
    CLASSES,
    COUNT,
    Clock,
    Stop,
    dataset,
    domain,
    read,
    recipe,
    same,
    steps_of,
    stop,
)

import trueup.source.train as training
from trueup.data.datasets import Dataset
from trueup.data.domains import ArrayDomain, BrokenImageError, Domain, Image
from trueup.source.checkpoints import Store
from trueup.source.tasks import split_holdout
from trueup.source.train import train


class Damaged(ArrayDomain):
    """Some of its images cannot be read."""

    broken: frozenset[int] = frozenset()

    def image(self, i: int, size: int | None = None) -> Image:
        if i in self.broken:
            raise BrokenImageError("not an image")
        return super().image(i, size)


def damaged(**broken: set[int]) -> Dataset:
    def open_(name: str) -> Domain:
        base = domain(name)
        made = Damaged(name, base.images, base.labels)
        made.broken = frozenset(broken.get(name, ()))
        return made

    return dataset(open_)


def test_a_broken_image_is_left_out_and_named(
    seen: list[tuple[bool, Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trains, _ = split_holdout(domain("blue"), 0.2, 0)
    bad = int(trains[0])
    with caplog.at_level(logging.WARNING, "trueup"):
        _, header = read(train(recipe("spy", batch=16), damaged(blue={bad}), Store(tmp_path)))
    assert header["report"]["broken"] == [f"blue[{bad}]"]
    assert f"left out, cannot be read: blue[{bad}] (not an image)" in caplog.text
    batches = steps_of(seen)
    assert (bad, 1, bad % CLASSES) not in {image for batch in batches for image in batch}
    assert min(len(batch) for batch in batches) < 32
    assert len(batches) == 8


def test_a_broken_image_that_is_held_out_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, held = split_holdout(domain("amber"), 0.2, 0)
    bad = int(held[0])
    with caplog.at_level(logging.WARNING, "trueup"):
        _, header = read(train(recipe(), damaged(amber={bad}), Store(tmp_path)))
    assert header["report"]["broken"] == [f"amber[{bad}]"]
    assert caplog.text.count(f"amber[{bad}]") == 1


def test_broken_images_are_named_though_training_was_stopped(clock: Clock, tmp_path: Path) -> None:
    chosen, data = recipe(iterations=30, batch=2), damaged(blue={1, 2, 3, 5, 7}, amber={0, 4})
    whole = train(chosen, data, Store(tmp_path / "a"))
    with pytest.raises(Stop):
        train(chosen, data, Store(tmp_path / "b"), keep_every=0, progress=clock.progress(20, stop))
    assert same(train(chosen, data, Store(tmp_path / "b")), whole)


def test_training_without_a_single_readable_image_is_an_error(tmp_path: Path) -> None:
    """Otherwise the network is kept as it started, as if it had been trained."""
    everything = set(range(COUNT))
    with pytest.raises(ValueError, match="read"):
        train(recipe(), damaged(amber=everything, blue=everything), Store(tmp_path))
    assert not Store(tmp_path).has(recipe())


def test_a_batch_without_a_readable_image_does_not_move_the_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = training._TrainingRun.draw

    def drawn(run: Any, i: int) -> Iterator[tuple[int, list[int], int]]:
        for d, indices, step in draw(run, i):
            yield d, [0] * len(indices) if i in (3, 7) else [j for j in indices if j] or [1], step

    monkeypatch.setattr(training._TrainingRun, "draw", drawn)
    _, header = read(train(recipe(), damaged(amber={0}, blue={0}), Store(tmp_path)))
    assert [entry["iteration"] for entry in header["report"]["history"]] == [2, 4, 6, 8]


def test_a_domain_of_which_nothing_is_held_out_does_not_count_as_all_wrong(tmp_path: Path) -> None:
    """Two images of each class: a fifth of them is none. Accuracy and loss are those of the other domain."""
    sizes = {"amber": 30, "blue": 6}
    assert len(split_holdout(domain("blue", 6), 0.2, 0)[1]) == 0
    chosen = recipe(iterations=1)
    train(chosen, dataset(lambda name: domain(name, sizes[name])), Store(tmp_path))
    model, report = Store(tmp_path).load(chosen)
    amber = domain("amber")
    _, held = split_holdout(amber, 0.2, 0)
    with torch.no_grad():
        logits = model(torch.from_numpy(amber.images[held]).permute(0, 3, 1, 2) / 127.5 - 1)
    loss = F.cross_entropy(logits, torch.from_numpy(amber.labels[held]))
    assert report["history"][0]["loss"] == pytest.approx(float(loss), rel=1e-4)


def test_the_split_of_a_fixed_domain_never_changes() -> None:
    """If it does, models out there have been trained on what is now held out."""
    assert split_holdout(domain("amber"), 0.2, 0)[1].tolist() == [7, 14, 19, 21, 24, 29]
