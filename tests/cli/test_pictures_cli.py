"""Flags for deep and wide pictures, as they are typed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from trueup.bench.settings import make_sweep
from trueup.cli import compare
from trueup.cli.app import app
from trueup.cli.options import settings_of
from trueup.data.pictures import UnknownRangeError
from trueup.source.recipe import Recipe, Training
from trueup.testing import convnet


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Pictures of 12 bits, wider than high."""
    ramp = np.linspace(0, 4095, 6 * 12).astype(np.uint16).reshape(6, 12)
    for domain in ("day", "night"):
        for label in ("cat", "dog"):
            (tmp_path / domain / label).mkdir(parents=True)
            Image.fromarray(ramp).save(tmp_path / domain / label / "0.png")
    return tmp_path


@pytest.mark.parametrize("verb", ["bench", "run", "train", "stress", "compare", "segment"])
def test_every_command_that_reads_images_has_both_flags(verb: str) -> None:
    said = invoke(verb, "--help").output
    assert "--resize" in said
    assert "--range" in said


def test_the_check_takes_a_range(root: Path) -> None:
    said = invoke("data", "check", "folder", "--root", str(root))
    assert said.exit_code == 1
    assert "4 images have more than 8 bits" in said.output
    said = invoke("data", "check", "folder", "--root", str(root), "--range", "0", "4095")
    assert said.exit_code == 0
    assert "4 of 4 images are not square, networks see them squashed" in said.output


def test_flags_are_settings_of_what_networks_see(root: Path) -> None:
    with pytest.raises(UnknownRangeError, match="--range 0 4095"):
        invoke_and_raise("bench", "-d", "folder", "-r", str(root), "--dry-run")
    flags = {"training": ["size=32"], "resize": "crop", "limits": (-1000.0, 400.0)}
    sweep = make_sweep(settings_of(flags | {"dataset": ["folder"], "root": str(root)}))
    assert sweep.training == {"size": 32, "resize": "crop", "range": [-1000.0, 400.0]}
    run = sweep.runs()[0]
    assert (run.source.resize, run.source.range, run.source.size) == ("crop", (-1000.0, 400.0), 32)
    assert settings_of(dict.fromkeys(("training", "resize", "limits"))) == {}
    with pytest.raises(ValueError, match="--resize 'stretch' is unknown: it must be squash, crop, pad"):
        settings_of({"resize": "stretch"})


def invoke_and_raise(*words: str) -> None:
    CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_the_usual_way_is_not_a_new_model() -> None:
    def name(dataset: str, **training: Any) -> str:
        values = {"dataset": dataset, "sources": ("a",), "classes": 2, "network": "resnet18"}
        return Recipe(**values, training=Training(**training)).name

    assert name("folder", resize="squash") == name("folder")
    assert name("masks", resize="pad") == name("masks")
    different = [name("folder"), name("folder", resize="pad"), name("folder", resize="crop")]
    assert len({*different, name("folder", range=(0, 1))}) == 4
    assert name("masks", resize="squash") != name("masks")


class EnoughError(Exception):
    """What was to be seen has been seen."""


def test_compare_shows_pictures_as_it_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    def look(model: Any, methods: Any, batches: Any, **rest: Any) -> None:
        shown.append(next(iter(batches()))[0])
        raise EnoughError

    seen = {"classes": 2, "names": (), "size": 6, "normalize": "half"}
    monkeypatch.setattr(compare, "open_classifier", lambda *_, **__: (convnet(), dict(seen)))
    monkeypatch.setattr(compare, "compare_methods", look)
    words = ("compare", "--data", str(root / "day"), "-m", "tent")
    with pytest.raises(UnknownRangeError, match="--range 0 4095"):
        invoke_and_raise(*words)
    with pytest.raises(EnoughError):
        invoke_and_raise(*words, "--range", "0", "4095", "--resize", "crop")
    ramp = np.linspace(0, 4095, 6 * 12).astype(np.uint16).reshape(6, 12) >> 4
    assert np.array_equal(shown[0][0, 0].mul(127.5).add(127.5).round().numpy(), ramp[:, 3:9])
