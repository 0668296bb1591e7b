"""ImageNet-C in its published layout, made of empty files."""

from pathlib import Path

import pytest
from dataset_files import files, labels, put

from trueup.data.datasets import imagenet, open_dataset

# ImageNet-C

TENCH, RETRIEVER, TABBY, TISSUE = "n01440764", "n02099601", "n02123045", "n15075141"  # classes 0, 207, 281 and 999


def test_class_numbers_are_those_of_the_thousand_synsets_even_if_few_are_there(tmp_path: Path) -> None:
    put(tmp_path, *(f"fog/3/{wnid}/{n}.JPEG" for wnid in (TISSUE, TABBY, RETRIEVER) for n in ("b", "a")))
    dataset = open_dataset("imagenet-c", tmp_path)
    assert len(dataset.classes) == 1000
    assert [dataset.classes.index(wnid) for wnid in (TENCH, RETRIEVER, TABBY, TISSUE)] == [0, 207, 281, 999]
    assert files("imagenet-c", tmp_path, "fog-3") == [
        f"fog/3/{wnid}/{n}.JPEG" for wnid in (RETRIEVER, TABBY, TISSUE) for n in "ab"
    ]
    assert labels("imagenet-c", tmp_path, "fog-3") == [207, 207, 281, 281, 999, 999]


def test_a_name_without_a_severity_is_the_fifth(tmp_path: Path) -> None:
    put(tmp_path, f"fog/5/{TENCH}/5.JPEG", f"fog/1/{TENCH}/1.JPEG")
    assert files("imagenet-c", tmp_path, "fog") == [f"fog/5/{TENCH}/5.JPEG"]


@pytest.mark.parametrize(
    ("group", "corruption"),
    [("weather", "fog"), ("noise", "shot_noise"), ("blur", "zoom_blur"), ("digital", "pixelate")],
)
def test_the_archives_own_folders_may_stay(tmp_path: Path, group: str, corruption: str) -> None:
    put(tmp_path, f"{group}/{corruption}/1/{TABBY}/x.JPEG")
    assert files("imagenet-c", tmp_path, f"{corruption}-1") == [f"{group}/{corruption}/1/{TABBY}/x.JPEG"]
    assert labels("imagenet-c", tmp_path, f"{corruption}-1") == [281]


def test_what_is_no_synset_or_no_image_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, f"fog/1/{TABBY}/x.JPEG", f"fog/1/{TABBY}/notes.txt", "fog/1/n00000000/y.JPEG", "fog/1/z.JPEG")
    assert files("imagenet-c", tmp_path, "fog-1") == [f"fog/1/{TABBY}/x.JPEG"]


def test_hidden_files_of_imagenet_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, f"fog/1/{TABBY}/x.JPEG", f"fog/1/{TABBY}/._x.JPEG")
    assert files("imagenet-c", tmp_path, "fog-1") == [f"fog/1/{TABBY}/x.JPEG"]


def test_missing_corruptions_severities_and_synsets_are_named(tmp_path: Path) -> None:
    put(tmp_path, f"fog/1/{TABBY}/x.JPEG", "fog/3/cat/x.JPEG")
    dataset = open_dataset("imagenet-c", tmp_path)
    with pytest.raises(ValueError, match="severity 2 of fog is missing"):
        dataset.domain("fog-2")
    with pytest.raises(ValueError, match="snow is missing"):
        dataset.domain("snow-1")
    with pytest.raises(ValueError, match="fog/3 holds no synset folders"):
        dataset.domain("fog-3")
    with pytest.raises(ValueError, match="'mist-1'"):
        dataset.domain("mist-1")


def test_clean_images_of_imagenet_are_not_read(tmp_path: Path) -> None:
    assert open_dataset("imagenet-c", tmp_path).sources(["fog"]) == ("clean",)
    with pytest.raises(ValueError, match="pretrained on ImageNet"):
        imagenet.imagenet_domain(tmp_path, "clean")
