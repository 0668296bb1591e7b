"""A later call does what is new, with what was learnt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clinic import SIZE, StopError, learner, noise, numbers, save_nifti, save_picture, stop_after, watcher, written

from trueup.deploy import segment_folder


def test_later_images_are_done_with_what_was_learnt(whole: Any, tmp_path: Path) -> None:
    folder, expected = whole("tsd")
    now, out = tmp_path / "now", tmp_path / "out"
    now.mkdir()
    (now / "a.nii").write_bytes((folder / "a.nii").read_bytes())
    assert segment_folder(learner(), now, out).done == ("a.nii",)
    (now / "a1.png").write_bytes((folder / "a1.png").read_bytes())
    stamp = (out / "a.nii").stat().st_mtime_ns
    summary = segment_folder(learner(), now, out)
    assert (summary.done, summary.skipped) == (("a1.png",), ("a.nii",))
    assert (out / "a.nii").stat().st_mtime_ns == stamp
    assert written(out) == {name: expected[name] for name in ("a.nii", "a1.png")}
    before = (out / ".trueup" / "journal.json").read_bytes()
    assert segment_folder(learner(), now, out).done == ()
    assert (out / ".trueup" / "journal.json").read_bytes() == before


def test_what_has_changed_is_done_again(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        save_picture(tmp_path / "in" / name, noise(SIZE, SIZE) // 5)
    segment_folder(watcher(), tmp_path / "in", tmp_path / "out")
    bright = np.full((SIZE, SIZE), 255)
    save_picture(tmp_path / "in" / "b.png", bright)
    (tmp_path / "out" / "c.png").unlink()
    assert segment_folder(watcher(), tmp_path / "in", tmp_path / "out").done == ("b.png", "c.png")
    assert numbers(tmp_path / "out" / "b.png").all()


def test_a_repaired_image_is_done(tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(SIZE, SIZE) // 5)
    (tmp_path / "in" / "b.nii.gz").write_bytes(b"\x1f\x8bcut off")
    assert list(segment_folder(watcher(), tmp_path / "in", tmp_path / "out").broken) == ["b.nii.gz"]
    save_nifti(tmp_path / "in" / "b.nii.gz", noise(20, 20, 2))
    summary = segment_folder(watcher(), tmp_path / "in", tmp_path / "out")
    assert (summary.done, summary.broken) == (("b.nii.gz",), {})


def test_masks_are_no_images(tmp_path: Path) -> None:
    save_picture(tmp_path / "a.png", noise(SIZE, SIZE) // 5)
    assert segment_folder(watcher(), tmp_path, tmp_path / "masks").done == ("a.png",)
    assert segment_folder(watcher(), tmp_path, tmp_path / "masks").done == ()
    assert segment_folder(watcher(), tmp_path, tmp_path / "deep" / "more").done == ("a.png",), (
        "nor are those of another call"
    )


def test_fresh_starts_over(whole: Any, tmp_path: Path) -> None:
    folder, expected = whole("tsd")
    segment_folder(learner(seed=7), folder, tmp_path)
    assert written(tmp_path) != expected
    with pytest.raises(StopError):
        segment_folder(learner(), folder, tmp_path, fresh=True, progress=stop_after(0))
    assert written(tmp_path).keys() == expected.keys(), "masks stay until they are replaced"
    assert segment_folder(learner(), folder, tmp_path).skipped == ()
    assert written(tmp_path) == expected
