"""The command line as its users type it: in an empty folder, in a process of its own where that matters."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import warm
from PIL import Image
from typer.testing import CliRunner

from trueup.bench.records import read_records
from trueup.bench.settings import make_sweep
from trueup.cli.app import app, start
from trueup.cli.progress import progress_bar, stoppable

FAST = ["--train", "iterations=6", "--train", "batch=8", "--limit", "128"]


def trueup(*words: str, cwd: Path, status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process of its own."""
    program = "from trueup.cli import main; main()"
    done = warm.call("-c", program, *words, cwd=cwd, environment={"COLUMNS": "100"})
    assert done.returncode == status, done.stdout + done.stderr
    return done


def invoke(*words: str, status: int = 0) -> str:
    """Run a command in this process and return what it prints."""
    result = CliRunner().invoke(app, list(words), catch_exceptions=False, env={"COLUMNS": "100"})
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of one's own: two cameras, two classes."""
    for camera in ("day", "night"):
        for label in ("cat", "dog"):
            folder = tmp_path / "photos" / camera / label
            folder.mkdir(parents=True)
            for i in range(12):
                light = 40 * (camera == "day") + 120 * (label == "cat") + 3 * i
                Image.fromarray(np.full((20, 24, 3), light, dtype=np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize(
    "verb", [[], ["list"], ["data", "check"], ["train"], ["run"], ["bench"], ["report"], ["demo"], ["segment"]]
)
def test_help_explains_every_verb(verb: list[str]) -> None:
    text = invoke(*verb, "--help")
    assert "Usage" in text
    assert len(text.splitlines()) > 8


def test_completion_is_offered() -> None:
    assert "--install-completion" in invoke("--help")


def test_list_names_everything() -> None:
    text = invoke("list")
    for word in ("tsd", "shot-im", "pacs", "digits-c", "folder", "dirichlet", "gradual"):
        assert word in text
    assert "per_class=100" in invoke("list", "hyper").replace("\n", "").replace(" ", "")
    assert "pacs" not in invoke("list", "methods")


def test_a_card_says_what_one_needs_to_know() -> None:
    text = invoke("data", "card", "pacs")
    for word in ("9,991", "giraffe", "sketch 3,929", "licence", "get it from", "domain/class/image"):
        assert word in text


def test_data_check_of_a_folder_of_ones_own(photos: Path, tmp_path: Path) -> None:
    fine = trueup("data", "check", "folder", "--root", str(photos), cwd=tmp_path)
    assert "48 images, 2 classes, 2 domains" in fine.stdout
    (photos / "night" / "dog" / "3.png").write_bytes(b"not an image")
    (photos / "night" / "dog" / "notes.txt").write_text("no image")
    wrong = trueup("data", "check", "folder", "--root", str(photos), cwd=tmp_path, status=1)
    assert "1 images cannot be read: night/dog/3.png" in wrong.stdout
    assert "night/dog/notes.txt" in wrong.stdout
    assert "counted" in trueup("data", "check", "folder", "--root", str(photos), "--fast", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "--method", "tds", "--dry-run"], "Did you mean 'tsd'?"),
        (["bench", "--method", "tsd:per_clas=3", "--dry-run"], "did you mean 'per_class'?"),
        (["bench", "--target", "typ", "--dry-run"], "Did you mean 'type'?"),
        (["bench", "--dataset", "pac", "--dry-run"], "Did you mean 'pacs'?"),
        (["bench", "--dataset", "pacs", "--dry-run"], "--root"),
        (["bench", "--train", "iteration=3", "--dry-run"], "Did you mean 'iterations'?"),
        (["bench", "--train", "iterations=many", "--dry-run"], "iterations"),
        (["bench", "--stream", "dirichle", "--dry-run"], "did you mean 'dirichlet'?"),
        (["bench", "nowhere.yaml", "--dry-run"], "nowhere.yaml cannot be read"),
        (["report", "nowhere"], "nowhere does not exist"),
        (["data", "check", "pacs", "--root", "nowhere"], "nowhere is not a folder"),
        (["list", "method"], "Did you mean 'methods'?"),
    ],
)
def test_errors_are_one_sentence_with_the_way_out(words: list[str], says: str, tmp_path: Path) -> None:
    done = trueup(*words, cwd=tmp_path, status=2)
    assert says.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is written before the settings are checked"


def test_settings_files_are_validated(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("dataset: digits\nmethods: [tsd]\n")
    assert "Did you mean 'method'?" in trueup("bench", "sweep.yaml", "--dry-run", cwd=tmp_path, status=2).stderr
    file.write_text("method: [source, {tsd: {lr: 1e-5}}]\nseed: [0, 1]\ntarget: neon\n")
    text = trueup("bench", "sweep.yaml", "--dry-run", cwd=tmp_path).stdout
    assert "4 runs: 0 done, 4 to run; 2 source models to train" in text
    text = trueup("bench", "sweep.yaml", "--seed", "7", "--dry-run", cwd=tmp_path).stdout
    assert "2 runs: 0 done" in text, "flags take the place of what the file says"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_sweeps")
def test_a_sweep_from_flags_to_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["bench", "-t", "type", "-m", "source", "-m", "t3a", "-m", "tsd:lr=1e-5", "-s", "0", "-s", "1", *FAST]
    text = invoke(*words)
    assert "6 records in runs/records.jsonl" in text
    assert "±" in text
    assert "6 done, 0 to run; 0 source models to train" in invoke(*words, "--dry-run")
    for form, sign in (("markdown", "| method"), ("latex", r"\toprule"), ("csv", "label,method")):
        invoke("report", "runs", "--form", form, "--output", f"table.{form}")
        assert sign in (tmp_path / f"table.{form}").read_text()
    assert "calibration" in invoke("report", "--metric", "ece")


@pytest.mark.slow
def test_training_and_a_single_run(tmp_path: Path) -> None:
    flags = ["--train", "iterations=6", "--train", "batch=8"]
    assert "held-out source images" in trueup("train", "-t", "type", "-s", "0", *flags, cwd=tmp_path).stdout
    (model,) = (tmp_path / "runs" / "checkpoints").iterdir()
    stamp = model.stat().st_mtime_ns
    record = json.loads(trueup("run", "tent", "-t", "type", *flags, "--limit", "128", cwd=tmp_path).stdout)
    assert record["results"]["images"] == 128
    assert model.stat().st_mtime_ns == stamp, "the model was trained again"
    assert [r["id"] for r in read_records(tmp_path / "runs")] == [record["id"]]


@pytest.mark.slow
def test_a_folder_of_ones_own_from_images_to_a_record(photos: Path, tmp_path: Path) -> None:
    (photos / "day" / "cat" / "0.png").write_bytes(b"broken")
    words = ["run", "bn", "-d", "folder", "-r", str(photos), "-t", "day", "-n", "digits-net", "-w", "none"]
    flags = ["--train", "size=16", "--train", "iterations=4", "--train", "batch=4", "-b", "8"]
    record = json.loads(trueup(*words, *flags, cwd=tmp_path).stdout)
    assert record["results"]["images"] == 23
    assert record["results"]["broken"] == 1
    assert str(photos) not in json.dumps(record)


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_a_failure_makes_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["bench", "-t", "type", "-s", "0", "-m", "source", "-m", "tent:params=nothing_like_it", *FAST]
    text = invoke(*words, status=1)
    assert "failed: tent on digits/type" in text
    assert "1 records in" in text


@pytest.mark.slow
def test_ctrl_c_says_that_nothing_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from trueup.cli import main; main()", "bench", "-t", "type", "-s", "0"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and not (tmp_path / "runs" / "records.jsonl").exists():
        time.sleep(0.01)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the same command continues from there" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "inside", "says"),
    [
        (["data", "unpack", "a.zip", "--unverified"], "data.unpack_archive", "The same command starts over."),
        (["data", "check", "pacs"], "data.check_files", "The same command starts over."),
        (["report"], "report.read_records", "The same command starts over."),
        (["bench"], "bench.make_sweep", "the same command continues from there."),
        (["run", "-t", "type"], "run.sweep.run", "the same command continues from there."),
    ],
)
def test_ctrl_c_promises_no_more_than_the_verb_keeps(
    words: list[str], inside: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"trueup.cli.{inside}", interrupted)
    monkeypatch.setattr(sys, "argv", ["trueup", *words])
    with pytest.raises(SystemExit, match="130"):
        start()
    assert f"Stopped. {says}" in capsys.readouterr().err.replace("Finished work is kept; ", "")


def test_a_ctrl_c_that_python_forgets_is_heard_at_the_next_event() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stoppable():
        with contextlib.suppress(KeyboardInterrupt):  # as in a destructor
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), progress_bar("a step") as advance:
            advance(1, 2)
    assert signal.getsignal(signal.SIGINT) is before
    with stoppable(), progress_bar("another") as advance:
        advance(1, 2)


def test_methods_with_values(tmp_path: Path) -> None:
    (run,) = make_sweep({"target": "type", "seed": 0, "method": "tsd:lr=0.1,per_class=none,consistency=false"}).runs()
    assert (run.hyper["lr"], run.hyper["per_class"], run.hyper["consistency"]) == (0.1, None, False)
    done = trueup("bench", "-m", "tsd:lr", "--dry-run", cwd=tmp_path, status=2)
    assert "'lr' must be name=value" in done.stderr
