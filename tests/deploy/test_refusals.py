"""What cannot be segmented is said before anything is written."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from clinic import SIZE, TSD, learner, noise, save_picture, unet, watcher, written
from PIL import Image
from torch import Tensor, nn

from trueup.core import files
from trueup.deploy import SegmentConfig, folder_images, segment_folder
from trueup.source.networks import build_network

CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"batch": 3}, "batch was 2 and is 3"),
    ({"seed": 1}, "seed was 0 and is 1"),
    ({"hyper": {**TSD, "lr": 0.5}}, "tsd.lr was 0.01 and is 0.5"),
    ({"method": "bn", "hyper": {}}, "method was 'tsd' and is 'bn'"),
    ({"field": 90.0}, "field was None and is 90.0"),
    ({"size": 40}, "size was 32 and is 40"),
    ({"normalize": "half"}, "normalize was 'imagenet' and is 'half'"),
    ({"model": unet(seed=1)}, "model was '"),
]


def test_other_settings_go_elsewhere(tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(SIZE, SIZE) // 5)
    segment_folder(learner(), tmp_path / "in", tmp_path / "out")
    before = written(tmp_path / "out")
    for change, says in CHANGES:
        with pytest.raises(ValueError, match="other settings") as caught:
            segment_folder(learner(**change), tmp_path / "in", tmp_path / "out")
        assert says in str(caught.value)
        assert str(caught.value).count(" was ") == 2, "only what differs is named"
        assert "--out" in str(caught.value)
        assert "--fresh" in str(caught.value)
        assert written(tmp_path / "out") == before
    segment_folder(learner(**change), tmp_path / "in", tmp_path / "out", fresh=True)


class Unsure(nn.Module):
    """Has no answer to bright images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits / (x.mean() < 0.9)


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        (lambda: learner(size=0), "size=0"),
        (lambda: learner(batch=0), "batch=0"),
        (lambda: learner(normalize="none"), "normalize='none'"),
        (lambda: learner(field=0.0), "field=0.0"),
        (lambda: learner(field=float("nan")), "field=nan"),
        (lambda: learner(labels=("disc",)), "for multilabel"),
        (lambda: learner(multilabel=True, labels=("a", "b", "a")), "must be unique"),
        (lambda: learner(multilabel=True, labels=("a", "b", "c/d")), "valid in file names"),
        (lambda: learner(multilabel=True, labels=("a", "b")), "3 labels, not 2: a, b"),
        (lambda: learner(method="tds"), "did you mean 'tsd'"),
        (lambda: learner(method="lame", hyper={}), "not for segmentation"),
        (lambda: learner(device="nowhere"), "device 'nowhere'"),
        (lambda: learner(model=unet(1)), "multilabel=True"),
        (lambda: learner(model=build_network("digits-net", 3), method="source", hyper={}), "not masks"),
        (lambda: learner(model=nn.Conv2d(1, 2, 1)), "cannot take images of shape (3, 32, 32)"),
        (lambda: watcher(model=Unsure()), "a.png: the model's answer to this batch is not finite"),
    ],
)
def test_what_cannot_be_done_is_said(setup: Callable[[], SegmentConfig], says: str, tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", np.full((SIZE, SIZE), 255))
    with pytest.raises(ValueError, match=re.escape(says)):
        segment_folder(setup(), tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists() or (written(tmp_path / "out") == {} and "finite" in says)


def test_folders_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    with pytest.raises(ValueError, match="is not a folder"):
        segment_folder(watcher(), folder, tmp_path / "out")
    (folder / "deep").mkdir(parents=True)
    (folder / "notes.txt").touch()
    with pytest.raises(ValueError, match="contain no images"):
        segment_folder(watcher(), folder, tmp_path / "out")
    save_picture(folder / "a.png", noise(SIZE, SIZE) // 5)
    for out in (folder, tmp_path, folder / "deep" / ".."):
        with pytest.raises(ValueError, match="it contains the images"):
            segment_folder(watcher(), folder, out)
    save_picture(folder / "a.jpg", noise(SIZE, SIZE) // 5)
    with pytest.raises(ValueError, match=r"a\.jpg and a\.png would have the same mask file"):
        segment_folder(watcher(), folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_masks_drawn_by_hand_are_safe(tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(SIZE, SIZE) // 5)
    save_picture(tmp_path / "masks" / "a.png", np.ones((SIZE, SIZE)))
    before = written(tmp_path)
    with pytest.raises(ValueError, match=r"a\.png already exists"):
        segment_folder(watcher(), tmp_path / "in", tmp_path / "masks")
    assert written(tmp_path) == before
    assert not (tmp_path / "masks" / ".trueup").exists()


@pytest.mark.parametrize("damage", ["journal", "format", "state", "no state"])
def test_a_damaged_journal_is_refused(damage: str, tmp_path: Path) -> None:
    save_picture(tmp_path / "in" / "a.png", noise(SIZE, SIZE) // 5)
    segment_folder(learner(), tmp_path / "in", tmp_path / "out")
    kept = tmp_path / "out" / ".trueup" / "journal.json"
    (state,) = kept.parent.glob("state-*")
    if damage == "journal":
        kept.write_bytes(kept.read_bytes()[:-10])
    elif damage == "format":
        kept.write_text(kept.read_text().replace("segment-1", "segment-9"))
    elif damage == "state":
        state.write_bytes(state.read_bytes()[:-10])
    else:
        state.unlink()
    with pytest.raises(ValueError, match=r"--fresh|--out"):
        segment_folder(learner(), tmp_path / "in", tmp_path / "out")
    assert segment_folder(learner(), tmp_path / "in", tmp_path / "out", fresh=True).masks == 1


def test_settings_are_all_in_the_journal() -> None:
    names = {"size", "normalize", "multilabel", "labels", "method", "field", "batch", "seed", "device", "model"}
    settings = learner(hyper={"params": lambda name: "up" in name}).settings()
    assert names | {"tsd.lr", "tsd.params", "tsd.norm"} <= settings.keys()
    assert settings["tsd.params"] == "a function"
    assert settings["model"] == files.digest(unet().state_dict())[:16]


def test_links_back_up_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "in/a.png")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    found, _ = folder_images.find_images(tmp_path / "in", tmp_path / "out", ("",))
    assert [image.name for image in found] == ["a.png"]


def test_several_volumes_in_a_file_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in").mkdir()
    nibabel.save(nibabel.Nifti1Image(np.zeros((8, 8, 2, 3), dtype=np.int16), np.eye(4)), tmp_path / "in/cine.nii.gz")
    found, _ = folder_images.find_images(tmp_path / "in", tmp_path / "out", ("",))
    ((image,),) = folder_images.read_batches(found, lambda image: image.read(None), 1, {})
    assert image.content.image.shape[0] == 2
    assert "cine.nii.gz holds 3 volumes; the first is segmented" in caplog.text
