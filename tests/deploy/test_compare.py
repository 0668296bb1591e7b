"""Methods side by side without labels: AETTA's estimate by hand, what is recommended, and the command."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from trueup.cli.app import app
from trueup.cli.compare import find_images, methods_of
from trueup.core.adapter import Adapter
from trueup.core.listening import heard
from trueup.core.registry import make_method
from trueup.deploy.compare import DRAWS, DROPPED, Aetta, Finding, advise, look
from trueup.testing import convnet, images

BASE = Finding("source", 1.0, 0.8, 0.7, 9.0, 0.6, None, 1.0)


def test_the_estimate_by_hand() -> None:
    model, x = convnet(), images(40, seed=0, shift=1.0)[0]
    judge = Aetta(seed=3)
    adapter = Adapter(model, heard(make_method("source", {}), judge.hear))
    logits = adapter(x)
    features = adapter.net(x).features
    random = torch.Generator().manual_seed(3)
    changed, total = [], []
    for _ in range(DRAWS):
        mask = (torch.rand(features.shape, generator=random) >= DROPPED).float() / (1 - DROPPED)
        p = adapter.net.classify(features * mask).double().softmax(dim=1)
        changed.append((p.argmax(dim=1) != logits.argmax(dim=1)).double().mean())
        total.append(p)
    middle = torch.stack(total).mean(dim=(0, 1))
    classes = len(middle)
    diversity = float(-(middle * middle.log()).sum()) / math.log(classes)
    error = min(1 - 1 / classes, float(torch.stack(changed).mean()) / diversity**3)
    assert judge.errors == [pytest.approx(error, abs=1e-6)]
    adapter(x)
    assert len(judge.errors) == 2  # six tenths of the old, four of the new


def test_answers_that_are_not_the_heads_are_not_estimated() -> None:
    judge = Aetta()
    Adapter(convnet(), heard(make_method("t3a", {}), judge.hear))(images(40, seed=0, shift=1.0)[0])
    assert judge.errors == []


def test_findings_are_those_of_plain_adapters() -> None:
    x, y = images(64, seed=0, shift=0.5)
    stream = [(x[:32], y[:32].numpy()), (x[32:], y[32:].numpy())]
    methods = {name: make_method(name, {}) for name in ("source", "tent")}
    first, second = look(convnet(), methods, lambda: stream)
    logits = []
    for name in methods:
        adapter = Adapter(convnet(), make_method(name, {}))
        logits.append(torch.cat([adapter(part) for part, _ in stream]).double())
    assert first.agreement == 1.0
    answers = [z.argmax(dim=1) for z in logits]
    assert second.agreement == pytest.approx(float((answers[0] == answers[1]).double().mean()))
    assert second.accuracy == pytest.approx(float((answers[1] == y).double().mean()))
    p = logits[1].softmax(dim=1)
    assert second.confidence == pytest.approx(float(p.max(dim=1).values.mean()))
    assert second.entropy == pytest.approx(float(-(p * p.log()).sum(dim=1).mean()))
    middle = p.mean(dim=0)
    assert second.classes == pytest.approx(math.exp(-float((middle * middle.log()).sum())))


def test_the_best_estimate_is_recommended() -> None:
    tent, tsd = (replace(BASE, name=name, agreement=0.6, estimate=e) for name, e in (("tent", 0.7), ("tsd", 0.8)))
    advice = advise([BASE, tent, tsd])
    assert advice.name == "tsd"
    assert "80.0%" in advice.reasons[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"classes": 3.0}, "uses 3.0 classes"), ({"agreement": 0.1}, "agrees with the source in only 10%")],
)
def test_what_looks_collapsed_is_not(change: dict[str, float], reason: str) -> None:
    bad = replace(BASE, name="tent", estimate=0.99, **{"agreement": 0.6, **change})
    advice = advise([BASE, bad])
    assert advice.name == "source"
    assert any(reason in said for said in advice.reasons)


def test_without_a_lead_nothing_is_changed() -> None:
    assert advise([BASE, replace(BASE, name="tent", estimate=0.605)]).name == "source"
    assert advise([BASE, replace(BASE, name="lame", estimate=None)]).name == "source"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label in "0123456789":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(2):
            noise = np.random.default_rng(int(label) + 10 * i).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / "photos" / label / f"{i}.png")
    return tmp_path / "photos"


def test_folders_are_labels_if_they_are_as_many_as_classes(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    domain, labelled = find_images(photos, 10)
    assert labelled
    assert domain.labels.tolist() == sorted([*range(10), *range(10)])
    assert not find_images(photos, 7)[1]
    with pytest.raises(ValueError, match="holds no images"):
        find_images(tmp_path / "empty", 2)


def test_guards_are_for_the_stress_test() -> None:
    with pytest.raises(ValueError, match="trueup stress"):
        methods_of(["tsd:preset=safe"])


def test_the_command(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    trained = ["train", "-t", "type", "-s", "0", "--train", "iterations=3", "--train", "batch=8"]
    assert runner.invoke(app, [*trained, "-o", "runs"], catch_exceptions=False).exit_code == 0
    (model,) = tmp_path.rglob("*.safetensors")
    words = ["compare", "--model", str(model), "--data", str(photos), "-m", "tent", "-m", "tsd:lr=1e-5", "-b", "10"]
    said = runner.invoke(app, words, catch_exceptions=False, env={"COLUMNS": "120"})
    assert said.exit_code == 0
    for word in ("accuracy %", "estimate %", "tsd:lr=1e-5", "take "):
        assert word in said.output
