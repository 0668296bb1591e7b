"""A training that is stopped or killed resumes to the same end; unfinished files that do not fit are refused."""

import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import toy_training
import warm
from torch import nn
from toy_training import (
    RECIPES,
    SIZE,
    STEPS,
    Clock,
    Stop,
    dataset,
    read,
    recipe,
    same,
    stop,
)

import trueup.source.train as training
from trueup.source.checkpoints import Store
from trueup.source.train import train

# Kills


@pytest.mark.parametrize("at", [1, 3, 6, STEPS])
@pytest.mark.parametrize("name", RECIPES)
def test_a_training_that_was_stopped_ends_as_an_undisturbed_one(
    name: str, at: int, undisturbed: Callable[[str], Path], clock: Clock, tmp_path: Path
) -> None:
    store, chosen = Store(tmp_path), RECIPES[name]
    with pytest.raises(Stop):
        train(chosen, dataset(), store, keep_every=0, progress=clock.progress(at, stop))
    assert read(store.partial(chosen))[1]["done"] == at
    assert not store.has(chosen)
    begun: list[int] = []
    train(chosen, dataset(), store, progress=lambda done, of: begun.append(done))
    assert begun == list(range(at, STEPS + 1))
    assert same(store.path(chosen), undisturbed(name))
    assert not store.partial(chosen).exists()


@pytest.mark.parametrize("name", ["adam", "swad"])
def test_a_training_that_is_stopped_after_every_step_comes_to_the_same_end(
    name: str, undisturbed: Callable[[str], Path], clock: Clock, tmp_path: Path
) -> None:
    for at in range(1, STEPS + 1):
        with pytest.raises(Stop):
            train(RECIPES[name], dataset(), Store(tmp_path), keep_every=0, progress=clock.progress(at, stop))
    assert same(train(RECIPES[name], dataset(), Store(tmp_path)), undisturbed(name))


def test_swad_that_ends_early_goes_on_to_the_same_end(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses 1, 4, 16: the threshold is 1.3 × 2.5, the last two are above it, and the first segment is the end."""
    rising = lambda run, threads: (0.5, float(4 ** len(run.history)))  # noqa: E731
    monkeypatch.setattr(training._TrainingRun, "scores", rising)
    chosen = recipe(algorithm="swad", iterations=20)
    whole = train(chosen, dataset(), Store(tmp_path / "a"))
    kept = read(whole)[1]["report"]["kept"]
    assert (kept["start"], kept["end"], kept["segments"], kept["iteration"]) == (0, 0, 3, 6)
    with pytest.raises(Stop):
        train(chosen, dataset(), Store(tmp_path / "b"), keep_every=0, progress=clock.progress(5, stop))
    assert same(train(chosen, dataset(), Store(tmp_path / "b")), whole)


KILLED = {"adam": "step", "sgd with decay": "save", "swad": "save", "swad with dropout": "step"}


def be_killed(folder: str) -> None:
    """In a process of its own: begin each training in a child that dies in its fifth step, or while it saves."""
    torch.set_num_threads(1)
    torch.optim.Adam([torch.ones(1)])  # imports half of torch, which each child would do anew
    for name, when in KILLED.items():
        if not (child := os.fork()):
            _die(name, when, Store(Path(folder)))
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        assert os.WTERMSIG(status) == signal.SIGKILL


def _die(name: str, when: str, store: Store) -> None:
    clock = Clock()
    training.time = clock  # type: ignore[assignment]

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def begin_to_kill() -> None:
        os.fsync = kill  # the new file is written, and not yet in place

    end = kill if when == "step" else begin_to_kill
    train(RECIPES[name], dataset(), store, keep_every=0, progress=clock.progress(5, end))
    os._exit(1)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    here = Path(__file__).parent
    code = f"import {__name__} as t; t.be_killed({str(folder)!r})"
    warm.run("-c", f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; {code}")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", KILLED)
def test_kill_minus_nine_changes_nothing(name: str, killed: Path, undisturbed: Callable[[str], Path]) -> None:
    store = Store(killed)
    assert not store.has(RECIPES[name])
    assert read(store.partial(RECIPES[name]))[1]["done"] == 5
    assert same(train(RECIPES[name], dataset(), store), undisturbed(name))
    assert not store.partial(RECIPES[name]).exists()


# Unfinished files


@pytest.fixture
def unfinished(clock: Clock, tmp_path: Path) -> Path:
    store = Store(tmp_path)
    with pytest.raises(Stop):
        train(RECIPES["adam"], dataset(), store, keep_every=0, progress=clock.progress(5, stop))
    return store.partial(RECIPES["adam"])


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:1000], lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_damaged_unfinished_file_is_named_and_training_starts_anew(
    damage: Callable[[bytes], bytes],
    unfinished: Path,
    undisturbed: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    unfinished.write_bytes(damage(unfinished.read_bytes()))
    begun: list[int] = []
    with caplog.at_level(logging.WARNING, "trueup"):
        path = train(RECIPES["adam"], dataset(), Store(unfinished.parent), progress=lambda done, of: begun.append(done))
    assert begun[0] == 0
    assert re.search(rf"training starts over: .*{re.escape(unfinished.name)}", caplog.text)
    assert same(path, undisturbed("adam"))
    assert not unfinished.exists()


def test_the_unfinished_file_of_another_recipe_is_not_gone_on_with(unfinished: Path, tmp_path: Path) -> None:
    """A file that was renamed fits in every shape, and would give weights that its recipe does not."""
    other = recipe(seed=3, augment="shift")
    whole = train(other, dataset(), Store(tmp_path / "elsewhere"))
    unfinished.rename(Store(tmp_path).partial(other))
    assert same(train(other, dataset(), Store(tmp_path)), whole)


def test_a_network_that_has_changed_since_starts_anew(
    unfinished: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(toy_training, "net", toy_training.spy)
    monkeypatch.setattr(toy_training, "layers", lambda n, _: [nn.Flatten(), nn.Linear(3 * SIZE * SIZE, n)])
    with caplog.at_level(logging.WARNING, "trueup"):
        tensors, _ = read(train(RECIPES["adam"], dataset(), Store(unfinished.parent)))
    assert set(tensors) == {"1.weight", "1.bias"}
    assert unfinished.name in caplog.text


def test_an_unfinished_file_beside_a_finished_one_is_removed(unfinished: Path) -> None:
    """It stays behind when the kill comes between the two, and is several times as large as the model."""
    blob = unfinished.read_bytes()
    train(RECIPES["adam"], dataset(), Store(unfinished.parent))
    unfinished.write_bytes(blob)
    train(RECIPES["adam"], dataset(), Store(unfinished.parent))
    assert not unfinished.exists()


def test_nothing_is_saved_before_its_time(clock: Clock, tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(Stop):
        train(RECIPES["adam"], dataset(), store, keep_every=3, progress=clock.progress(3, stop))
    assert not store.partial(RECIPES["adam"]).exists()
    with pytest.raises(Stop):
        train(RECIPES["adam"], dataset(), store, keep_every=3, progress=clock.progress(6, stop))
    assert read(store.partial(RECIPES["adam"]))[1]["done"] == 4
