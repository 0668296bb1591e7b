"""Fixtures of tests that use toy_training."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor
from toy_training import RECIPES, SEEN, Clock, dataset

import trueup.source.train as training
from trueup.source.checkpoints import Store
from trueup.source.train import train


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(training, "time", made)
    return made


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Train a recipe without a stop, once."""
    store = Store(tmp_path_factory.mktemp("undisturbed"))
    return lambda name: train(RECIPES[name], dataset(), store)


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[tuple[bool, Tensor]]]:
    SEEN.clear()
    yield SEEN
    SEEN.clear()
