"""CIFAR-10-C and CIFAR-100-C with small arrays in the published layout."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from trueup.data.datasets import cifar, open_dataset
from trueup.data.domains import ArrayDomain

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
