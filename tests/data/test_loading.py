"""Reading images: decoding against Pillow's own, and batches in the order that was asked for."""

import logging
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from trueup.data import loading
from trueup.data.domains import ArrayDomain, BrokenImageError, FileDomain
from trueup.data.loading import ConcatDomains, Loader, prefetch
from trueup.data.pictures import decode

BILINEAR = Image.Resampling.BILINEAR


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height + width).integers(256, size=(height, width, channels), dtype=np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    """Waves of light: what a photograph is like at a distance."""
    y, x = np.mgrid[:height, :width] / 40
    return np.rint(127 + 60 * np.stack([np.sin(x + y), np.cos(x - 2 * y), np.sin(x * 0.7)], axis=2)).astype(np.uint8)


# Decoding


def test_colour_is_read_as_it_is(tmp_path: Path) -> None:
    pixels = noise(5, 7)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = decode(tmp_path / "a.png")
    assert found.dtype == np.uint8
    assert np.array_equal(found, pixels)


def test_grey_becomes_three_equal_channels(tmp_path: Path) -> None:
    grey = noise(5, 7)[..., 0]
    Image.fromarray(grey).save(tmp_path / "a.png")
    assert np.array_equal(decode(tmp_path / "a.png"), np.stack([grey] * 3, axis=2))
    Image.fromarray(grey > 127).save(tmp_path / "b.png")
    assert np.array_equal(decode(tmp_path / "b.png"), np.stack([255 * (grey > 127)] * 3, axis=2))


@pytest.mark.parametrize("extension", ["png", "gif", "bmp"])
def test_palettes_become_their_colours(tmp_path: Path, extension: str) -> None:
    numbers = np.arange(12, dtype=np.uint8).reshape(3, 4)
    palette = noise(1, 12)[0]
    image = Image.fromarray(numbers).convert("P")
    image.putpalette(palette.tobytes())
    image.save(tmp_path / f"a.{extension}")
    assert np.array_equal(decode(tmp_path / f"a.{extension}"), palette[numbers])


def test_palettes_with_transparent_colours_are_read_without_a_warning(tmp_path: Path) -> None:
    numbers = np.arange(12, dtype=np.uint8).reshape(3, 4)
    palette = noise(1, 12)[0]
    image = Image.fromarray(numbers).convert("P")
    image.putpalette(palette.tobytes())
    image.save(tmp_path / "a.png", transparency=bytes(range(12)))
    assert np.array_equal(decode(tmp_path / "a.png"), palette[numbers])


def test_transparency_is_dropped_and_the_colour_below_it_shows(tmp_path: Path) -> None:
    pixels = noise(5, 7, 4)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.array_equal(decode(tmp_path / "a.png"), pixels[..., :3])
    Image.fromarray(pixels[..., :2].copy()).save(tmp_path / "b.png")  # grey and alpha
    assert np.array_equal(decode(tmp_path / "b.png"), np.stack([pixels[..., 0]] * 3, axis=2))


@pytest.mark.parametrize("size", [None, 4])
def test_four_inks_become_three_lights(tmp_path: Path, size: int | None) -> None:
    inks = {"white": (0, 0, 0, 0), "black": (0, 0, 0, 255), "red": (0, 255, 255, 0), "blue": (255, 255, 0, 0)}
    lights = {"white": (255, 255, 255), "black": (0, 0, 0), "red": (255, 0, 0), "blue": (0, 0, 255)}
    for name, ink in inks.items():
        Image.new("CMYK", (32, 32), ink).save(tmp_path / "a.jpg", quality=95)
        found = decode(tmp_path / "a.jpg", size)
        assert found.dtype == np.uint8
        assert found.shape == (size or 32, size or 32, 3)
        assert np.abs(found.astype(int) - lights[name]).max() <= 3


@pytest.mark.parametrize("extension", ["png", "tif"])
def test_sixteen_bits_keep_their_upper_eight(tmp_path: Path, extension: str) -> None:
    deep = (1000 * np.arange(64, dtype=np.uint16)).reshape(8, 8)
    Image.fromarray(deep).save(tmp_path / f"a.{extension}")
    found = decode(tmp_path / f"a.{extension}")
    assert found.dtype == np.uint8
    assert found.shape == (8, 8, 3)
    assert np.abs(found.astype(int) - (deep / 257).round()[..., None]).max() <= 1


@pytest.mark.parametrize("size", [None, 8])
def test_the_camera_s_orientation_is_not_applied(tmp_path: Path, size: int | None) -> None:
    # As in the published pipelines, which do not turn images either.
    pixels = np.zeros((16, 32, 3), dtype=np.uint8)
    pixels[:, 16:] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    found = decode(tmp_path / "a.jpg", size)
    height, width = (size, size) if size else (16, 32)
    assert found.shape == (height, width, 3)
    assert found[:, : width // 4].max() < 20
    assert found[:, -width // 4 :].min() > 235


def test_of_a_moving_image_the_first_frame_is_read(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (4, 4), (255, 0, 0)), Image.new("RGB", (4, 4), (0, 0, 255))
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    assert (decode(tmp_path / "a.gif") == (255, 0, 0)).all()


@pytest.mark.parametrize(("height", "width", "size"), [(40, 60, 16), (9, 5, 16), (16, 16, 16), (16, 300, 16)])
def test_resizing_is_pillow_s_bilinear_one_and_keeps_no_aspect(
    tmp_path: Path, height: int, width: int, size: int
) -> None:
    pixels = noise(height, width)
    expected = np.asarray(Image.fromarray(pixels).resize((size, size), BILINEAR))
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.array_equal(decode(tmp_path / "a.png", size), expected)
    assert np.array_equal(ArrayDomain("a", pixels[None], np.zeros(1, np.int64)).image(0, size), expected)


@pytest.mark.parametrize(("height", "width", "size"), [(480, 640, 64), (999, 501, 112), (300, 300, 299), (64, 900, 64)])
def test_a_quick_decode_of_a_jpeg_is_close_to_the_full_one_and_never_below_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, height: int, width: int, size: int
) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(smooth(height, width)).save(path, quality=95)
    with Image.open(path) as file:
        expected = np.asarray(file.convert("RGB").resize((size, size), BILINEAR)).astype(int)
    before: list[tuple[int, int]] = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda im, *args: (before.append(im.size), resize(im, *args))[1])
    difference = np.abs(decode(path, size) - expected)
    assert difference.mean() < 1.5
    assert difference.max() < 16
    assert min(before[0]) >= size


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("kind", ["cut", "text", "empty", "missing", "folder"])
def test_what_cannot_be_read_is_a_broken_image_with_its_name(tmp_path: Path, kind: str, size: int | None) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(noise(64, 64)).save(path)
    whole = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes({"cut": whole[: len(whole) // 2], "text": b"no image at all", "empty": b""}[kind])
    with pytest.raises(BrokenImageError, match=r"^a\.jpg: ."):
        decode(path, size)


def test_a_domain_of_files_reads_below_its_root(tmp_path: Path) -> None:
    (tmp_path / "day/cat").mkdir(parents=True)
    pixels = noise(6, 6)
    Image.fromarray(pixels).save(tmp_path / "day/cat/1.png")
    domain = FileDomain("day", tmp_path, ["day/cat/0.png", "day/cat/1.png"], np.array([0, 0]))
    assert np.array_equal(domain.image(1), pixels)
    assert domain.image(1, 3).shape == (3, 3, 3)
    assert domain.image_name(0) == "day/cat/0.png"


# Places


class Plain:
    """Images of one colour each: image i of a domain that starts at `first` is filled with first + i."""

    def __init__(self, n: int, first: int = 0, broken: tuple[int, ...] = (), name: str = "plain") -> None:
        self.name, self.labels, self.first, self.broken = name, np.arange(n) % 3, first, broken
        self.reads: Counter[int] = Counter()
        self.lock = threading.Lock()

    def image(self, i: int, size: int | None = None) -> np.ndarray:
        with self.lock:
            self.reads[i] += 1
        if i in self.broken:
            raise BrokenImageError(f"{i} is broken")
        return np.full((size or 4, size or 4, 3), self.first + i, dtype=np.uint8)

    def image_name(self, i: int) -> str:
        return f"{self.name}/{i}"


def values(x: torch.Tensor) -> list[int]:
    """The colours of a batch that was normalised by halves."""
    return (127.5 + 127.5 * x[:, 0, 0, 0]).round().int().tolist()


def test_images_are_numbered_through_the_domains() -> None:
    a, b, empty, c = Plain(3), Plain(2), Plain(0), Plain(4)
    place = ConcatDomains((a, b, empty, c))
    assert len(place) == 9
    expected = [(a, 0), (a, 1), (a, 2), (b, 0), (b, 1), (c, 0), (c, 1), (c, 2), (c, 3)]
    for i, (domain, at) in enumerate(expected):
        found = place.find(i)
        assert found[0] is domain
        assert found[1] == at
    assert place.labels.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0]
    assert place.numbers.tolist() == [0, 0, 0, 1, 1, 3, 3, 3, 3]


@pytest.mark.parametrize("i", [-1, 5])
def test_numbers_beyond_the_images_are_refused(i: int) -> None:
    with pytest.raises(IndexError):
        ConcatDomains((Plain(3), Plain(2))).find(i)


# Batches


@pytest.mark.parametrize("threads", [1, 4])
def test_batches_come_in_the_order_given_with_their_indices(threads: int) -> None:
    loader = Loader(ConcatDomains((Plain(100), Plain(100, 100))), 4, "half", threads=threads)
    order = np.random.default_rng(0).permutation(200)
    orders = [order[i : i + 48] for i in range(0, 200, 48)]  # several chunks in each, and a ragged last one
    batches = list(loader.batches(orders))
    assert [len(x) for x, _ in batches] == [48, 48, 48, 48, 8]
    for (x, indices), asked in zip(batches, orders, strict=True):
        assert indices.tolist() == asked.tolist()
        assert values(x) == asked.tolist()


def test_values_are_normalised_channel_by_channel() -> None:
    pixels = noise(4, 4)
    place = ConcatDomains((ArrayDomain("a", pixels[None], np.zeros(1, np.int64)),))
    ((x, _),) = Loader(place, 4).batches([np.array([0])])
    assert x.shape == (1, 3, 4, 4)
    assert x.dtype == torch.float32
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    for channel in range(3):
        for row in range(4):
            for column in range(4):
                expected = (pixels[row, column, channel] / 255 - mean[channel]) / std[channel]
                assert x[0, channel, row, column].item() == pytest.approx(expected, abs=1e-5)
    ((x, _),) = Loader(place, 4, "half").batches([np.array([0])])
    assert x[0, 2, 3, 1].item() == pytest.approx(pixels[3, 1, 2] / 127.5 - 1, abs=1e-6)


def test_images_are_resized_to_the_loader_s_size() -> None:
    ((x, _),) = Loader(ConcatDomains((Plain(2),)), 9, "half").batches([np.array([1, 0])])
    assert x.shape == (2, 3, 9, 9)


@pytest.mark.parametrize("keep", [False, True])
def test_broken_images_are_left_out_with_their_index_and_told_once(
    caplog: pytest.LogCaptureFixture, keep: bool
) -> None:
    domain = Plain(6, broken=(1, 4), name="day")
    loader = Loader(ConcatDomains((Plain(10), domain)), 4, "half", keep=keep)
    order = np.array([15, 14, 0, 11, 10, 11])
    with caplog.at_level(logging.WARNING, logger="trueup"):
        for _ in range(2):
            ((x, indices),) = loader.batches([order])
            assert indices.tolist() == [15, 0, 10]
            assert values(x) == [5, 0, 0]
    assert loader.broken == {14: "day/4", 11: "day/1"}
    told = [record.getMessage() for record in caplog.records]
    assert sorted(told) == [
        "left out, cannot be read: day/1 (1 is broken)",
        "left out, cannot be read: day/4 (4 is broken)",
    ]


def test_a_batch_of_broken_images_alone_is_passed_over() -> None:
    loader = Loader(ConcatDomains((Plain(6, broken=(2, 3)),)), 4, "half")
    orders = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5]), np.array([], dtype=np.int64)]
    assert [indices.tolist() for _, indices in loader.batches(orders)] == [[0, 1], [4, 5]]


def test_other_errors_are_not_swallowed() -> None:
    class Wrong(Plain):
        def image(self, i: int, size: int | None = None) -> np.ndarray:
            raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        list(Loader(ConcatDomains((Wrong(2),)), 4).batches([np.array([0])]))


def test_what_is_kept_is_read_once_and_is_the_same() -> None:
    domain = Plain(20)
    plain, keeping = Loader(ConcatDomains((domain,)), 4), Loader(ConcatDomains((domain,)), 4, keep=True)
    orders = [np.arange(0, 12), np.arange(12, 20)]
    expected = list(plain.batches(orders))
    domain.reads.clear()
    passes = [list(keeping.batches(orders)) for _ in range(3)]
    assert set(domain.reads.values()) == {1}
    for found in passes:
        for (x, indices), (y, asked) in zip(found, expected, strict=True):
            assert torch.equal(x, y)
            assert np.array_equal(indices, asked)


def test_changing_a_batch_does_not_change_what_is_kept() -> None:
    loader = Loader(ConcatDomains((Plain(2, first=9),)), 4, "half", keep=True)
    for _ in range(2):
        ((x, _),) = loader.batches([np.array([0, 1])])
        assert values(x) == [9, 10]
        x.zero_()


def test_nothing_is_kept_unless_asked_or_if_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "CACHE", 3 * 4 * 4 * 10)
    for n, keep, reads in ((10, True, 1), (11, True, 2), (10, False, 2)):
        domain = Plain(n)
        loader = Loader(ConcatDomains((domain,)), 4, keep=keep)
        for _ in range(2):
            list(loader.batches([np.arange(n)]))
        assert set(domain.reads.values()) == {reads}


def test_a_long_stream_is_read_four_batches_ahead_and_no_more() -> None:
    domain = Plain(250)
    batches = Loader(ConcatDomains((domain,)), 4, threads=2).batches([np.arange(i, i + 10) for i in range(0, 250, 10)])
    for taken in (1, 2, 3):
        next(batches)
        end = time.monotonic() + 10
        while domain.reads.total() < 10 * (taken + 4) and time.monotonic() < end:
            time.sleep(0.01)  # read while the batch is worked on
        assert domain.reads.total() == 10 * (taken + 4)
    batches.close()  # waits for the threads
    assert domain.reads.total() == 70


@pytest.mark.parametrize(("n", "depth"), [(7, 3), (3, 3), (2, 5), (4, 0), (0, 2)])
def test_work_is_started_depth_items_ahead(n: int, depth: int) -> None:
    started: list[int] = []
    for i, (item, work) in enumerate(prefetch(range(n), lambda item: (started.append(item), 10 * item)[1], depth)):
        assert (item, work) == (i, 10 * i)
        assert started == list(range(min(n, i + depth + 1)))
    assert started == list(range(n))


def test_threads_end_with_the_batches() -> None:
    before = threading.active_count()
    loader = Loader(ConcatDomains((Plain(50),)), 4, threads=4)
    list(loader.batches([np.arange(50)]))
    batches = loader.batches([np.array([i]) for i in range(50)])
    next(batches)
    batches.close()
    assert threading.active_count() == before
