"""Folders laid out as domain/class/image, and list files; opening one reads only names."""

import os
from pathlib import Path

import pytest
from dataset_files import files, labels, put

from trueup.data.cards import CARDS
from trueup.data.datasets import folders, open_dataset

# Folders


def test_images_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    put(tmp_path, "day/dog/b.png", "day/dog/a.png", "day/cat/z.png", "day/cat/10.png", "day/cat/9.png")
    assert files("folder", tmp_path, "day") == [
        "day/cat/10.png",
        "day/cat/9.png",
        "day/cat/z.png",
        "day/dog/a.png",
        "day/dog/b.png",
    ]


def test_a_class_has_the_same_number_in_every_domain(tmp_path: Path) -> None:
    put(tmp_path, "day/cat/1.png", "day/dog/1.png", "night/dog/1.png", "night/emu/1.png", "fog/emu/1.png")
    assert open_dataset("folder", tmp_path).classes == ("cat", "dog", "emu")
    assert labels("folder", tmp_path, "day") == [0, 1]
    assert labels("folder", tmp_path, "night") == [1, 2]
    assert labels("folder", tmp_path, "fog") == [2]


def test_every_folder_of_your_own_is_a_target_and_the_others_are_its_sources(tmp_path: Path) -> None:
    put(tmp_path, "night/cat/1.png", "day/cat/1.png", "dusk/cat/1.png")
    dataset = open_dataset("folder", str(tmp_path))
    assert dataset.targets == ("day", "dusk", "night")
    assert dataset.sources(["dusk"]) == ("day", "night")
    assert dataset.sources(["dusk", "day"]) == ("night",)
    with pytest.raises(ValueError, match="leave at least one"):
        dataset.sources(["day", "dusk", "night"])


@pytest.mark.parametrize(
    "name", ["a.JPG", "a.Jpeg", "a.PNG", "a.b.jpg", "a b.bmp", "ä.webp", "a.gif", "a.tif", "a.TIFF", "a.ppm", "a.pgm"]
)
def test_images_are_known_by_their_extension_in_any_case(tmp_path: Path, name: str) -> None:
    put(tmp_path, f"day/cat/{name}")
    assert files("folder", tmp_path, "day") == [f"day/cat/{name}"]


def test_what_is_no_image_is_named_and_left_out(tmp_path: Path) -> None:
    put(tmp_path, "day/cat/1.png", "day/cat/Thumbs.db", "day/cat/notes.txt", "day/cat/png", "day/list.csv")
    tree = folders.scan_image_folder(tmp_path)
    assert sorted(tree.others) == ["day/cat/Thumbs.db", "day/cat/notes.txt", "day/cat/png", "day/list.csv"]
    assert tree.domains == {"day": [("day/cat/1.png", "cat")]}


def test_hidden_files_and_folders_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "day/cat/1.png", "day/cat/.DS_Store", "day/.DS_Store", "day/.cache/1.png", ".git/cat/1.png")
    tree = folders.scan_image_folder(tmp_path)
    assert tree.domains == {"day": [("day/cat/1.png", "cat")]}
    assert tree.others == []


def test_hidden_files_that_end_like_images_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "day/cat/1.jpg", "day/cat/._1.jpg", "day/cat/.thumb.png")  # as archives made on a Mac have them
    assert files("folder", tmp_path, "day") == ["day/cat/1.jpg"]


def test_a_folder_that_is_called_like_an_image_is_none(tmp_path: Path) -> None:
    put(tmp_path, "day/cat/1.jpg", "day/cat/2.jpg/3.jpg")
    tree = folders.scan_image_folder(tmp_path)
    assert tree.domains == {"day": [("day/cat/1.jpg", "cat")]}
    assert tree.others == ["day/cat/2.jpg"]


def test_images_deeper_down_are_not_read_but_their_folder_is_named(tmp_path: Path) -> None:
    put(tmp_path, "day/cat/1.jpg", "day/cat/more/2.jpg")
    tree = folders.scan_image_folder(tmp_path)
    assert tree.domains == {"day": [("day/cat/1.jpg", "cat")]}
    assert tree.others == ["day/cat/more"]


def test_empty_folders_make_no_class_and_no_domain(tmp_path: Path) -> None:
    put(tmp_path, "day/cat/1.png")
    (tmp_path / "day/dog").mkdir()
    (tmp_path / "night/dog").mkdir(parents=True)
    dataset = open_dataset("folder", tmp_path)
    assert dataset.classes == ("cat",)
    assert dataset.targets == ("day",)


def test_names_that_are_no_text_are_read_too(tmp_path: Path) -> None:
    put(tmp_path, "day/cat/1.png")
    raw = os.fsencode(tmp_path / "day/cat") + b"/caf\xe9.png"
    os.close(os.open(raw, os.O_CREAT | os.O_WRONLY))
    assert len(open_dataset("folder", tmp_path).domain("day").labels) == 2


@pytest.mark.parametrize(
    ("name", "folder", "domain"),
    [
        ("officehome", "Real World", "RealWorld"),
        ("officehome", "real_world", "RealWorld"),
        ("officehome", "CLIPART", "Clipart"),
        ("pacs", "Art Painting", "art_painting"),
        ("pacs", "artpainting", "art_painting"),
        ("vlcs", "sun09", "SUN09"),
    ],
)
def test_a_known_domain_is_found_whatever_case_and_blanks_its_folder_has(
    tmp_path: Path, name: str, folder: str, domain: str
) -> None:
    put(tmp_path, f"{folder}/dog/1.jpg")
    assert open_dataset(name, tmp_path).targets == (domain,)
    assert files(name, tmp_path, domain) == [f"{folder}/dog/1.jpg"]
    assert open_dataset(name, tmp_path).domain(domain).name == domain


def test_domains_come_in_the_card_s_order_and_extra_folders_are_no_domains(tmp_path: Path) -> None:
    put(tmp_path, *(f"{d}/dog/1.jpg" for d in ("sketch", "photo", "cartoon", "art_painting", "splits", "__MACOSX")))
    put(tmp_path, "splits/emu/1.jpg")
    assert open_dataset("pacs", tmp_path).targets == ("art_painting", "cartoon", "photo", "sketch")
    assert open_dataset("pacs", tmp_path).classes == ("dog",)
    assert folders.scan_image_folder(tmp_path, CARDS["pacs"]).unknown == ["splits"]


def test_a_missing_domain_is_refused_with_what_there_is(tmp_path: Path) -> None:
    put(tmp_path, "photo/dog/1.jpg", "sketch/dog/1.jpg")
    with pytest.raises(ValueError, match=r"pacs has no domain 'cartoon'; there are: photo, sketch"):
        open_dataset("pacs", tmp_path).domain("cartoon")


def test_a_root_without_domains_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    put(tmp_path, "PACS/photo/dog/1.jpg")
    with pytest.raises(ValueError, match=r"no domains of pacs \(art_painting, .*it holds: PACS"):
        open_dataset("pacs", tmp_path)
    with pytest.raises(ValueError, match=r"domain/class/image; it holds: dog"):
        open_dataset("folder", tmp_path / "PACS/photo")
    with pytest.raises(ValueError, match="no folders"):
        open_dataset("folder", tmp_path / "PACS/photo/dog")


def test_a_root_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a folder"):
        open_dataset("pacs", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not embedded: give its folder"):
        open_dataset("folder")


# Fingerprints


def test_the_fingerprint_is_that_of_names_and_sizes(tmp_path: Path) -> None:
    names = ("day/cat/1.png", "night/dog/2.png")
    here, there = put(tmp_path / "here", *names), put(tmp_path / "far/there", *names)
    first = open_dataset("folder", here).fingerprint
    assert first
    assert first == open_dataset("folder", there).fingerprint
    put(here, "day/cat/notes.txt")
    assert first == open_dataset("folder", here).fingerprint
    (there / names[0]).write_bytes(b"the same name, another content")
    assert first != open_dataset("folder", there).fingerprint


def test_a_plus_in_a_domains_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rename the folder 'a\+b'"):
        open_dataset("folder", put(tmp_path, "a+b/cat/1.png", "c/cat/1.png"))


@pytest.mark.parametrize("more", ["day/cat/0.png", "night/dog/3.png", "dusk/cat/1.png", "night/cat/2.png"])
def test_the_fingerprint_changes_when_an_image_is_added(tmp_path: Path, more: str) -> None:
    first = open_dataset("folder", put(tmp_path, "day/cat/1.png", "night/dog/2.png")).fingerprint
    assert first != open_dataset("folder", put(tmp_path, more)).fingerprint


# List files


def test_the_lists_of_pacs_with_numbers_from_one_give_classes_from_zero(tmp_path: Path) -> None:
    put(tmp_path, *(f"photo/{label}/{n}.jpg" for label in ("dog", "elephant", "giraffe") for n in (1, 2)))
    (tmp_path / "photo_train_kfold.txt").write_text("photo/dog/1.jpg 1\nphoto/giraffe/1.jpg 3\n")
    (tmp_path / "photo_crossval_kfold.txt").write_text("photo/elephant/2.jpg 2\n")
    assert files("pacs", tmp_path, "photo") == ["photo/dog/1.jpg", "photo/elephant/2.jpg", "photo/giraffe/1.jpg"]
    assert labels("pacs", tmp_path, "photo") == [0, 1, 2]


def test_lists_of_one_domain_do_not_touch_the_others(tmp_path: Path) -> None:
    put(tmp_path, "photo/dog/1.jpg", "photo/dog/2.jpg", "sketch/dog/1.jpg", "sketch/dog/2.jpg")
    (tmp_path / "photo_test_kfold.txt").write_text("photo/dog/2.jpg 1\n")
    (tmp_path / "photos.txt").write_text("not a list of photo")
    assert files("pacs", tmp_path, "photo") == ["photo/dog/2.jpg"]
    assert files("pacs", tmp_path, "sketch") == ["sketch/dog/1.jpg", "sketch/dog/2.jpg"]


def test_both_lists_of_domainnet_are_read_and_an_image_in_both_comes_once(tmp_path: Path) -> None:
    put(tmp_path, *(f"clipart/{c}/{n}.jpg" for c in ("aircraft_carrier", "airplane") for n in (1, 2)))
    (tmp_path / "clipart_train.txt").write_text("clipart/airplane/1.jpg 1\nclipart/aircraft_carrier/1.jpg 0\n\n")
    (tmp_path / "clipart_test.txt").write_text("clipart/airplane/2.jpg 1\r\nclipart/airplane/1.jpg 1")
    assert files("domainnet", tmp_path, "clipart") == [
        "clipart/aircraft_carrier/1.jpg",
        "clipart/airplane/1.jpg",
        "clipart/airplane/2.jpg",
    ]
    assert labels("domainnet", tmp_path, "clipart") == [0, 1, 1]


def test_a_listed_file_that_is_missing_is_named_and_left_out(tmp_path: Path) -> None:
    put(tmp_path, "clipart/airplane/1.jpg")
    (tmp_path / "clipart_train.txt").write_text("clipart/airplane/1.jpg 1\nclipart/airplane/2.jpg 1\n")
    tree = folders.scan_image_folder(tmp_path, CARDS["domainnet"])
    assert tree.missing == ["clipart/airplane/2.jpg"]
    assert files("domainnet", tmp_path, "clipart") == ["clipart/airplane/1.jpg"]


def test_paths_in_lists_may_have_blanks(tmp_path: Path) -> None:
    put(tmp_path, "Real World/Alarm Clock/0 1.jpg")
    (tmp_path / "Real World.txt").write_text("Real World/Alarm Clock/0 1.jpg 0\n")
    assert files("officehome", tmp_path, "RealWorld") == ["Real World/Alarm Clock/0 1.jpg"]
    assert open_dataset("officehome", tmp_path).classes == ("Alarm Clock",)


@pytest.mark.parametrize("name", ["RealWorld.txt", "Real_World.txt", "real_world_train.txt"])
def test_a_list_is_found_whatever_case_and_blanks_its_name_has(tmp_path: Path, name: str) -> None:
    put(tmp_path, "Real World/Bed/1.jpg", "Real World/Bed/2.jpg")
    (tmp_path / name).write_text("Real World/Bed/2.jpg 0\n")
    assert files("officehome", tmp_path, "RealWorld") == ["Real World/Bed/2.jpg"]


@pytest.mark.parametrize("line", ["photo/dog/1.jpg", "1", "photo 1", "1.jpg 1", " 1", "photo/dog/1.jpg\t1"])
def test_a_line_that_is_no_path_and_number_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    put(tmp_path, "photo/dog/1.jpg")
    (tmp_path / "photo_test.txt").write_text(f"photo/dog/1.jpg 1\n{line}\n")
    with pytest.raises(ValueError, match=r"photo_test\.txt, line 2: expected"):
        open_dataset("pacs", tmp_path)


@pytest.mark.parametrize("number", ["one", "1.5", "x/y.jpg"])
def test_a_class_number_that_is_none_is_refused_with_its_place(tmp_path: Path, number: str) -> None:
    put(tmp_path, "photo/dog/1.jpg")
    (tmp_path / "photo_test.txt").write_text(f"photo/dog/1.jpg {number}\n")
    with pytest.raises(ValueError, match=r"photo_test\.txt, line 1"):
        open_dataset("pacs", tmp_path)


@pytest.mark.parametrize("path", ["../other/dog/1.jpg", "photo/../../dog/1.jpg", "photo/dog/..", "/photo/dog/1.jpg"])
def test_a_path_that_leaves_the_root_is_refused(tmp_path: Path, path: str) -> None:
    put(tmp_path, "root/photo/dog/1.jpg", "other/dog/1.jpg", "dog/1.jpg")
    (tmp_path / "root/photo_test.txt").write_text(f"{path} 1\n")
    with pytest.raises(ValueError, match=r"photo_test\.txt, line 1"):
        open_dataset("pacs", tmp_path / "root")


def test_an_absolute_path_is_refused_even_if_it_is_there(tmp_path: Path) -> None:
    put(tmp_path, "photo/dog/1.jpg")
    (tmp_path / "photo_test.txt").write_text(f"{tmp_path}/photo/dog/1.jpg 1\n")
    with pytest.raises(ValueError, match="expected `photo/class/image number`"):
        open_dataset("pacs", tmp_path)


def test_a_list_may_not_name_the_images_of_another_domain(tmp_path: Path) -> None:
    put(tmp_path, "photo/dog/1.jpg", "sketch/dog/1.jpg")
    (tmp_path / "photo_test.txt").write_text("sketch/dog/1.jpg 1\n")
    with pytest.raises(ValueError, match="expected `photo/class/image number`"):
        open_dataset("pacs", tmp_path)


def test_one_image_spelt_in_two_ways_counts_once(tmp_path: Path) -> None:
    put(tmp_path, "photo/dog/1.jpg")
    (tmp_path / "photo_test.txt").write_text("photo/dog/1.jpg 1\n./photo/dog/1.jpg 1\n")
    assert len(open_dataset("pacs", tmp_path).domain("photo").labels) == 1


def test_one_class_with_two_numbers_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "photo/dog/1.jpg", "photo/dog/2.jpg")
    (tmp_path / "photo_train.txt").write_text("photo/dog/1.jpg 1\nphoto/dog/2.jpg 2\n")
    with pytest.raises(ValueError, match=r"line 2: class dog is number 2, but was 1 before"):
        open_dataset("pacs", tmp_path)
