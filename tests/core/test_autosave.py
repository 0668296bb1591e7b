"""States on disk while an adapter works: through kills, damage and full disks."""

import copy
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm
from small import SMALL
from torch import Tensor

import trueup
from trueup import Guard
from trueup.atomic import is_alive
from trueup.core import files
from trueup.testing import convnet, images
from trueup.testing.case import difference, play, same

XS = [images(16, seed=i, shift=1.0)[0] for i in range(12)]


def every_kind() -> dict[str, trueup.Adapter]:
    """All methods, without and with the safe preset."""
    made = {}
    for method in trueup.list_methods():
        for preset in (None, "safe"):
            hyper = SMALL.get((method, "classification"), {})
            made[f"{method}-{preset}"] = adapter = trueup.adapt(convnet(), method, preset=preset, **hyper)
            if method == "eata":
                adapter.prepare([images(32, seed=s)[0] for s in (1, 2)])
    return made


def at(i: int) -> Tensor:
    return XS[i % len(XS)][:8]


def work(folder: str) -> None:
    """Write after each batch until killed."""
    kinds = every_kind()
    seen = {name: adapter.checkpoint(f"{folder}/{name}", every=1, keep=2) for name, adapter in kinds.items()}
    print("ready", flush=True)  # noqa: T201  (another process waits for it)
    for i in range(10**6):
        for name, adapter in kinds.items():
            adapter(at(seen[name] + i))


def resume(folder: str) -> None:
    """Go on for three batches, and write: a kill between a new state and the end of an old one leaves one too many."""
    for name, adapter in every_kind().items():
        seen = adapter.checkpoint(f"{folder}/{name}", every=3, keep=2)
        answers = [adapter(at(i)) for i in range(seen, seen + 3)]
        torch.save({"seen": seen, "answers": answers}, f"{folder}/{name}.pt")


def program(job: str, folder: Path) -> str:
    """Return the code of a process that does one of the jobs above."""
    here = Path(__file__).parent
    code = f"import conftest, test_autosave; test_autosave.{job}({str(folder)!r})"
    return f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; {code}"


@pytest.mark.slow
def test_what_was_killed_goes_on_to_the_bit(tmp_path: Path) -> None:
    """A process that writes after each batch is killed, twice; another goes on where the last whole states are."""
    for wait in (0.0, 0.7):
        killed = subprocess.Popen([sys.executable, "-c", program("work", tmp_path)], stdout=subprocess.PIPE, text=True)
        assert killed.stdout is not None
        assert killed.stdout.readline() == "ready\n"
        while wait == 0.0 and len(list(tmp_path.glob("*/state-*"))) < 2 * 2 * len(trueup.list_methods()):
            time.sleep(0.01)  # two states of all
        time.sleep(wait)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        killed.stdout.close()
    warm.run("-c", program("resume", tmp_path))
    for name, adapter in every_kind().items():
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert found["seen"] >= 2
        assert same(found["answers"], [adapter(at(i)) for i in range(found["seen"] + 3)][-3:]), name
        assert len(list((tmp_path / name).glob("state-*"))) == 2
        assert not list((tmp_path / name).glob(".*partial"))


def numbers(folder: Path) -> list[int]:
    return sorted(int(p.name[6:16]) for p in folder.iterdir())


@pytest.mark.parametrize(("every", "keep", "left"), [(1, 3, [10, 11, 12]), (5, 3, [1, 2]), (4, 1, [3]), (13, 2, [])])
def test_every_so_often_and_the_last_few(every: int, keep: int, left: list[int], tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "tent")
    assert adapter.checkpoint(tmp_path / "a" / "b", every=every, keep=keep) == 0
    play(adapter, XS)
    assert numbers(tmp_path / "a" / "b") == left
    later = trueup.adapt(convnet(), "tent")
    assert later.checkpoint(tmp_path / "a" / "b") == 12 - 12 % every


def test_watched_and_robust_adapters_are_kept_too(tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "tsd", norm="robust", guard=Guard(window=32))
    adapter.checkpoint(tmp_path, every=1)
    play(adapter, XS[:7])
    later = trueup.adapt(convnet(), "tsd", norm="robust", guard=Guard(window=32))
    assert later.checkpoint(tmp_path) == 7
    assert difference(adapter, later) == []
    assert same(play(adapter, XS[7:]), play(later, XS[7:]))


def test_a_state_that_was_taken_back_can_be_written(tmp_path: Path) -> None:
    """A rollback puts a kept state in place; what is written next must not trip over the two being one."""
    adapter = trueup.adapt(convnet(), "tent", lr=1e-2, guard=Guard(window=32))
    adapter.checkpoint(tmp_path, every=1)
    play(adapter, XS[:6])
    with torch.no_grad():
        adapter.net.model.bn1.weight.fill_(torch.nan)
    play(adapter, XS[6:8])
    assert adapter.health.events["rollback"] == 1
    later = trueup.adapt(convnet(), "tent", lr=1e-2, guard=Guard(window=32))
    assert later.checkpoint(tmp_path) == adapter.batches
    assert same(play(adapter, XS[8:]), play(later, XS[8:]))


def truncate(blob: bytes) -> bytes:
    return blob[: len(blob) // 2]


def flip(blob: bytes) -> bytes:
    return blob[:-9] + bytes([blob[-9] ^ 16]) + blob[-8:]


def empty(blob: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [truncate, flip, empty])
def test_damage_to_the_newest(damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = trueup.adapt(convnet(), "eta")
    adapter.checkpoint(tmp_path, every=2)
    play(adapter, XS[:6])
    for count, newest in ((1, 3), (2, 2)):
        path = tmp_path / f"state-{newest:010d}.safetensors"
        path.write_bytes(damage(path.read_bytes()))
        later = trueup.adapt(convnet(), "eta")
        with caplog.at_level(logging.WARNING, logger="trueup"):
            assert later.checkpoint(tmp_path, every=2) == 6 - 2 * count
        assert caplog.text.count("trying the one before it") == count
        caplog.clear()
    plain = trueup.adapt(convnet(), "eta")
    play(plain, XS[:2])
    assert same(play(later, XS[2:6]), play(plain, XS[2:6]))
    assert later.checkpoint(tmp_path) == 6  # and what is written now is newer than the damaged ones
    path = tmp_path / "state-0000000001.safetensors"
    assert not path.exists() or path.stat().st_size


def test_nothing_whole_is_a_fresh_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state-0000000007.safetensors").write_bytes(b"not a state")
    adapter = trueup.adapt(convnet(), "tent")
    assert adapter.checkpoint(tmp_path, every=1) == 0
    assert "state-0000000007" in caplog.text
    assert torch.equal(adapter(XS[0]), trueup.adapt(convnet(), "tent")(XS[0]))
    assert numbers(tmp_path) == [7, 8]


@pytest.mark.parametrize("built", [False, True])
def test_a_foreign_state_is_refused_and_nothing_changes(built: bool, tmp_path: Path) -> None:
    theirs = trueup.adapt(convnet(), "tent")
    theirs.checkpoint(tmp_path, every=1)
    play(theirs, XS[:2])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for other in (
        trueup.adapt(convnet(), "tsd"),
        trueup.adapt(convnet(1), "tent"),
        trueup.adapt(convnet(), "tent", guard=True),
    ):
        if built:
            play(other, XS[:3])
        twin = copy.deepcopy(other)
        with pytest.raises(ValueError, match="belongs to another"):
            other.checkpoint(tmp_path, every=1)
        assert difference(twin, other) == []
        assert same(play(twin, XS[3:5]), play(other, XS[3:5]))
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_what_the_dead_left_half_written_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        names = {pid: f".state-0000000004.safetensors.{pid}.partial" for pid in (dead.pid, living.pid, os.getpid())}
        for name in (*names.values(), ".notes.1.partial", "state-4.safetensors"):
            (tmp_path / name).write_bytes(b"x")
        trueup.adapt(convnet(), "tent").checkpoint(tmp_path)
        left = {p.name for p in tmp_path.iterdir()}
        assert left == {names[living.pid], ".notes.1.partial", "state-4.safetensors"}
    finally:
        living.kill()
        living.communicate()


def test_a_disk_that_fails_stops_no_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapter, plain = trueup.adapt(convnet(), "tent"), trueup.adapt(convnet(), "tent")
    adapter.checkpoint(tmp_path, every=2)
    play(adapter, XS[:2])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write = files.write
    monkeypatch.setattr(files, "write", full)
    play(adapter, XS[2:6])
    assert caplog.text.count("could not be written") == 3  # at batches 4, 5 and 6: the next tries again
    assert "No space left" in caplog.text
    assert numbers(tmp_path) == [1]
    monkeypatch.setattr(files, "write", write)
    adapter(XS[6])
    assert numbers(tmp_path) == [1, 2]
    play(plain, XS[:7])
    assert torch.equal(adapter(XS[7]), plain(XS[7]))


def test_a_folder_that_is_gone_stops_no_prediction(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = trueup.adapt(convnet(), "tent")
    adapter.checkpoint(tmp_path / "states", every=1)
    (tmp_path / "states").rmdir()
    assert adapter(XS[0]).isfinite().all()
    assert "could not be written" in caplog.text


def test_numbers_go_on_after_a_reset(tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "tent")
    adapter.checkpoint(tmp_path, every=1, keep=2)
    play(adapter, XS[:5])
    adapter.reset()
    play(adapter, XS[5:7])
    assert numbers(tmp_path) == [6, 7]
    later = trueup.adapt(convnet(), "tent")
    assert later.checkpoint(tmp_path) == 2
    assert same(play(later, XS[7:9]), play(adapter, XS[7:9]))


@pytest.mark.parametrize("built", [False, True])
def test_it_goes_on_after_loading_another_state(built: bool, tmp_path: Path) -> None:
    other = trueup.adapt(convnet(), "tent")
    play(other, XS[:3])
    other.save(tmp_path / "state")
    adapter = trueup.adapt(convnet(), "tent", example=XS[0] if built else None)
    adapter.checkpoint(tmp_path / "kept", every=1)
    adapter.load(tmp_path / "state")
    adapter(XS[3])
    assert numbers(tmp_path / "kept") == [1]


def test_a_copy_does_not_write(tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "tent")
    adapter.checkpoint(tmp_path, every=1)
    adapter(XS[0])
    copy.deepcopy(adapter)(XS[1])
    assert numbers(tmp_path) == [1]


@pytest.mark.parametrize("name", ["every", "keep"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_that_mean_nothing_are_refused(name: str, value: object, tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), "tent")
    with pytest.raises(ValueError, match=f"{name}="):
        adapter.checkpoint(tmp_path / "states", **{name: value})
    assert not (tmp_path / "states").exists()
    adapter(XS[0])


def test_every_call_counts_also_where_no_row_could_be_used(tmp_path: Path) -> None:
    """What is returned says where in the stream to go on."""
    adapter = trueup.adapt(convnet(), "tent", guard=True)
    adapter.checkpoint(tmp_path, every=1)
    stream: list[Tensor] = [XS[0], XS[1], XS[2] * torch.nan, XS[3]]
    play(adapter, stream)
    assert trueup.adapt(convnet(), "tent", guard=True).checkpoint(tmp_path) == 4


def test_a_living_process_is_told_from_a_dead_one() -> None:
    assert is_alive(os.getppid())
    assert not is_alive(os.getpid())


def test_an_interrupt_while_a_state_is_written_takes_the_batch_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, twin = trueup.adapt(convnet(), "tsd"), trueup.adapt(convnet(), "tsd")
    adapter.checkpoint(tmp_path, every=2)
    play(adapter, XS[:1])
    play(twin, XS[:1])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            adapter(XS[1])
    assert difference(adapter, twin) == []
    assert torch.equal(adapter(XS[1]), twin(XS[1]))
