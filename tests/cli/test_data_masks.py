"""`trueup data` and `trueup list` for images with masks, as their users type it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from trueup.cli.app import app
from trueup.data.datasets import phantoms


def invoke(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False, env={"COLUMNS": "120"})
    assert result.exit_code == status, result.output
    return result.output


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Two domains of one's own with names that look like markup, three classes."""
    for domain, count in (("[day]", 3), ("night", 2)):
        for i in range(count):
            mask = np.zeros((20, 30), dtype=np.uint8)
            mask[5:15, 5:15], mask[8:12, 8:12] = 1, 2
            for folder, pixels in (("images", np.full((20, 30, 3), 90, dtype=np.uint8)), ("masks", mask)):
                file = tmp_path / "mine" / domain / folder / f"{i}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
    (tmp_path / "mine/classes.txt").write_text("air\nskin\nbone\n")
    return tmp_path / "mine"


def test_a_folder_of_one_s_own(own: Path) -> None:
    text = invoke("data", "check", "masks", "--root", str(own))
    assert rows(text)[:3] == [
        ["domain", "cases", "slices", "skin", "bone", "size"],
        ["[day]:train", "3", "3", "3/3", "14.0", "%", "3/3", "2.7", "%", "20×30"],
        ["night:train", "2", "2", "2/2", "14.0", "%", "2/2", "2.7", "%", "20×30"],
    ]
    assert "5 cases, 5 slices, 2 structures, 2 domains" in text
    assert "✓ complete" in text


def test_what_is_wrong_is_said_and_makes_the_exit_status(own: Path) -> None:
    (own / "night/images/1.png").unlink()
    (own / "night/images/notes [1].txt").touch()
    for i in range(3):
        Image.fromarray(np.full((20, 30), 7, dtype=np.uint8)).save(own / f"[day]/masks/{i}.png")
    text = invoke("data", "check", "masks", "--root", str(own), status=1)
    assert "1 files are neither images nor masks and are ignored: night/images/notes [1].txt" in text
    assert "✗ images and masks do not match, 1 times: night/masks/1.png has no image" in text
    assert "✗ 3 of 4 cases cannot be read; the first: [day]:train: 0.png: the mask holds 7" in text
    assert "  [day]:train: 2.png: the mask holds 7; there are 3 classes, 0 to 2" in text
    assert "✓" not in text


def test_fast_counts_and_leaves_masks_unread(own: Path) -> None:
    (own / "night/masks/0.png").write_bytes(b"")
    text = invoke("data", "check", "masks", "--root", str(own), "--fast")
    assert rows(text)[0] == ["domain", "cases", "slices"]
    assert "complete (files were counted, not opened)" in text


def test_a_folder_with_nothing_in_it_says_what_was_looked_for(tmp_path: Path) -> None:
    text = invoke("data", "check", "fundus", "--root", str(tmp_path), status=1)
    assert text.count("✗ not found: ") == 3
    assert "Domain1/{train,test}/[ROIs/]{image,mask}" in text
    assert not any(row[:1] == ["domain"] for row in rows(text))


def test_pictures_are_drawn_whether_all_is_well_or_not(own: Path, tmp_path: Path) -> None:
    words = ["data", "check", "masks", "--root", str(own), "--pictures", str(tmp_path / "seen")]
    text = invoke(*words).replace("\n", "")
    assert f"drawn: {tmp_path / 'seen' / 'masks-[day].png'}, " in text
    (own / "night/images/1.png").write_bytes(b"")
    (tmp_path / "seen/masks-night.png").unlink()
    invoke(*words, "--fast")
    invoke(*words, status=1)
    with Image.open(tmp_path / "seen/masks-night.png") as sheet:
        assert sheet.size[0] == 1290


def test_embedded_volumes_with_their_millimetres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(phantoms.CASES, "prostate-sim", 1)
    text = invoke("data", "check", "prostate-sim", "--pictures", str(tmp_path), status=1)
    head, first, *_ = rows(text)
    assert head == ["domain", "cases", "slices", "prostate", "pixel,", "mm", "slice,", "mm", "size"]
    assert first[:4] == ["body-coil", "1", "8", "1/1"]
    assert first[-3:] == ["1.2", "3.5", "96×96"]
    assert "✗ body-coil has 1 cases; the card says 24" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "prostate-sim-body-coil.png",
        "prostate-sim-endorectal.png",
    ]


def test_ranges_of_sizes_and_spacings(tmp_path: Path) -> None:
    import nibabel

    (tmp_path / "classes.txt").write_text("air\nbone\n")
    for i, (side, mm) in enumerate(((8, 0.5), (12, 0.75), (10, 0.625))):
        mask = np.zeros((side, side + 1, 3), dtype=np.uint8)
        mask[2:4, 2:4] = 1
        for folder, values in (("images", np.arange(mask.size).reshape(mask.shape).astype(np.int16)), ("masks", mask)):
            (tmp_path / "day" / folder).mkdir(parents=True, exist_ok=True)
            affine = np.diag([-mm, -mm, 3.0 + i, 1.0])
            nibabel.save(nibabel.Nifti1Image(values, affine), tmp_path / "day" / folder / f"{i}.nii")
    row = rows(invoke("data", "check", "masks", "--root", str(tmp_path)))[1]
    assert row[-5:] == ["0.5–0.75", "3–5", "9×8", "to", "13×12"]


def test_pictures_of_classes_are_refused(tmp_path: Path) -> None:
    for name in ("pacs", "folder", "digits"):
        with pytest.raises(ValueError, match=rf"{name} has no masks to draw: --pictures is for fundus, .* masks"):
            invoke("data", "check", name, "--root", str(tmp_path), "--pictures", str(tmp_path / "seen"))
    assert not (tmp_path / "seen").exists()
    with pytest.raises(ValueError, match="Did you mean 'fundus'"):
        invoke("data", "check", "fundu", "--pictures", str(tmp_path))


def test_cards_of_masks_speak_of_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {row[0]: " ".join(row[1:]) for row in rows(invoke("data", "card", "fundus"))}
    assert said["cases"] == "660"
    assert said["scored"] == "disc (rim and cup), cup"
    assert said["usually"] == "trained on refuge, adapted to drishti-gs and rim-one-r3"
    assert "images" not in said
    pacs = {row[0] for row in rows(invoke("data", "card", "pacs"))}
    assert {"images", "classes"} <= pacs
    assert not {"cases", "scored", "usually"} & pacs


def test_list_says_what_methods_are_for_and_which_datasets_have_masks() -> None:
    page = [
        line.split(" | ") for line in invoke("list", "methods", "--markdown").splitlines() if line.startswith("| [")
    ]
    methods = {cells[0].split("`")[1]: cells[5] for cells in page}
    assert methods["tent"] == methods["tsd"] == "images, pixels"
    assert methods["t3a"] == methods["lame"] == "images"
    for word in ("tent", "everything", "images,"):
        assert word in invoke("list", "methods").split()
    datasets = [" ".join(row) for row in rows(invoke("list", "datasets"))]
    assert "fundus Optic disc and cup: REFUGE, Drishti-GS, RIM-ONE r3 3 3 660 cases" in datasets
    assert any(line.startswith("pacs ") and line.endswith("9,991 images") for line in datasets)
    assert any(line.startswith("masks your own: ROOT/domain/images/NAME") for line in datasets)


def test_list_shows_both_kinds_of_tsd() -> None:
    text = invoke("list", "hyper")
    images, pixels = (row for row in rows(text) if row[:1] == ["tsd"])
    assert (images[1], pixels[1]) == ("images", "pixels")
    assert "per_class=100," in images
    assert "neighbors=64," in pixels
    assert text.count("\neata ") == 1
