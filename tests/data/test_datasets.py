"""Datasets in their true layouts, made of small or empty files: opening one reads nothing but names."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from trueup.data.cards import CARDS
from trueup.data.datasets import cifar, folders, imagenet, open_dataset
from trueup.data.domains import ArrayDomain, FileDomain


def put(root: Path, *paths: str) -> Path:
    """Empty files below a root."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def files(name: str, root: Path, domain: str) -> list[str]:
    found = open_dataset(name, root).domain(domain)
    assert isinstance(found, FileDomain)
    return list(found.files)


def labels(name: str, root: Path, domain: str) -> list[int]:
    found = open_dataset(name, root).domain(domain).labels
    assert found.dtype == np.int64
    return found.tolist()


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


# CIFAR-10-C and CIFAR-100-C, with four rows for each severity


@pytest.fixture
def corrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fog alone, as published; each image is filled with the number of its row, each label is that number modulo 7."""
    monkeypatch.setattr(cifar, "ROWS", 4)
    np.save(tmp_path / "fog.npy", np.broadcast_to(np.arange(20, dtype=np.uint8)[:, None, None, None], (20, 32, 32, 3)))
    np.save(tmp_path / "labels.npy", (np.arange(20) % 7).astype(np.uint8))
    return tmp_path


@pytest.mark.parametrize("name", ["cifar10-c", "cifar100-c"])
@pytest.mark.parametrize(("which", "first"), [("fog-1", 0), ("fog-3", 8), ("fog-5", 16), ("fog", 16)])
def test_a_severity_is_its_rows_and_their_labels(corrupted: Path, name: str, which: str, first: int) -> None:
    domain = open_dataset(name, corrupted).domain(which)
    assert domain.labels.dtype == np.int64
    assert domain.labels.tolist() == [(first + i) % 7 for i in range(4)]
    for i in range(4):
        image = domain.image(i)
        assert image.shape == (32, 32, 3)
        assert image.dtype == np.uint8
        assert set(image.ravel().tolist()) == {first + i}
    assert domain.image(0, 16).shape == (16, 16, 3)


def test_corrupted_images_stay_on_disk_until_they_are_read(corrupted: Path) -> None:
    domain = open_dataset("cifar10-c", corrupted).domain("fog-2")
    assert isinstance(domain, ArrayDomain)
    assert isinstance(domain.images, np.memmap)


@pytest.mark.parametrize("which", ["fog-6", "mist", "fog-0"])
def test_what_is_no_corruption_is_refused(corrupted: Path, which: str) -> None:
    with pytest.raises(ValueError, match=repr(which)):
        open_dataset("cifar10-c", corrupted).domain(which)


@pytest.mark.parametrize(
    ("file", "array"),
    [
        ("fog.npy", np.zeros((19, 32, 32, 3), np.uint8)),
        ("fog.npy", np.zeros((20, 3, 32, 32), np.uint8)),
        ("fog.npy", np.zeros((20, 32, 32), np.uint8)),
        ("fog.npy", np.zeros((20, 32, 32, 3), np.float32)),
        ("labels.npy", np.zeros(19, np.uint8)),
        ("labels.npy", np.zeros(4, np.uint8)),
        ("labels.npy", np.zeros((20, 1), np.uint8)),
    ],
)
def test_arrays_of_another_shape_or_type_are_refused(corrupted: Path, file: str, array: np.ndarray) -> None:
    np.save(corrupted / file, array)
    with pytest.raises(ValueError, match=rf"{file} has .*{'|'.join(map(str, array.shape))}.*expected"):
        open_dataset("cifar10-c", corrupted).domain("fog")


def test_labels_that_are_no_whole_numbers_are_refused(corrupted: Path) -> None:
    np.save(corrupted / "labels.npy", np.full(20, 0.5))
    with pytest.raises(ValueError, match=r"labels\.npy"):
        open_dataset("cifar10-c", corrupted).domain("fog")


@pytest.mark.parametrize("file", ["fog.npy", "labels.npy"])
def test_a_missing_array_is_named(corrupted: Path, file: str) -> None:
    (corrupted / file).unlink()
    with pytest.raises(ValueError, match=f"{file} is missing"):
        open_dataset("cifar100-c", corrupted).domain("fog")


class Payload:
    """Something that leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("file", ["fog.npy", "labels.npy"])
@pytest.mark.parametrize("plain", [True, False])
def test_python_objects_are_refused_and_no_code_is_run(corrupted: Path, file: str, plain: bool) -> None:
    trace = corrupted / "trace"
    payload = Payload(trace)
    if plain:
        (corrupted / file).write_bytes(pickle.dumps(payload))
    else:
        np.save(corrupted / file, np.array([payload] * 20, dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=rf"{file} is not an array of numbers"):
        open_dataset("cifar10-c", corrupted).domain("fog")
    assert not trace.exists()
    pickle.loads(pickle.dumps(payload))  # the payload does work
    assert trace.exists()


@pytest.mark.parametrize("content", [b"", b"some text", b"\x93NUMPY", b"\x93NUMPY\x01\x00\x10\x00{'descr': '|u1'"])
def test_files_that_are_no_arrays_are_refused(corrupted: Path, content: bytes) -> None:
    (corrupted / "fog.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"fog\.npy is not an array of numbers"):
        open_dataset("cifar10-c", corrupted).domain("fog")


def test_an_array_that_is_cut_off_is_refused(corrupted: Path) -> None:
    whole = (corrupted / "fog.npy").read_bytes()
    (corrupted / "fog.npy").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"fog\.npy is not an array of numbers"):
        open_dataset("cifar10-c", corrupted).domain("fog")


@pytest.mark.parametrize("whole", [True, False])
def test_an_archive_in_place_of_an_array_is_refused(corrupted: Path, whole: bool) -> None:
    np.savez(corrupted / "fog.npz", np.zeros(3))
    content = (corrupted / "fog.npz").read_bytes()
    (corrupted / "fog.npy").write_bytes(content if whole else content[:20])
    with pytest.raises(ValueError, match=r"fog\.npy"):
        open_dataset("cifar10-c", corrupted).domain("fog")


def planes(seed: int) -> tuple[bytes, np.ndarray]:
    """The bytes of an image in the binary layout (all of red, then green, then blue, row by row), and the image."""
    raw = np.random.default_rng(seed).integers(256, size=3072, dtype=np.uint8)
    image = np.zeros((32, 32, 3), dtype=np.uint8)
    for channel in range(3):
        for row in range(32):
            image[row, :, channel] = raw[1024 * channel + 32 * row : 1024 * channel + 32 * (row + 1)]
    return raw.tobytes(), image


def test_the_clean_set_of_cifar_10_is_five_files_of_label_and_planes(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for n in range(1, 6):
        rows = b"".join(bytes([(2 * n + i) % 10]) + planes(2 * n + i)[0] for i in range(2))
        (folder / f"data_batch_{n}.bin").write_bytes(rows)
    (folder / "test_batch.bin").write_bytes(bytes(3073))  # not for training
    (folder / "batches.meta.txt").write_text("airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n")
    dataset = open_dataset("cifar10-c", tmp_path)
    assert dataset.sources(["fog"]) == ("clean",)
    assert dataset.classes[0] == "airplane"
    assert len(dataset.classes) == 10
    clean = dataset.domain("clean")
    assert clean.labels.dtype == np.int64
    assert clean.labels.tolist() == [k % 10 for k in range(2, 12)]
    assert all(np.array_equal(clean.image(k - 2), planes(k)[1]) for k in range(2, 12))


def test_the_clean_set_of_cifar_100_has_the_fine_label_second(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(b"".join(bytes([k, 90 + k]) + planes(k)[0] for k in range(3)))
    (folder / "fine_label_names.txt").write_text("\n".join(f"name_{k}" for k in range(100)))
    (folder / "coarse_label_names.txt").write_text("\n".join(f"coarse_{k}" for k in range(20)))
    clean = open_dataset("cifar100-c", tmp_path).domain("clean")
    assert clean.labels.tolist() == [90, 91, 92]
    assert all(np.array_equal(clean.image(k), planes(k)[1]) for k in range(3))
    assert open_dataset("cifar100-c", tmp_path).classes == tuple(f"name_{k}" for k in range(100))


@pytest.mark.parametrize(("name", "n"), [("cifar10-c", 10), ("cifar100-c", 100)])
def test_without_the_clean_set_classes_have_numbers_for_names(corrupted: Path, name: str, n: int) -> None:
    assert open_dataset(name, corrupted).classes == tuple(f"class {i}" for i in range(n))
    with pytest.raises(ValueError, match=r"\.bin is missing: unpack the clean set's binary version"):
        open_dataset(name, corrupted).domain("clean")


@pytest.mark.parametrize("size", [0, 1, 3072, 3073, 3 * 3074 + 1])
def test_a_clean_file_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary/train.bin").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=rf"train\.bin has {size} bytes, which is not a multiple of 3074"):
        open_dataset("cifar100-c", tmp_path).domain("clean")


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
