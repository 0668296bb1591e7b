"""Damaged archives and archive bombs."""

import gzip
import io
import shutil
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from archive_files import COMPRESSORS, CONTENT, KINDS, NOISE, Place, either, files, good, info, tar, zipped

from trueup.data import archives
from trueup.data.archives import Limits, unpack_archive


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# Damage


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_cut_off_is_refused(kind: str, place: Place) -> None:
    blob = good(kind)
    cuts = [0, 1, 3, 100, 512, 600, *(len(blob) * i // 8 for i in range(1, 8)), len(blob) - 1]
    if kind == "tar":  # what follows the end is padding
        cuts[-1] = len(blob.rstrip(b"\0"))
        cuts += range(512, len(blob.rstrip(b"\0")), 20 * 512)
    for cut in cuts:
        place.refuses(blob[:cut], "damaged|not an archive")


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "tar.bz2", "tar.xz"])
def test_checksums_are_compared_without_a_hash(kind: str, place: Place) -> None:
    blob = good(kind)
    said = "damaged or was cut off" + "|not an archive" * (kind == "tar.bz2")  # which is nonsense as a whole
    for at in range(len(blob) // 4, len(blob) // 2, len(blob) // 40):
        place.refuses(blob[:at] + bytes([blob[at] ^ 16]) + blob[at + 1 :], said)


def test_the_checksum_behind_the_end_of_a_tar_is_compared(place: Place) -> None:
    blob = bytearray(gzip.compress(tar(info("a", b"1"))))
    blob[-8] ^= 1
    place.refuses(bytes(blob), "CRC check failed")


def test_a_damaged_header_in_the_middle_is_not_the_end(place: Place) -> None:
    """tarfile itself stops there in silence, and half of the files are missing."""
    blob = bytearray(tar(info("a", b"1"), info("b", b"2"), info("c", b"3")))
    blob[1024] ^= 1
    with tarfile.open(fileobj=io.BytesIO(bytes(blob))) as file:
        assert file.getnames() == ["a"]
    place.refuses(bytes(blob), "its end is missing")


def test_what_follows_the_end_is_not_left_out_in_silence(place: Place) -> None:
    place.refuses(tar(info("a", b"1")) + tar(info("b", b"2")), "there is data after its end")


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_single_compressed_file_is_no_archive(kind: str, place: Place) -> None:
    place.refuses(COMPRESSORS[f"tar.{kind}"](NOISE), "is a single compressed file, not an archive")


@pytest.mark.parametrize(
    "blob", [b"", b"hello", bytes(2000), b"Rar!\x1a\x07\0", b"7z\xbc\xaf\x27\x1c", b"MZ" + good("zip")]
)
def test_other_files_are_refused(blob: bytes, place: Place) -> None:
    place.refuses(blob, "is not an archive; its content must be a .zip, .tar")


# Bombs


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "tar.bz2", "tar.xz"])
def test_a_bomb_by_its_ratio(kind: str, place: Place) -> None:
    blob = either(kind, ("zeros", bytes(12_000_000)))
    assert len(blob) < 12_000_000 / 200
    place.refuses(blob, r"unpacks to more than 200 times its size; .* Limits\(ratio=...\)")
    unpack_archive(place.archive, place.out, limits=Limits(ratio=1e6))
    assert (place.out / "zeros").stat().st_size == 12_000_000


@pytest.mark.parametrize("kind", ["zip", "tar.xz"])
def test_ten_megabytes_are_free(kind: str, place: Place) -> None:
    """Small archives of equal files shrink a lot."""
    blob = either(kind, ("zeros", bytes(9_900_000)))
    assert len(blob) < 9_900_000 / 200
    assert unpack_archive(place.put(blob), place.out).bytes == 9_900_000


def test_a_bomb_of_many_members(place: Place) -> None:
    """Each is small; the sum counts."""
    blob = zipped(*((f"{i}", bytes(1_100_000)) for i in range(10)))
    place.refuses(blob, "unpacks to more than 200 times its size")


def test_a_bomb_of_members_that_share_their_bytes(place: Place) -> None:
    """Every entry of the directory names the same compressed bytes, so that the zip stays small."""
    whole = zipped(("x", bytes(1_000_000)))
    start = whole.index(b"PK\x01\x02")
    end = whole.index(b"PK\x05\x06")
    entries = b"".join(whole[start:end].replace(b"x", b"%c" % letter) for letter in b"abcdefghijklmnop")
    tail = bytearray(whole[end:])
    struct.pack_into("<HHL", tail, 8, 16, 16, len(entries))
    place.refuses(whole[:start] + entries + bytes(tail), "unpacks to more than 200 times its size")


def declared(blob: bytes, size: int, crc: int | None = None) -> bytes:
    """A zip of one member whose headers say another size."""
    blob = bytearray(blob)
    for at in (blob.index(b"PK\x03\x04") + 14, blob.index(b"PK\x01\x02") + 16):
        if crc is not None:
            struct.pack_into("<L", blob, at, crc)
        struct.pack_into("<L", blob, at + 8, size)
    return bytes(blob)


@pytest.mark.parametrize("size", [0, 10, 11_999_999])
def test_a_zip_that_says_less_than_it_holds(size: int, place: Place) -> None:
    bomb = zipped(("x", bytes(12_000_000)))
    place.refuses(declared(bomb, size), "member 'x' .*Bad CRC-32", limits=Limits(ratio=1e6))


def test_no_more_is_written_than_was_said(place: Place) -> None:
    """With the checksum of its beginning the lie holds together; what comes out is what was said, and not more."""
    bomb = declared(zipped(("x", bytes(12_000_000))), 10, zlib.crc32(bytes(10)))
    assert unpack_archive(place.put(bomb), place.out).bytes == 10
    assert files(place.out) == {"x": bytes(10)}


@pytest.mark.parametrize("pieces", [[b"1234", b"56"], [b"12345678"], [b"12"], []])
def test_bytes_are_counted_as_they_come(pieces: list[bytes], place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a reader ever give more or less than headers say."""
    written: list[int] = []

    def give(*_: Any) -> Iterator[bytes]:
        yield from pieces

    monkeypatch.setattr(archives, "_zip_chunks", give)
    more = "more" if sum(map(len, pieces)) > 5 else "less"
    watch = {"progress": lambda done, of: written.append(done) if of == 5 else None}
    place.refuses(zipped(("x", b"12345")), f"member 'x' holds {more} than the 5 bytes", **watch)
    assert max(written, default=0) <= 5


def test_a_zip_that_says_more_than_it_holds(place: Place) -> None:
    place.refuses(declared(zipped(("x", b"12345")), 50), "member 'x'")


def test_sizes_of_a_tar_are_no_promise(place: Place) -> None:
    """A terabyte that is not there, and a size below nothing, which leads tarfile round in circles."""
    blob = bytearray(tar(info("x", b"1")))
    for size, match in ((10**12, "unpacks to more"), (-512, "has a negative size"), (-1024, "has a negative size")):
        place.refuses(resized(blob, size), match)
    place.refuses(tar(info("x", b"1", pax_headers={"size": "-1024"})), "has a negative size")


def resized(blob: bytearray, size: int) -> bytes:
    """A tar whose first header says another size, with the checksum that fits."""
    blob[124:136] = (b"\x80" if size >= 0 else b"\xff") + size.to_bytes(11, "big", signed=True)
    blob[148:156] = b"%06o\0 " % sum(blob[:148] + b" " * 8 + blob[156:512])
    return bytes(blob)


def test_the_limit_of_members_counts_folders_too(place: Place) -> None:
    items = [(f"a/b/{i}", b"") for i in range(8)]
    for kind in ("zip", "tar"):
        place.refuses(either(kind, *items), "holds more than 9 files and folders", limits=Limits(members=9))
    deep = either("zip", ("1/2/3/4/5/6/7/8/9/10", b""))
    place.refuses(deep, "holds more than 9 files and folders", limits=Limits(members=9))
    again = tar(*[info("a", type=tarfile.DIRTYPE)] * 10)
    place.refuses(again, "holds more than 9 files and folders", limits=Limits(members=9))
    unpack_archive(place.put(either("zip", *items)), place.out, limits=Limits(members=10))
    assert len(files(place.out)) == 8


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_the_limit_of_bytes(kind: str, place: Place) -> None:
    blob = either(kind, ("a", NOISE[:30_000]), ("b", NOISE[:30_000]))
    place.refuses(blob, "unpacks to more than 59,999 bytes", limits=Limits(size=59_999))
    unpack_archive(place.archive, place.out, limits=Limits(size=60_000 if kind == "zip" else 80_000))


def test_a_tar_that_never_ends_is_left_early(place: Place) -> None:
    """Behind its end, or in a header, where no member's size tells."""
    blob = tar(info("a", b"1"))
    place.refuses(gzip.compress(blob + bytes(12_000_000)), "unpacks to more than 200 times")
    place.refuses(gzip.compress(tar(info("x" * 70_000, b"1"))), "a header has .* more than 65,536 bytes")
    notes = {f"note{i}": "x" * 1000 for i in range(70)}
    place.refuses(gzip.compress(tar(info("x", b"1", pax_headers=notes))), "a header has .* more than 65,536 bytes")


def test_a_long_name_of_negative_length_does_not_read_everything(place: Place) -> None:
    blob = bytearray(tar(info("x" * 200, b"1"), form=tarfile.GNU_FORMAT))
    place.refuses(resized(blob, -1024), "negative size, or more than")


def test_headers_in_headers_without_end(place: Place) -> None:
    header = tar(info("x" * 200, b""), form=tarfile.GNU_FORMAT)[:1024]
    place.refuses(header * 5000 + tar(info("a", b"1")), "a header has .* more than 65,536 bytes")


def test_memory_does_not_grow_with_global_headers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    real = tarfile.TarFile.next

    def watched(self: tarfile.TarFile) -> tarfile.TarInfo | None:
        found = real(self)
        kept.append(len(self.pax_headers) + len(self.members))
        return found

    monkeypatch.setattr(tarfile.TarFile, "next", watched)
    parts = []
    for i in range(50):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={f"note{i}": "x"}) as file:
            file.addfile(info(f"{i}", b"1")[0], io.BytesIO(b"1"))
        parts.append(buffer.getvalue()[:2048])
    unpack_archive(place.put(b"".join(parts) + bytes(1024)), place.out)
    assert len(files(place.out)) == 50
    assert max(kept) <= 3


def test_a_full_disk_is_noticed_before_it_is_full(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(map(len, CONTENT.values()))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=total - 1))
    place.refuses(good("zip"), f"unpacks to {total:,} bytes, and .*home has {total - 1:,} free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=total))
    unpack_archive(place.archive, place.out)
