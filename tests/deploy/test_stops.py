"""No stop leaves a trace in the masks: they are the same to the byte."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clinic import TSD, UPDATES, StopError, learner, noise, save_picture, stop_after, watcher, written

from trueup.core import files
from trueup.deploy import folder_images, run_log, segment_folder


@pytest.mark.parametrize(("method", "keep"), [("tsd", 0.0), ("tsd", 1e9), ("bn", 0.0)])
def test_stops_leave_no_trace(method: str, keep: float, whole: Any, tmp_path: Path) -> None:
    folder, expected = whole(method)
    setup = learner(method=method, hyper=TSD if method == "tsd" else {})
    stops, done, random = 0, [], np.random.default_rng(0)
    for calls in range(1, 60):
        try:
            # What stops after few calls gets nowhere if it keeps nothing; so the patience grows.
            wait = 3 * calls if keep else int(random.integers(0, 8))
            summary = segment_folder(setup, folder, tmp_path, keep_every=keep, progress=stop_after(wait))
        except StopError:
            stops += 1
            assert {name: blob for name, blob in written(tmp_path).items() if expected[name] != blob} == {}
            done.append(len(json.loads((tmp_path / ".trueup" / "journal.json").read_text())["done"]))
        else:
            break
    assert written(tmp_path) == expected
    assert stops > 3
    assert done == sorted(done)
    assert len(set(done)) > 2 if keep == 0 else set(done) == {0}
    assert summary.updates == (UPDATES if method == "tsd" else 0)
    lock, kept, *states = sorted(path.name for path in (tmp_path / ".trueup").iterdir())
    assert (lock, kept, len(states)) == (".lock", "journal.json", 1), "old states are gone"


@pytest.mark.parametrize("when", ["state", "journal", "mask"])
def test_a_failure_of_any_write_leaves_no_trace(
    when: str, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whole("tsd")
    count = 0

    def fail_at(number: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                raise OSError("the disk is full")
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        if when == "state":
            patch.setattr(files, "write", fail_at(3, files.write))
        elif when == "journal":
            patch.setattr(run_log, "write_atomic", fail_at(3, run_log.write_atomic))
        else:
            patch.setattr(folder_images, "write_atomic", fail_at(3, folder_images.write_atomic))
        with pytest.raises(OSError, match="full"):
            segment_folder(learner(), folder, tmp_path, keep_every=0)
    assert 0 < len(written(tmp_path)) < len(expected)
    segment_folder(learner(), folder, tmp_path)
    assert written(tmp_path) == expected


def test_a_write_that_fails_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(32, 32) // 5)
    real = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target.name == "a.png":
            assert path.parent == target.parent
            raise OSError("the disk is full")
        return real(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="full"):
        segment_folder(watcher(), tmp_path / "in", tmp_path / "out")
    assert written(tmp_path / "out") == {}


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import clinic
from trueup.deploy import segment_folder
segment_folder(clinic.learner(), sys.argv[1], sys.argv[2], keep_every=0.1, progress=lambda done, of: time.sleep(0.05))
"""


@pytest.mark.slow
def test_a_kill_leaves_no_trace(whole: Any, tmp_path: Path) -> None:
    folder, expected = whole("tsd")
    code = SCRIPT.format(tests=str(Path(__file__).parents[1]))
    process = subprocess.Popen([sys.executable, "-c", code, str(folder), str(tmp_path)])
    kept = tmp_path / ".trueup" / "journal.json"
    while process.poll() is None and not (kept.exists() and len(json.loads(kept.read_text())["done"]) > 1):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9, "it was too fast to be killed"
    (tmp_path / "eyes").mkdir(exist_ok=True)
    (tmp_path / "eyes" / ".0.png.123.partial").write_bytes(b"half a mask")
    summary = segment_folder(learner(), folder, tmp_path)
    assert len(summary.skipped) >= 2
    assert written(tmp_path) == expected


def test_two_at_a_time_are_one_too_many(tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(32, 32) // 5)
    (tmp_path / "out").mkdir()
    with run_log.exclusive_access(tmp_path / "out"), pytest.raises(ValueError, match="another process is writing"):
        segment_folder(watcher(), tmp_path / "in", tmp_path / "out")
    assert segment_folder(watcher(), tmp_path / "in", tmp_path / "out").masks == 1
