"""Settings in YAML, and files of weights."""

import hashlib
from pathlib import Path

import pytest
from toy_settings import one

from trueup.bench.settings import make_sweep, read_settings
from trueup.data.datasets import open_dataset
from trueup.source.recipe import GivenModel, Training

# Numbers and words as YAML has them


def test_yaml_reads_small_numbers(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "target: hand\nseed: [0, 1]\ntraining: {lr: 1e-3, iterations: 20}\n"
        "method:\n  - source\n  - tsd: {lr: 1e-5, per_class: none}\n  - t3a: {per_class: ~}\n"
    )
    found = make_sweep(read_settings(file, {"seed": 1})).runs()
    assert [run.method for run in found] == ["source", "tsd", "t3a"]
    assert {run.seed for run in found} == {1}
    assert (found[1].hyper["lr"], found[1].hyper["per_class"], found[2].hyper["per_class"]) == (1e-5, None, None)
    assert isinstance(found[0].source, Training)
    assert (found[0].source.lr, found[0].source.iterations) == (1e-3, 20)


def test_params_none_is_a_keyword_not_nothing() -> None:
    assert one(method={"tent": {"params": "none"}}).hyper["params"] == "none"


def test_augment_none_can_be_said() -> None:
    assert one(training={"augment": "none"}) == one()


def test_stream_options_may_be_small_numbers(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("target: hand\nseed: 0\nmethod: bn\nstream: dirichlet\nstream_options: {concentration: 1e-2}\n")
    (run,) = make_sweep(read_settings(file, {})).runs()
    assert run.stream_options == {"concentration": 0.01}


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "digits", "dataset: [digits\n", "\0"])
def test_file_without_settings_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"mine\.yaml (must hold settings|cannot be read)"):
        make_sweep(read_settings(tmp_path / "mine.yaml", {}))


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.yaml cannot be read"):
        make_sweep(read_settings(tmp_path / "gone.yaml", {}))


# Files of weights


def test_weights_file_is_its_hash_not_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.pt"
    file.write_bytes(b"weights")
    sweep = make_sweep({"target": "hand", "seed": 0, "method": "bn", "weights": str(file)})
    (run,) = sweep.runs()
    assert run.weights == "sha256:" + hashlib.sha256(b"weights").hexdigest()[:16]
    assert str(tmp_path) not in run.model_dump_json()
    assert sweep.file_of(run) == str(file)
    file.write_bytes(b"others")
    assert sweep.runs()[0].digest() != run.digest()


def test_checkpoints_are_filled_in_for_target_and_seed(tmp_path: Path) -> None:
    for target in ("hand", "hand+neon"):
        for seed in (0, 1):
            (tmp_path / f"{target}-{seed}.pt").write_bytes(f"{target} {seed}".encode())
    sweep = make_sweep(
        {"target": ["hand", "hand+neon"], "seed": [0, 1], "method": "bn", "stream": "mixed"}
        | {"checkpoint": f"{tmp_path}/{{target}}-{{seed}}.pt"}
    )
    found = sweep.runs()
    assert len(found) == 4
    for run in found:
        content = f"{run.target} {run.seed}".encode()
        expected = "sha256:" + hashlib.sha256(content).hexdigest()[:16]
        assert run.source == GivenModel(checkpoint=expected, size=32, normalize="half")
        assert sweep.file_of(run) == str(tmp_path / f"{run.target}-{run.seed}.pt")
        assert run.recipe(open_dataset("digits")) is None
        assert str(tmp_path) not in run.model_dump_json()
