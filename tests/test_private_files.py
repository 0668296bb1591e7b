"""Modes of files: states that hold images or features are for their owner alone, from the first byte on."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trueup
from trueup import atomic
from trueup.core.registry import get_method
from trueup.testing import convnet, images, segnet

X = images(16, seed=0, shift=1.0)[0]
PRIVATE = {"t3a", "tast", "tast-bn", "tsd", "adacontrast", "note", "rotta"}
pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_methods_that_keep_images_or_features_say_so() -> None:
    assert {name for name in trueup.list_methods() if get_method(name).info.private} == PRIVATE
    assert get_method("tsd", "segmentation").info.private
    for name in trueup.list_methods():  # what is said to people and what is said to programs is the same
        info = get_method(name).info
        words = any(word in info.memory for word in ("features", "images"))
        assert words == info.private, name


@pytest.mark.parametrize(("method", "expected"), [("tsd", 0o600), ("note", 0o600), ("t3a", 0o600), ("tent", 0o644)])
def test_states_that_hold_images_or_features_are_private(method: str, expected: int, tmp_path: Path) -> None:
    adapter = trueup.adapt(convnet(), method)
    adapter(X)
    adapter.save(tmp_path / "state")
    assert mode(tmp_path / "state") == expected
    adapter.checkpoint(tmp_path / "states", every=1)
    adapter(X)
    assert [mode(path) for path in (tmp_path / "states").iterdir()] == [expected]
    adapter.load(tmp_path / "state")


def test_states_of_segmenters_are_private_too(tmp_path: Path) -> None:
    adapter = trueup.adapt(segnet(), "tsd", example=X[:2])
    adapter.save(tmp_path / "state")
    assert mode(tmp_path / "state") == 0o600


def test_a_public_file_in_its_place_does_not_stay_public(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    left = tmp_path / f".state.{os.getpid()}.partial"  # of a killed process with the same number
    left.write_bytes(b"left")
    left.chmod(0o644)
    atomic.write_atomic(path, b"new", private=True)
    assert (mode(path), path.read_bytes()) == (0o600, b"new")
    assert not left.exists()


def test_the_temporary_file_is_private_before_anything_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    fsync = os.fsync

    def watch(file: int) -> None:
        seen.extend(mode(path) for path in tmp_path.glob(".*.partial"))
        fsync(file)

    def created(path: Any, flags: int, given: int = 0o777, **rest: Any) -> int:
        handle = real(path, flags, given, **rest)
        if str(path).endswith(".partial"):
            seen.append(mode(Path(path)))
        return handle

    real = os.open
    monkeypatch.setattr(os, "open", created)
    monkeypatch.setattr(os, "fsync", watch)
    atomic.write_atomic(tmp_path / "state", b"secret", private=True)
    assert seen == [0o600, 0o600]


def test_other_files_follow_the_umask(tmp_path: Path) -> None:
    atomic.write_atomic(tmp_path / "mask", b"")
    os.umask(0o077)
    atomic.write_atomic(tmp_path / "narrow", b"")
    assert (mode(tmp_path / "mask"), mode(tmp_path / "narrow")) == (0o644, 0o600)
