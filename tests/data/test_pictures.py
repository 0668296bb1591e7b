"""Pictures of every depth become 8 bits as their files say, or are refused."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from trueup.data.check import check_dataset, preflight_domains
from trueup.data.datasets import open_dataset
from trueup.data.datasets.folders import scan_image_folder
from trueup.data.datasets.mask_folders import read_image
from trueup.data.datasets.mask_folders import scan_mask_folder as scan_masks
from trueup.data.domains import FileDomain
from trueup.data.pictures import BrokenImageError, Reading, UnknownRangeError, decode, read_picture
from trueup.data.slices import network_box

Array = NDArray[Any]
TWELVE = Reading(range=(0, 4095))


def values(*shape: int, high: int = 4096, seed: int = 0) -> Array:
    """Random values below `high`, of which 1 and the largest occur."""
    found = np.random.default_rng(seed).integers(0, high, shape).astype(np.uint16)
    found.flat[0], found.flat[1] = high - 1, 1
    return found


def png(path: Path, pixels: Array, significant: bytes = b"") -> Path:
    """Write a 16-bit PNG by hand, with an sBIT chunk if there is one: Pillow writes no 16-bit colours."""
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[1 if pixels.ndim == 2 else pixels.shape[2]]
    height, width = pixels.shape[:2]

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0))
    more = chunk(b"sBIT", significant) if significant else b""
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
    return path


def tiff(path: Path, pixels: Array, order: str = "<", packed: bool = False, **tags: int) -> Path:
    """Write a TIFF of one strip by hand, in either order of bytes; a tag is called by its number, as t281=4095."""
    pixels = pixels if pixels.ndim == 3 else pixels[..., None]
    height, width, channels = pixels.shape
    data = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    data = zlib.compress(data) if packed else data
    kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    known = {
        256: [width], 257: [height], 258: [8 * pixels.itemsize] * channels, 259: [8 if packed else 1],
        262: [2 if channels > 1 else 1], 273: [0], 277: [channels], 278: [height], 279: [len(data)],
        339: [kind] * channels,
    }  # fmt: skip
    known |= {int(name[1:]): [value] for name, value in tags.items()}
    entries, beyond, start = b"", b"", 8 + 2 + 12 * len(known) + 4
    sizes = sum(2 * len(v) for v in known.values() if len(v) > 2)
    for tag, content in sorted(known.items()):
        content = [start + sizes] if tag == 273 else content
        code, letter = (4, "I") if tag in (273, 279) else (3, "H")
        blob = struct.pack(order + letter * len(content), *content)
        entries += struct.pack(order + "HHI", tag, code, len(content))
        entries += blob.ljust(4, b"\0") if len(blob) <= 4 else struct.pack(order + "I", start + len(beyond))
        beyond += blob if len(blob) > 4 else b""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(known))
    path.write_bytes(head + entries + b"\0" * 4 + beyond + data)
    return path


def grey(image: Array) -> Array:
    assert np.array_equal(image[..., 0], image[..., 1])
    assert np.array_equal(image[..., 0], image[..., 2])
    return image[..., 0]


# Integers


def test_twelve_bits_in_sixteen_are_refused_and_read_when_their_range_is_said(tmp_path: Path) -> None:
    pixels = values(6, 7)
    path = png(tmp_path / "a.png", pixels)
    with pytest.raises(UnknownRangeError, match=r"a\.png: its largest value is 4095 of 65535.*--range 0 4095 or"):
        decode(path)
    assert np.array_equal(grey(decode(path, reading=TWELVE)), pixels // 16)
    assert np.array_equal(grey(decode(path, reading=Reading(range=(0, 65535)))), pixels // 256)
    # The same picture spread over 16 bits is the same to the bit.
    assert np.array_equal(decode(png(tmp_path / "b.png", pixels * 16)), decode(path, reading=TWELVE))


@pytest.mark.parametrize(("largest", "known"), [(0, True), (1, False), (16383, False), (16384, True), (65535, True)])
def test_sixteen_bits_are_known_by_their_upper_two(tmp_path: Path, largest: int, known: bool) -> None:
    pixels = np.array([[0, largest]], dtype=np.uint16)
    for path in (png(tmp_path / "a.png", pixels), tiff(tmp_path / "a.tif", pixels)):
        if known:
            assert grey(decode(path)).tolist() == [[0, largest // 256]]
        else:
            with pytest.raises(UnknownRangeError, match=f"largest value is {largest} of 65535"):
                decode(path)


@pytest.mark.parametrize("channels", [2, 3, 4])
@pytest.mark.parametrize("high", [4096, 65536])
def test_colours_of_sixteen_bits_have_all_their_bits(tmp_path: Path, channels: int, high: int) -> None:
    pixels = values(5, 6, channels, high=high)
    pixels[..., -1] = 65535 if channels != 3 else pixels[..., -1]  # opaque, which says nothing of the colours
    path = png(tmp_path / "a.png", pixels)
    colours = pixels[..., :3] if channels > 2 else pixels[..., [0, 0, 0]]
    if high == 65536:
        assert np.array_equal(decode(path), colours >> 8)
    else:
        with pytest.raises(UnknownRangeError, match="4095 of 65535"):
            decode(path)
        assert np.array_equal(decode(path, reading=TWELVE), colours >> 4)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_tiffs_of_twelve_bits_in_any_order_of_bytes(tmp_path: Path, order: str, packed: bool, channels: int) -> None:
    pixels = values(5, 6, channels)
    path = tiff(tmp_path / "a.tif", pixels, order, packed)
    with pytest.raises(UnknownRangeError, match="4095 of 65535"):
        decode(path)
    expected = np.broadcast_to(pixels >> 4, (5, 6, 3))
    assert np.array_equal(decode(path, reading=TWELVE), expected)
    assert np.array_equal(read_picture(path).values.reshape(pixels.shape), pixels)
    assert np.array_equal(decode(tiff(path, pixels, order, packed, t281=4095)), expected)


def planar(path: Path, pixels: Array) -> Path:
    """Write a TIFF of three uncompressed planes by hand, one strip each."""
    height, width, _ = pixels.shape
    planes = [pixels[..., c].astype(pixels.dtype.newbyteorder("<")).tobytes() for c in range(3)]
    depth, long, start = 8 * pixels.itemsize, len(planes[0]), 8 + 2 + 12 * 10 + 4
    tags = [
        (256, 4, 1, width), (257, 4, 1, height), (258, 3, 3, start), (259, 3, 1, 1), (262, 3, 1, 2),
        (273, 4, 3, start + 8), (277, 3, 1, 3), (278, 4, 1, height), (279, 4, 3, start + 20), (284, 3, 1, 2),
    ]  # fmt: skip
    beyond = struct.pack("<4H", depth, depth, depth, 0)
    beyond += struct.pack("<3I", *(start + 32 + c * long for c in range(3))) + struct.pack("<3I", *[long] * 3)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    path.write_bytes(head + b"\0" * 4 + beyond + b"".join(planes))
    return path


def test_deep_planes_are_refused_and_planes_of_eight_bits_are_read(tmp_path: Path) -> None:
    pixels = values(5, 6, 3, high=65536)
    path = planar(tmp_path / "a.tif", pixels)
    for read in (decode, read_picture):
        with pytest.raises(BrokenImageError, match=r"a\.tif: stores 16-bit channels in separate planes; save it with"):
            read(path)
    eight = (pixels >> 8).astype(np.uint8)
    assert np.array_equal(decode(planar(path, eight)), eight)


def test_a_file_may_say_its_depth(tmp_path: Path) -> None:
    pixels = values(5, 6)
    # Unscaled, against the standard; scaled as it demands; dark and scaled; all 16.
    assert np.array_equal(grey(decode(png(tmp_path / "a.png", pixels, bytes([12])))), pixels >> 4)
    assert np.array_equal(grey(decode(png(tmp_path / "b.png", pixels << 4, bytes([12])))), pixels >> 4)
    dark = (pixels % 200) << 4
    assert np.array_equal(grey(decode(png(tmp_path / "c.png", dark, bytes([12])))), dark >> 8)
    assert np.array_equal(grey(decode(png(tmp_path / "d.png", pixels, bytes([16])))), pixels >> 8)
    for limit in (4095, 65535):
        found = decode(tiff(tmp_path / "e.tif", pixels, t281=limit))
        assert np.array_equal(grey(found), pixels >> (4 if limit == 4095 else 8))
    header = b"P5 6 5 4095\n"
    (tmp_path / "f.pgm").write_bytes(header + pixels.astype(">u2").tobytes())
    assert np.abs(grey(decode(tmp_path / "f.pgm")).astype(int) - (pixels >> 4)).max() <= 1


def test_the_extremes_of_a_picture_are_no_depth(tmp_path: Path) -> None:
    """Programs write them as the limits of samples; scaling by them would stretch each picture in its own way."""
    pixels = values(5, 6, high=3001)
    for tags in ({"t281": 3000}, {"t280": 1, "t281": 4095}, {"t281": 2047}):
        with pytest.raises(UnknownRangeError):
            decode(tiff(tmp_path / "a.tif", pixels, **tags))


@pytest.mark.parametrize("dtype", ["i4", "u4", "i2"])
def test_integers_of_other_kinds_take_a_range(tmp_path: Path, dtype: str) -> None:
    most = min(3 * 10**9, np.iinfo(dtype).max)
    low = 0 if dtype == "u4" else -1000
    pixels = np.array([[low, 0, 400, most]], dtype=dtype)
    path = tiff(tmp_path / "a.tif", pixels)
    with pytest.raises(UnknownRangeError, match=rf"holds integers from {low} to {most}; .*--range LOW HIGH"):
        decode(path)
    expected = [round(255 * (min(max(int(v), low), 400) - low) / (400 - low)) for v in pixels[0]]
    assert grey(decode(path, reading=Reading(range=(low, 400)))).tolist() == [expected]


def test_where_the_lowest_value_is_white_it_is_shown_so(tmp_path: Path) -> None:
    pixels = np.array([[0, 65535]], dtype=np.uint16)
    assert grey(decode(tiff(tmp_path / "a.tif", pixels, t262=0))).tolist() == [[255, 0]]


# Floats


def test_floats_from_0_to_1_are_known_and_others_are_not(tmp_path: Path) -> None:
    eight = np.arange(256, dtype=np.uint8).reshape(16, 16)
    path = tmp_path / "a.tif"
    Image.fromarray((eight / 255).astype(np.float32)).save(path)
    assert np.array_equal(grey(decode(path)), eight)
    for wrong in (-0.1, 1.5, 4095.0):
        Image.fromarray(np.array([[0.5, wrong]], dtype=np.float32)).save(path)
        with pytest.raises(UnknownRangeError, match=r"holds floats from .* not within 0 to 1; .*--range LOW HIGH"):
            decode(path)
        assert decode(path, reading=Reading(range=(-1, 1)))[0, 0, 0] == 191
    for wrong in (np.nan, np.inf):
        Image.fromarray(np.array([[0.5, wrong]], dtype=np.float32)).save(path)
        for reading in (Reading(), Reading(range=(0, 1))):
            with pytest.raises(BrokenImageError, match="not finite"):
                decode(path, reading=reading)


# Eight bits


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("ending", ["png", "tif", "jpg", "bmp"])
def test_eight_bits_are_what_pillow_reads_whatever_range_is_said(tmp_path: Path, mode: str, ending: str) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    path = tmp_path / f"a.{ending}"
    try:
        Image.fromarray(pixels).convert(mode).save(path)
    except (OSError, KeyError):
        pytest.skip("this format has no such pictures")
    with Image.open(path) as file:
        expected = np.asarray(file.convert("RGB"))
    assert np.array_equal(decode(path), expected)
    assert np.array_equal(decode(path, reading=TWELVE), expected)


# Shape


@pytest.mark.parametrize(("height", "width"), [(40, 60), (61, 40), (33, 33)])
def test_a_picture_becomes_square_in_three_ways(tmp_path: Path, height: int, width: int) -> None:
    pixels = np.random.default_rng(2).integers(1, 256, (height, width, 3)).astype(np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    short, long = sorted((height, width))
    top, left = (height - short) // 2, (width - short) // 2
    middle = pixels[top : top + short, left : left + short]
    assert np.array_equal(decode(path, reading=Reading(resize="crop")), middle)
    assert np.array_equal(decode(path, short, Reading(resize="crop")), middle)
    padded = decode(path, reading=Reading(resize="pad"))
    assert padded.shape == (long, long, 3)
    there = padded.any(axis=2)
    assert there.sum() == height * width
    assert np.array_equal(padded[there], pixels.reshape(-1, 3))
    rows, columns = np.flatnonzero(there.any(axis=1)), np.flatnonzero(there.any(axis=0))
    assert abs(int(rows[0]) - (long - 1 - int(rows[-1]))) <= 1
    assert abs(int(columns[0]) - (long - 1 - int(columns[-1]))) <= 1
    squashed = np.asarray(Image.fromarray(pixels).resize((16, 16), Image.Resampling.BILINEAR))
    for reading in (Reading(), Reading(resize="squash")):
        assert np.array_equal(decode(path, 16, reading), squashed)


def test_boxes_of_masks_are_cut_in_the_same_three_ways() -> None:
    ones = (1.0, 1.0, 1.0)
    assert network_box(40, 60, ones, None) == network_box(40, 60, ones, "pad") == (-10, 0, 60, 60)
    assert network_box(40, 60, ones, "crop") == (0, 10, 40, 40)
    assert network_box(40, 60, ones, "squash") == (0, 0, 40, 60)
    assert network_box(40, 60, (1.0, 2.0, 1.0), "crop") == (5, 0, 30, 60)  # 60 mm each way


def test_what_means_nothing_is_refused() -> None:
    for limits in ((1, 1), (5, 2), (0, float("nan")), (float("-inf"), 1)):
        with pytest.raises(ValueError, match="is empty: the value of black must be below that of white"):
            Reading(range=limits)
    with pytest.raises(ValueError, match="resize='stretch' is not known"):
        Reading(resize="stretch")  # type: ignore[arg-type]
    for name in ("digits", "cifar10-c", "fundus", "cardiac-sim"):
        with pytest.raises(ValueError, match=rf"resize=crop has no effect on {name}"):
            open_dataset(name, None, Reading(resize="crop"))


# Masks


def test_masks_of_sixteen_bits_keep_their_numbers(tmp_path: Path) -> None:
    numbers = np.array([[0, 1, 2], [2, 1, 0]], dtype=np.uint16)
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    Image.fromarray(numbers.astype(np.uint8)).save(tmp_path / "images/a.png")
    for write in (png, tiff):
        for pixels in (numbers, np.stack([numbers] * 3, axis=2)):
            path = tmp_path / "masks" / f"a.{'png' if write is png else 'tif'}"
            write(path, pixels)
            _, domains = scan_masks(tmp_path)
            (case,) = domains[tmp_path.name].cases
            mask = case.read().mask
            assert mask is not None
            assert mask.tolist() == [numbers.tolist()]
            path.unlink()


def test_images_of_segmenters_are_windowed_unless_their_range_is_said(tmp_path: Path) -> None:
    pixels = values(20, 20)
    path = png(tmp_path / "a.png", pixels)
    low, high = np.percentile(pixels, [1, 99])
    expected = np.clip(255 * (pixels - low) / (high - low) + 0.5, 0, 255).astype(np.uint8)
    assert np.abs(read_image(path)[0][0, ..., 0].astype(int) - expected).max() <= 1
    assert np.array_equal(read_image(path, TWELVE)[0][0, ..., 0], pixels >> 4)


# Datasets


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two domains of two classes, of which one picture has 12 bits."""
    for domain in ("day", "night"):
        for label in ("cat", "dog"):
            (tmp_path / domain / label).mkdir(parents=True)
            picture = np.full((8, 12, 3), 100, dtype=np.uint8)
            Image.fromarray(picture).save(tmp_path / domain / label / "0.png")
    png(tmp_path / "day/cat/deep.png", values(8, 8))
    return tmp_path


def test_the_check_names_unknown_depths_and_squashed_pictures(root: Path) -> None:
    report = check_dataset("folder", root)
    (problem,) = report.problems
    assert "1 images have more than 8 bits and do not declare the values of black and white" in problem
    assert "--range LOW HIGH: day/cat/deep.png (its largest value is 4095 of 65535" in problem
    (note,) = report.notes
    assert "4 of 5 images are not square" in note
    assert "day/cat/0.png (12×8)" in note
    report = check_dataset("folder", root, reading=TWELVE)
    assert report.problems == []
    assert "clipped" in check_dataset("folder", root, reading=Reading(range=(0, 1000))).notes[1]


def test_a_first_look_refuses_and_says_what_changes_pictures(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def look(name: str, reading: Reading) -> str:
        caplog.clear()
        domain = scan_image_folder(root, None, reading).domain(name)
        assert isinstance(domain, FileDomain)
        preflight_domains(f"{root.name}-{reading}", [domain])
        return caplog.text

    with pytest.raises(UnknownRangeError, match=r"^day/cat/deep\.png: its largest.*--range 0 4095 or"):
        look("day", Reading())
    with pytest.raises(UnknownRangeError, match=r"^day/cat/deep\.png: its largest.*--range 0 4095 or"):
        scan_image_folder(root, None, Reading()).domain("day").image(1)
    said = look("day", TWELVE)
    assert "2 of 3 inspected pictures" in said
    assert "such as day/cat/0.png (12×8), and networks see them squashed: --resize crop or pad" in said
    assert look("day", TWELVE) == ""  # once
    assert "clipped" in look("day", Reading(range=(0, 1000), resize="crop"))
    for resize in ("squash", "crop", "pad"):
        assert look("night", Reading(resize=resize)) == ""  # type: ignore[arg-type]


def test_a_dataset_reads_as_it_is_told_or_as_its_card_says(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trueup.data import cards

    expected = values(8, 8) >> 4
    domain = open_dataset("folder", root, TWELVE).domain("day")
    assert np.array_equal(grey(domain.image(1)), expected)
    card = cards.Card("own", "own", "domains", 2, {"day": 3, "night": 2}, "", "", "", range=(0, 4095))
    monkeypatch.setitem(cards.CARDS, "own", card)
    assert np.array_equal(grey(open_dataset("own", root).domain("day").image(1)), expected)
    other = open_dataset("own", root, Reading(range=(0, 65535))).domain("day")
    assert np.array_equal(grey(other.image(1)), expected >> 4)


def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(BrokenImageError, match="not a regular file"):
        decode(tmp_path / "a.png")


def test_pillow_agrees_with_what_is_written_by_hand(tmp_path: Path) -> None:
    """The files of these tests are real ones."""
    pixels = values(4, 5)
    for path in (png(tmp_path / "a.png", pixels), tiff(tmp_path / "a.tif", pixels, ">", packed=True)):
        with Image.open(io.BytesIO(path.read_bytes())) as file:
            assert np.array_equal(np.asarray(file), pixels)
