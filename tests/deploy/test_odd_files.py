"""Masks of folders that hold more than images, and of images that are deep, wide or have long names."""

import os
from pathlib import Path

import numpy as np
import pytest
from clinic import SIZE, learner, noise, save_picture, watcher
from PIL import Image

from trueup.deploy import segment_folder


def test_pipes_and_circles_are_named_and_the_rest_is_segmented(tmp_path: Path) -> None:
    save_picture(tmp_path / "in/a.png", noise(SIZE, SIZE) // 5)
    os.mkfifo(tmp_path / "in/pipe.png")
    os.mkfifo(tmp_path / "in/pipe")
    (tmp_path / "in/circle").symlink_to("circle")
    (tmp_path / "in/gone.png").symlink_to("nothing.png")
    summary = segment_folder(watcher(), tmp_path / "in", tmp_path / "out")
    assert summary.done == ("a.png",)
    assert summary.broken == {"gone.png": "a broken link", "pipe.png": "a named pipe"}
    assert summary.left_out == {"circle": "a circular link", "pipe": "a named pipe"}


@pytest.mark.parametrize("length", [246, 251])
def test_images_with_long_names(tmp_path: Path, length: int, caplog: pytest.LogCaptureFixture) -> None:
    name = "x" * length + ".png"
    save_picture(tmp_path / "in" / name, noise(SIZE, SIZE) // 5)
    assert segment_folder(watcher(), tmp_path / "in", tmp_path / "out").done == (name,)
    assert (tmp_path / "out" / name).is_file()
    labels = watcher(multilabel=True, labels=("optic-disc",))
    assert segment_folder(labels, tmp_path / "in", tmp_path / "labels").masks == 1
    (mask,) = (tmp_path / "labels").glob("*.png")
    assert mask.name.endswith("-optic-disc.png")
    assert len(mask.name) == 255
    assert f"was too long and is shortened: {mask.name}" in caplog.text
    assert segment_folder(labels, tmp_path / "in", tmp_path / "labels").skipped == (name,)  # the same name again


def test_masks_of_cropped_and_squashed_pictures_lie_on_them(tmp_path: Path) -> None:
    bright = np.zeros((SIZE, 2 * SIZE), dtype=np.uint8)
    bright[:, :SIZE] = 255
    save_picture(tmp_path / "in/a.png", bright)
    masks = {}
    for resize in (None, "pad", "squash", "crop"):
        segment_folder(watcher(resize=resize), tmp_path / "in", tmp_path / str(resize))
        with Image.open(tmp_path / str(resize) / "a.png") as file:
            masks[resize] = np.asarray(file)
        assert masks[resize].shape == bright.shape
    assert np.array_equal(masks[None], masks["pad"])
    for resize in ("pad", "squash"):
        assert np.array_equal(masks[resize] > 0, bright > 0)
    middle = slice(SIZE // 2, SIZE // 2 + SIZE)
    assert np.array_equal(masks["crop"][:, middle] > 0, bright[:, middle] > 0)
    assert not masks["crop"][:, : SIZE // 2].any()  # beyond what it saw there is background


def test_how_pictures_are_read_is_a_setting_of_the_masks(tmp_path: Path) -> None:
    save_picture(tmp_path / "in/a.png", noise(SIZE, SIZE) // 5)
    segment_folder(learner(), tmp_path / "in", tmp_path / "out")
    assert segment_folder(learner(resize="pad"), tmp_path / "in", tmp_path / "out").skipped == ("a.png",)
    for other in ({"resize": "crop"}, {"range": (0, 4095)}):
        with pytest.raises(ValueError, match="was begun with other settings"):
            segment_folder(learner(**other), tmp_path / "in", tmp_path / "out")


def test_twelve_bits_are_seen_by_the_range_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    deep = np.zeros((SIZE, SIZE), dtype=np.uint16)
    deep[:, :8], deep[:, 8:16] = 1000, 3000  # of 4095: below and above the middle
    Image.fromarray(deep).save(tmp_path / "in/a.tif")
    segment_folder(watcher(range=(0, 4095)), tmp_path / "in", tmp_path / "out")
    with Image.open(tmp_path / "out/a.png") as file:
        assert np.array_equal(np.asarray(file) > 0, deep > 2047)
