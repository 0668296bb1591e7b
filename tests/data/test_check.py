"""The check says that a small true copy of a dataset is well, and names each thing that is done to it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trueup.data.cards import CARDS, Card
from trueup.data.check import check_dataset
from trueup.data.corruptions import CORRUPTIONS
from trueup.data.datasets import cifar, imagenet

TABBY, TISSUE = "n02123045", "n15075141"
COUNTS = {"day": (2, 1), "night": (1, 2)}


def draw(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(256, size=(40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def small(card: str, **changes: object) -> Card:
    """The card of a small dataset of cats and dogs by day and by night."""
    given: dict[str, object] = {
        "name": card,
        "title": "Small",
        "kind": "domains",
        "classes": 2,
        "class_names": ("cat", "dog"),
        "domains": {"day": 3, "night": 3},
        "counts": COUNTS,
        "licence": "none",
        "home": "nowhere",
        "layout": "ROOT/domain/class/image",
    }
    return Card(**{**given, **changes})  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A true copy of the small dataset."""
    monkeypatch.setitem(CARDS, "small", small("small"))
    for domain, counts in COUNTS.items():
        for label, n in zip(("cat", "dog"), counts, strict=True):
            for i in range(n):
                draw(tmp_path / domain / label / f"{i}.{'png' if i else 'jpg'}")
    return tmp_path


# Folders


def test_a_true_copy_is_well_and_counted(root: Path) -> None:
    report = check_dataset("small", root)
    assert report.problems == []
    assert report.broken == []
    assert report.others == []
    assert report.classes == ("cat", "dog")
    assert report.counts == {"day": {"cat": 2, "dog": 1}, "night": {"cat": 1, "dog": 2}}
    assert report.images == 6


def test_the_root_may_be_text_and_progress_is_told(root: Path) -> None:
    told: list[tuple[int, int]] = []
    assert check_dataset("small", str(root), progress=lambda done, of: told.append((done, of))).problems == []
    assert told[-1] == (6, 6)


def test_a_missing_image_is_named_by_domain_and_class(root: Path) -> None:
    (root / "night/dog/0.jpg").unlink()
    report = check_dataset("small", root)
    assert report.counts["night"] == {"cat": 1, "dog": 1}
    assert report.problems == [
        "night has 2 images; the card says 3",
        "night/dog has 1 images; the card says 2",
    ]


def test_an_image_in_the_wrong_class_is_found_though_the_sum_is_right(root: Path) -> None:
    (root / "day/cat/1.png").rename(root / "day/dog/1.png")
    assert check_dataset("small", root).problems == [
        "day/cat has 1 images; the card says 2",
        "day/dog has 2 images; the card says 1",
    ]


def test_a_missing_domain_is_named(root: Path) -> None:
    (root / "night").rename(root / ".night")
    report = check_dataset("small", root)
    assert list(report.counts) == ["day"]
    assert [p for p in report.problems if p.startswith("night is missing")]


@pytest.mark.parametrize("extra", ["nights", "midnight", "night (copy)"])
def test_a_missing_domain_is_named_even_if_a_folder_has_a_name_like_it(root: Path, extra: str) -> None:
    (root / "night").rename(root / extra)
    problems = check_dataset("small", root).problems
    assert f"folders that are not domains of small: {extra}" in problems
    assert [p for p in problems if p.startswith("night is missing")]


def test_an_extra_folder_is_named_and_not_counted(root: Path) -> None:
    draw(root / "dusk/cat/1.png")
    report = check_dataset("small", root)
    assert report.problems == ["folders that are not domains of small: dusk"]
    assert report.images == 6


def test_an_empty_domain_has_no_images(root: Path) -> None:
    for file in (root / "night").rglob("*.*"):
        file.unlink()
    assert "night has 0 images; the card says 3" in check_dataset("small", root).problems


def test_other_classes_than_the_card_s_are_named(root: Path) -> None:
    draw(root / "day/emu/0.png")
    assert any("3 classes; the card says 2" in p for p in check_dataset("small", root).problems)
    for domain in ("day", "night"):
        (root / domain / "dog").rename(root / domain / "wolf")
    (root / "day/emu/0.png").unlink()
    assert "classes are cat, wolf; the card says cat, dog" in check_dataset("small", root).problems


def test_broken_images_are_named_and_counted(root: Path) -> None:
    whole = (root / "day/cat/0.jpg").read_bytes()
    (root / "day/cat/0.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "day/cat/1.png").write_bytes(b"")
    (root / "night/dog/0.jpg").write_text("<html>404 not found</html>")
    report = check_dataset("small", root)
    assert sorted(report.broken) == ["day/cat/0.jpg", "day/cat/1.png", "night/dog/0.jpg"]
    (problem,) = report.problems
    assert problem.startswith("3 images cannot be read: ")
    assert all(name in problem for name in report.broken)
    assert report.images == 6  # they are there, they count


def test_of_many_broken_images_all_are_listed_and_a_few_are_named(tmp_path: Path) -> None:
    for i in range(9):
        draw(tmp_path / f"day/cat/{i}.png").write_bytes(b"broken")
    report = check_dataset("folder", tmp_path)
    assert report.broken == [f"day/cat/{i}.png" for i in range(9)]
    (problem,) = report.problems
    assert problem.startswith("9 images cannot be read: ")
    assert problem.endswith("and 4 more")


def test_of_more_images_than_are_opened_at_a_time_every_broken_one_is_listed(tmp_path: Path) -> None:
    (tmp_path / "day/cat").mkdir(parents=True)
    for i in range(600):
        (tmp_path / f"day/cat/{i:03}.png").touch()
    told: list[tuple[int, int]] = []
    report = check_dataset("folder", tmp_path, progress=lambda done, of: told.append((done, of)))
    assert report.broken == [f"day/cat/{i:03}.png" for i in range(600)]
    assert len(told) > 1
    assert told[-1] == (600, 600)


def test_files_are_not_opened_if_not_asked_for(root: Path) -> None:
    (root / "day/cat/0.jpg").write_bytes(b"")
    told: list[tuple[int, int]] = []
    report = check_dataset("small", root, decode_all=False, progress=lambda done, of: told.append((done, of)))
    assert report.problems == []
    assert told == []


def test_other_files_are_listed_and_do_no_harm(root: Path) -> None:
    (root / "day/cat/Thumbs.db").touch()
    (root / "day/readme.txt").touch()
    report = check_dataset("small", root)
    assert sorted(report.others) == ["day/cat/Thumbs.db", "day/readme.txt"]
    assert report.problems == []


def test_missing_files_of_a_list_are_named(root: Path) -> None:
    names = [f"day/cat/{i}.png" for i in range(1, 9)]
    (root / "day_test.txt").write_text("".join(f"{name} 1\n" for name in names) + "day/dog/0.jpg 2\n")
    report = check_dataset("small", root)
    assert report.counts["day"] == {"cat": 1, "dog": 1}
    assert report.problems[0].startswith("7 listed files are missing: day/cat/2.png, day/cat/3.png")


def test_your_own_folder_lacks_a_class_in_a_domain(root: Path) -> None:
    assert check_dataset("folder", root).problems == []
    draw(root / "day/emu/0.png")
    report = check_dataset("folder", root)
    assert report.problems == ["night has no images of: emu"]
    assert report.counts["night"] == {"cat": 1, "dog": 2, "emu": 0}


@pytest.mark.parametrize("where", [None, "nowhere"])
def test_no_folder_and_no_such_dataset_are_refused(tmp_path: Path, where: str | None) -> None:
    with pytest.raises(ValueError, match="is not a folder: give the folder of pacs"):
        check_dataset("pacs", where and tmp_path / where)
    with pytest.raises(ValueError, match="Did you mean 'pacs'"):
        check_dataset("pasc", tmp_path)


def test_the_real_card_finds_a_small_pacs_wanting(tmp_path: Path) -> None:
    for domain in ("art_painting", "cartoon", "photo"):
        draw(tmp_path / domain / "dog/1.jpg")
    problems = check_dataset("pacs", tmp_path).problems
    assert "1 classes; the card says 7" in problems
    assert "photo has 1 images; the card says 1,670" in problems
    assert "photo/person has 0 images; the card says 432" in problems
    assert any(p.startswith("sketch is missing") for p in problems)


# What is embedded


@pytest.mark.parametrize(("name", "images"), [("digits", 8000), ("digits-c", 15_000)])
def test_embedded_datasets_are_well_and_need_no_folder(name: str, images: int) -> None:
    report = check_dataset(name)
    assert report.problems == []
    assert tuple(report.counts) == tuple(CARDS[name].domains)
    assert report.images == images
    assert report.classes == tuple("0123456789")


# CIFAR-10-C, with four rows for each severity


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    domains = dict.fromkeys(CORRUPTIONS, 20)
    card = small("cifar10-c", kind="corruptions", classes=10, class_names=(), domains=domains, counts={})
    monkeypatch.setitem(CARDS, "cifar10-c", card)
    monkeypatch.setattr(cifar, "ROWS", 4)
    for name in CORRUPTIONS:
        np.save(tmp_path / f"{name}.npy", np.zeros((20, 32, 32, 3), np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(20, dtype=np.uint8) % 4)
    return tmp_path


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the clean set were there: its files are large."""
    monkeypatch.setattr(cifar, "read_clean", lambda name, root: (None, np.zeros(50_000, np.int64)))


@pytest.mark.usefixtures("clean")
def test_true_arrays_are_well_and_counted(arrays: Path) -> None:
    report = check_dataset("cifar10-c", arrays)
    assert report.problems == []
    assert tuple(report.counts) == CORRUPTIONS
    assert list(report.counts["fog"].values()) == [5, 5, 5, 5, 0, 0, 0, 0, 0, 0]
    assert len(report.classes) == 10


@pytest.mark.usefixtures("clean")
def test_missing_and_wrong_arrays_are_named_once(arrays: Path) -> None:
    (arrays / "fog.npy").unlink()
    np.save(arrays / "snow.npy", np.zeros((19, 32, 32, 3), np.uint8))
    (arrays / "frost.npy").write_bytes(b"")
    problems = check_dataset("cifar10-c", arrays).problems
    assert len(problems) == 3
    assert any("fog.npy is missing" in p for p in problems)
    assert any("snow.npy has uint8 (19, 32, 32, 3)" in p for p in problems)
    assert any("frost.npy is not an array" in p for p in problems)


@pytest.mark.usefixtures("clean")
def test_missing_labels_are_one_problem_and_no_corruption_is_called_missing(arrays: Path) -> None:
    (arrays / "labels.npy").unlink()
    (problem,) = check_dataset("cifar10-c", arrays).problems
    assert "labels.npy is missing" in problem


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("wrong", [10, 255, -1])
def test_labels_that_are_no_classes_are_named(arrays: Path, wrong: int) -> None:
    labels = np.arange(20) % 10
    labels[3] = wrong
    np.save(arrays / "labels.npy", labels)
    problems = check_dataset("cifar10-c", arrays).problems
    assert any("labels.npy" in p and str(wrong) in p for p in problems), problems[:1]


def test_a_missing_or_short_clean_set_is_named(arrays: Path) -> None:
    (problem,) = check_dataset("cifar10-c", arrays).problems
    assert "data_batch_1.bin is missing" in problem
    (arrays / "cifar-10-batches-bin").mkdir()
    for n in range(1, 6):
        (arrays / f"cifar-10-batches-bin/data_batch_{n}.bin").write_bytes(bytes(2 * 3073))
    assert check_dataset("cifar10-c", arrays).problems == ["the clean set has 10 images; 50,000 are expected"]


# ImageNet-C, with two images for each severity


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    domains = dict.fromkeys(CORRUPTIONS, 10)
    card = small("imagenet-c", kind="corruptions", classes=1000, class_names=(), domains=domains, counts={})
    monkeypatch.setitem(CARDS, "imagenet-c", card)
    names = imagenet.imagenet_class_names()  # takes time, each time
    monkeypatch.setattr(imagenet, "imagenet_class_names", lambda: names)
    image = draw(tmp_path / "one.jpg").read_bytes()
    (tmp_path / "one.jpg").unlink()
    for corruption in CORRUPTIONS:
        for severity in range(1, 6):
            for wnid in (TABBY, TISSUE):
                folder = tmp_path / "blur" / corruption / str(severity) / wnid
                folder.mkdir(parents=True)
                (folder / "1.JPEG").write_bytes(image)
    return tmp_path


def test_true_folders_of_imagenet_are_well_and_counted_over_severities(photos: Path) -> None:
    told: list[tuple[int, int]] = []
    report = check_dataset("imagenet-c", photos, progress=lambda done, of: told.append((done, of)))
    assert report.problems == []
    assert told[-1] == (150, 150)
    assert tuple(report.counts) == CORRUPTIONS
    assert {label: n for label, n in report.counts["fog"].items() if n} == {TABBY: 5, TISSUE: 5}


def test_broken_and_missing_images_of_imagenet_are_named(photos: Path) -> None:
    (photos / f"blur/fog/2/{TABBY}/1.JPEG").write_bytes(b"broken")
    (photos / f"blur/snow/4/{TABBY}/1.JPEG").unlink()
    report = check_dataset("imagenet-c", photos)
    assert report.broken == [f"blur/fog/2/{TABBY}/1.JPEG"]
    assert len(report.problems) == 2
    assert "snow has 9 images; the card says 10" in report.problems


def test_every_missing_severity_is_named_and_the_others_are_counted(photos: Path) -> None:
    for severity in (2, 4):
        (photos / f"blur/fog/{severity}").rename(photos / f"fog-{severity}")
    report = check_dataset("imagenet-c", photos, decode_all=False)
    assert any("severity 2 of fog is missing" in p for p in report.problems)
    assert any("severity 4 of fog is missing" in p for p in report.problems)
    assert sum(report.counts["fog"].values()) == 6


def test_what_is_no_image_or_no_synset_in_imagenet_is_listed(photos: Path) -> None:
    (photos / f"blur/fog/2/{TABBY}/notes.txt").touch()
    assert check_dataset("imagenet-c", photos, decode_all=False).others == [f"blur/fog/2/{TABBY}/notes.txt"]
