"""Archives: what is good comes out byte by byte, what is not leaves nothing behind, inside or outside."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trueup.data import archives
from trueup.data.archives import Limits, Unpacked, folder_for, unpack_archive

NOISE = bytes(b for i in range(9000) for b in hashlib.sha256(bytes([i % 256, i // 256])).digest())  # 288 kB
CONTENT = {
    "PACS/photo/dog/1.png": NOISE[:5000],
    "PACS/photo/dog/2 [ü].png": b"\x89PNG" * 300,
    "PACS/empty.txt": b"",
    "PACS/big.bin": NOISE,
    "__MACOSX/._x": b"junk",
    "notes.txt": b"hello\n",
}
FOLDERS = ("PACS", "PACS/photo", "PACS/photo/dog", "PACS/nothing in it")
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar.gz": gzip.compress,
    "tar.bz2": bz2.compress,
    "tar.xz": partial(lzma.compress, preset=0),
}
KINDS = ("zip", *COMPRESSORS)


class Place:
    """A folder with other people's files around, and what it looked like before."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / "home"
        self.home.mkdir()
        (root / "other.txt").write_text("of somebody else")
        (self.home / "mine.txt").write_text("mine")
        self.archive, self.out = self.home / "data.bin", self.home / "data"

    def put(self, blob: bytes) -> Path:
        self.archive.write_bytes(blob)
        return self.archive

    def listing(self) -> dict[str, tuple[int, bytes]]:
        """Everything below: kind and mode, content."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            content = path.read_bytes() if path.is_file() else b""
            content = os.fsencode(path.readlink()) if path.is_symlink() else content
            found[path.relative_to(self.root).as_posix()] = path.lstat().st_mode, content
        return found

    def refuses(self, blob: bytes, match: str, **options: Any) -> None:
        """A ValueError that names the file; no `out`, and all else is as it was."""
        self.put(blob)
        before = self.listing()
        with pytest.raises(ValueError, match=match) as caught:
            unpack_archive(self.archive, self.out, **options)
        assert str(caught.value).startswith("data.bin: ")
        assert str(caught.value).endswith("; nothing was unpacked")
        assert self.listing() == before
        assert not self.out.exists()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def info(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A member of a tar; fields as tarfile calls them."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for key, value in fields.items():
        setattr(member, key, value)
    return member, content


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        for member, content in members:
            file.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zipped(*members: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for member, content in members:
            file.writestr(member, content)
    return buffer.getvalue()


@cache
def good(kind: str) -> bytes:
    if kind == "zip":
        return zipped(*((f"{name}/", b"") for name in FOLDERS), *CONTENT.items())
    folders = (info(name, type=tarfile.DIRTYPE) for name in FOLDERS)
    return COMPRESSORS[kind](tar(*folders, *(info(*item) for item in CONTENT.items())))


def either(kind: str, *items: tuple[str, bytes]) -> bytes:
    """The same files as a zip or as a tar."""
    return zipped(*items) if kind == "zip" else COMPRESSORS[kind](tar(*(info(*item) for item in items)))


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


# What is good


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_comes_out_byte_by_byte(kind: str, place: Place) -> None:
    blob = good(kind)
    told = unpack_archive(place.put(blob), place.out, sha256=sha256(blob).upper())
    assert files(place.out) == CONTENT
    folders = {path.relative_to(place.out).as_posix() for path in place.out.rglob("*") if path.is_dir()}
    assert folders == {*FOLDERS, "__MACOSX"}
    assert told == Unpacked(len(CONTENT), sum(map(len, CONTENT.values())), sha256(blob))
    assert sorted(path.name for path in place.home.iterdir()) == ["data", "data.bin", "mine.txt"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_dialect_of_tar(form: int, place: Place) -> None:
    long = "/".join(["a folder with a long name"] * 5) + "/" + "x" * 90
    members = info(long, b"1"), info("./b/./c", b"2"), info("./", type=tarfile.DIRTYPE)
    unpack_archive(place.put(tar(*members, form=form)), place.out)
    assert files(place.out) == {long: b"1", "b/c": b"2"}


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar program")
def test_what_the_tar_program_makes(place: Place) -> None:
    """A second opinion on what an archive is: ./ in front of all names, and two blocks at the end."""
    for name, content in CONTENT.items():
        (place.root / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (place.root / "in" / name).write_bytes(content)
    subprocess.run(["tar", "-czf", place.archive, "-C", place.root / "in", "."], check=True)
    unpack_archive(place.archive, place.out)
    assert files(place.out) == CONTENT


def test_compressed_parts_one_after_another_are_one(place: Place) -> None:
    blob = tar(info("a", NOISE))
    unpack_archive(place.put(gzip.compress(blob[:7000]) + gzip.compress(blob[7000:])), place.out)
    assert files(place.out) == {"a": NOISE}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_folder_may_be_named_twice_or_not_at_all(place: Place) -> None:
    unpack_archive(place.put(zipped(("a/", b""), ("a/b/x", b"1"), ("a/", b""), ("a/b/", b""))), place.out)
    assert files(place.out) == {"a/b/x": b"1"}


def test_archives_in_archives_are_files(place: Place) -> None:
    inner = zipped(("deep.zip", zipped(("x", bytes(9_000_000)))))
    assert unpack_archive(place.put(zipped(("inner.zip", inner))), place.out).bytes == len(inner)
    assert files(place.out) == {"inner.zip": inner}


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_the_content_says_the_kind_not_the_name(kind: str, place: Place) -> None:
    wrong = place.home / ("data.tar.gz" if kind == "zip" else "data.zip")
    wrong.write_bytes(good(kind))
    unpack_archive(wrong, place.out)
    assert files(place.out) == CONTENT


@pytest.mark.parametrize("blob", [tar(info("a", b"1", mode=0o6777)), b""], ids=["tar", "zip"])
def test_no_permissions_are_kept(blob: bytes, place: Place) -> None:
    member = zipfile.ZipInfo("a")
    member.external_attr = (stat.S_IFREG | 0o6777) << 16
    folder = zipfile.ZipInfo("b/c/")
    folder.external_attr = (stat.S_IFDIR | 0o7777) << 16
    before = os.umask(0)
    try:
        unpack_archive(place.put(blob or zipped((member, b"1"), (folder, b""), ("d/e/f", b""))), place.out)
    finally:
        os.umask(before)
    for path in (place.out, *place.out.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_an_empty_folder_is_filled(place: Place) -> None:
    place.out.mkdir()
    unpack_archive(place.put(good("tar.xz")), place.out)
    assert files(place.out) == CONTENT


def test_progress_counts_what_is_read_and_what_is_written(place: Place) -> None:
    heard: list[tuple[int, int]] = []
    blob = good("tar.gz")
    unpack_archive(place.put(blob), place.out, progress=lambda *numbers: heard.append(numbers))
    total = sum(map(len, CONTENT.values()))
    assert heard[0] == (len(blob), len(blob))
    assert heard[-1] == (total, total)
    written = [done for done, of in heard if of == total]
    assert written == sorted(written)
    assert len(written) >= 5
    assert all(0 < done <= of for done, of in heard)


# The hash


@pytest.mark.parametrize("kind", KINDS)
def test_another_hash_is_refused_first(kind: str, place: Place) -> None:
    other = sha256(b"other")
    place.refuses(good(kind), f"its SHA-256 is {sha256(good(kind))}, not {other}", sha256=other)
    place.refuses(b"no archive at all", "its SHA-256 is", sha256=other)


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_byte_is_noticed(kind: str, place: Place) -> None:
    blob = good(kind)
    for at in (0, 300, len(blob) // 2, len(blob) - 1):
        flipped = blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]
        place.refuses(flipped, "its SHA-256 is", sha256=sha256(blob))


@pytest.mark.parametrize("wrong", ["", "abc", "g" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n", "sha256:" + "0" * 64])
def test_what_is_no_hash_is_said(wrong: str, place: Place) -> None:
    place.put(good("zip"))
    with pytest.raises(ValueError, match="is not a SHA-256: it must have 64 hexadecimal digits"):
        unpack_archive(place.archive, place.out, sha256=wrong)
    assert not place.out.exists()


def test_a_file_put_in_its_place_is_not_what_is_unpacked(place: Place) -> None:
    """Opened once: a swap after the hash has no effect."""
    evil = place.home / "evil"
    evil.write_bytes(zipped(("evil", b"evil")))

    def swap(done: int, of: int) -> None:
        if evil.exists():
            evil.replace(place.archive)

    blob = good("zip")
    place.put(blob)
    with pytest.raises(ValueError, match="changed while it was read"):  # its number of names is another
        unpack_archive(place.archive, place.out, sha256=sha256(blob), progress=swap)
    assert not place.out.exists()


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("moment", [1, 3, -1])
def test_a_change_under_way_is_noticed(kind: str, moment: int, place: Place) -> None:
    """Content, names or the end: whatever is written into the file after it was hashed."""
    blob, calls = good(kind), []
    unpack_archive(place.put(blob), place.out, progress=lambda *_: calls.append(1))
    shutil.rmtree(place.out)
    last, calls = len(calls), []

    def change(done: int, of: int) -> None:
        calls.append(1)
        if len(calls) == moment % (last + 1):
            with place.archive.open("r+b") as file:
                file.seek(blob.index(NOISE[:50]) + 1 if kind == "tar" else 200)
                file.write(b"!")

    with pytest.raises(ValueError, match=r"changed while|damaged"):
        unpack_archive(place.archive, place.out, sha256=sha256(blob), progress=change)
    assert sorted(path.name for path in place.home.iterdir()) == ["data.bin", "mine.txt"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_nothing_is_written_of_what_was_not_checked(kind: str, place: Place) -> None:
    """The members have other names when they come to be written."""
    first, second = (either(kind, (name, b"12345"), ("other", NOISE)) for name in ("good", "evil"))
    heard: list[int] = []

    def swap(done: int, of: int) -> None:
        heard.append(of)
        if len(heard) == 3:  # the hash, and two members
            place.archive.write_bytes(second)

    with pytest.raises(ValueError, match="changed while it was read"):
        unpack_archive(place.put(first), place.out, sha256=sha256(first), progress=swap)
    assert heard == [len(first)] * 3
    assert sorted(path.name for path in place.home.iterdir()) == ["data.bin", "mine.txt"]


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


# Where members go


ASTRAY = {
    "../../home/mine.txt": "leaves the folder",
    "../x": "leaves the folder",
    "a/../../x": "leaves the folder",
    "a/..": "leaves the folder",
    "..": "leaves the folder",
    "/tmp/x": "has an absolute path",
    "//x": "has an absolute path",
    "C:/x": "has a Windows path",
    "./c:x": "has a Windows path",
    "..\\x": "has a Windows path",
    "a\\b": "has a Windows path",
    "x" * 256: "has too long a name",
    "ü" * 128: "has too long a name",
    "/".join(["x" * 200] * 6): "has too long a name",
    "/".join(["x"] * 101): "is nested too deeply",
    ".": "has no file name",
}


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
@pytest.mark.parametrize("name", ASTRAY, ids=lambda name: name[:20])
def test_names_that_lead_astray(kind: str, name: str, place: Place) -> None:
    place.refuses(either(kind, ("good", b"1"), (name, b"evil"), ("last", b"2")), f"member '.*{ASTRAY[name]}")


def test_the_sentence_in_full(place: Place) -> None:
    place.put(either("tar.gz", ("../../etc/x", b"evil")))
    with pytest.raises(ValueError, match="leaves") as caught:
        unpack_archive(place.archive, place.out)
    assert str(caught.value) == "data.bin: member '../../etc/x' leaves the folder; nothing was unpacked"


def test_names_with_a_nul_and_none(place: Place) -> None:
    """zipfile and tarfile themselves cut names at a NUL, and write none."""
    blob = zipped(("goodX../x", b"1"))
    place.refuses(blob.replace(b"goodX..", b"good\0.."), "has a NUL in its name")
    place.refuses(tar(info("a", b"1", pax_headers={"path": "good\0../x"})), "has a NUL in its name")
    place.refuses(zipped(("x", b"1")).replace(b"x", b"\0"), "has a NUL in its name")
    place.refuses(tar(info("", b"1")), "has no name")


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a", "a"),
        ("a", "./a"),
        ("x/y", "x//y"),
        ("Dog.png", "dog.PNG"),
        ("straße", "STRASSE"),
        ("caf\u00e9", "cafe\u0301"),
        ("a", "a/b"),
        ("a/b", "a"),
        ("a/b/c", "a/b"),
        ("A", "a/b"),
        ("Photo/1", "photo/2"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_never_share_a_place(kind: str, first: str, second: str, place: Place) -> None:
    place.refuses(either(kind, ("other", b""), (first, b"1"), (second, b"2")), "has the same path as '.*'")


@pytest.mark.parametrize("first", [tarfile.DIRTYPE, tarfile.REGTYPE])
def test_a_folder_is_not_a_file_as_well(first: bytes, place: Place) -> None:
    second = tarfile.DIRTYPE if first == tarfile.REGTYPE else tarfile.REGTYPE
    place.refuses(tar(info("a", type=first), info("a", type=second)), "has the same path as 'a'")


# What members are


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (tarfile.SYMTYPE, "is a link"),
        (tarfile.LNKTYPE, "is a link"),
        (tarfile.CHRTYPE, "is neither a plain file nor a folder"),
        (tarfile.BLKTYPE, "is neither a plain file nor a folder"),
        (tarfile.FIFOTYPE, "is neither a plain file nor a folder"),
        (b"Z", "is neither a plain file nor a folder"),
    ],
)
@pytest.mark.parametrize("target", ["/", "..", "../mine.txt", "good"])
def test_a_tar_holds_files_and_folders(kind: bytes, match: str, target: str, place: Place) -> None:
    odd = info("odd", type=kind, linkname=target)
    place.refuses(tar(info("good", b"1"), odd, info("odd/x", b"through it")), f"member 'odd' {match}")
    place.refuses(tar(info("good", b"1"), odd), f"member 'odd' {match}")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (stat.S_IFLNK, "is a link"),
        (stat.S_IFIFO, "is neither"),
        (stat.S_IFCHR, "is neither"),
        (stat.S_IFSOCK, "is neither"),
    ],
)
def test_a_zip_holds_files_and_folders(kind: int, match: str, place: Place) -> None:
    odd = zipfile.ZipInfo("odd")
    odd.external_attr = (kind | 0o777) << 16
    place.refuses(zipped(("good", b"1"), (odd, b".."), ("odd/x", b"through it")), f"member 'odd' {match}")


def test_a_sparse_file_is_no_plain_file(place: Place) -> None:
    """It would unpack to more than the archive holds, and does so without any compression."""
    headers = {"major": "1", "minor": "0", "name": "x", "realsize": "9" * 12}
    content = b"1\n0\n1\n".ljust(512, b"\0") + b"!"
    member = info("x", content, pax_headers={f"GNU.sparse.{key}": value for key, value in headers.items()})
    place.refuses(tar(member), "is neither a plain file nor a folder")


@pytest.mark.parametrize("bit", [0x1, 0x40, 0x2000])
def test_encrypted_members_are_refused(bit: int, place: Place) -> None:
    blob = bytearray(zipped(("good", b"1"), ("secret", b"2")))
    at = blob.rindex(b"PK\x01\x02") + 8
    struct.pack_into("<H", blob, at, struct.unpack_from("<H", blob, at)[0] | bit)
    place.refuses(bytes(blob), "member 'secret' is encrypted")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_knows_no_bound_is_refused(method: int, place: Place) -> None:
    place.refuses(zipped(("x", bytes(1000)), method=method), f"is compressed by method {method}, not deflated")


def test_a_folder_of_a_zip_has_no_content(place: Place) -> None:
    place.refuses(zipped(("axb", b"1")).replace(b"axb", b"ab/"), "member 'ab/' is a folder with content")


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


# What is there already, and what is left


@pytest.mark.parametrize("what", ["file", "full", "link", "dangling", "above", "nowhere"])
def test_nothing_is_overwritten(what: str, place: Place) -> None:
    place.put(good("zip"))
    out = place.out
    if what == "file":
        out.write_text("mine")
    elif what == "full":
        out.mkdir()
        (out / ".hidden").touch()
    elif what == "link":
        (place.root / "empty").mkdir()
        out.symlink_to(place.root / "empty")
    elif what == "dangling":
        out.symlink_to(place.root / "none")
    else:
        out = place.home / "none" / ".." if what == "above" else place.home / "none" / "data"
    before = place.listing()
    with pytest.raises(ValueError, match=r"is not an empty folder: choose another|cannot create"):
        unpack_archive(place.archive, out)
    assert place.listing() == before


def test_what_is_no_file_is_said(place: Place) -> None:
    for path in (place.home / "none", place.home):
        with pytest.raises(ValueError, match="is not a file"):
            unpack_archive(path, place.out)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("stop"), OSError("disk full")])
@pytest.mark.parametrize("kind", ["zip", "tar.xz"])
def test_a_stop_in_the_middle_leaves_nothing(kind: str, error: BaseException | type, place: Place) -> None:
    total = sum(map(len, CONTENT.values()))
    for step in ("hash", "check", "write"):
        place.put(good(kind))
        before, calls = place.listing(), []

        def stop(done: int, of: int, step: str = step, calls: list[int] = calls) -> None:
            calls.append(of)
            if step == "write" and of == total and done > 5000:
                assert len(list(place.home.glob(f".data.{os.getpid()}.partial/PACS/**/*.png"))) > 0
                raise error
            if step == "hash" or (step == "check" and len(calls) == 4):
                raise error

        with pytest.raises(error if isinstance(error, type) else type(error)):
            unpack_archive(place.archive, place.out, progress=stop)
        assert place.listing() == before


def test_a_folder_that_appears_meanwhile_is_kept(place: Place) -> None:
    place.put(good("zip"))

    def fill(done: int, of: int) -> None:
        place.out.mkdir(exist_ok=True)
        (place.out / "other").touch()

    with pytest.raises(OSError, match="data"):
        unpack_archive(place.archive, place.out, progress=fill)
    assert [path.name for path in place.out.iterdir()] == ["other"]
    assert not list(place.home.glob(".*"))


def dead() -> int:
    """The number of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(place: Place) -> None:
    gone, alive = dead(), os.getppid()
    for name in (f".data.{gone}.partial", f".data.{os.getpid()}.partial"):
        (place.home / name / "deep").mkdir(parents=True)
        (place.home / name / "deep" / "half.png").touch()
    kept = [f".data.{alive}.partial", ".data.1.partial", f".data2.{gone}.partial", f".data.{gone}.partial.x"]
    kept += [".data.0.partial", ".data.-1.partial", ".data.x.partial", f".data.0{gone}.partial"]
    for name in kept:
        (place.home / name).mkdir()
        (place.home / name / "kept").touch()
    (place.home / f".da[t]a.{gone}.partial").mkdir()
    unpack_archive(place.put(good("zip")), place.out)
    assert {path.name for path in place.home.glob(".*")} == {*kept, f".da[t]a.{gone}.partial"}
    assert all((place.home / name / "kept").exists() for name in kept)


def test_a_process_of_somebody_else_is_alive(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        assert signal == 0
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    (place.home / ".data.77.partial").mkdir()
    unpack_archive(place.put(good("zip")), place.out)
    assert (place.home / ".data.77.partial").is_dir()


def test_leftovers_of_other_names_stay(place: Place) -> None:
    (place.home / f".data.{dead()}.partial").mkdir()
    unpack_archive(place.put(good("zip")), place.home / "d.ta")
    assert len(list(place.home.glob(".data.*.partial"))) == 1


def test_a_leftover_that_is_a_link_is_not_followed(place: Place) -> None:
    link = place.home / f".data.{dead()}.partial"
    link.symlink_to(place.root)
    unpack_archive(place.put(good("zip")), place.out)
    assert link.is_symlink()
    assert (place.root / "other.txt").exists()


def test_names_of_folders_by_default() -> None:
    names = ["pacs.zip", "x/PACS.tar.GZ", "v1.2.tgz", "a.b.tar.xz", "a.tar", "a.tar.bz2", "a.tbz", "a.zip.zip"]
    assert [str(folder_for(name)) for name in names] == ["pacs", "PACS", "v1.2", "a.b", "a", "a", "a", "a.zip"]
    for name in ("data", ".zip", "data.gz"):
        with pytest.raises(ValueError, match="give --out"):
            folder_for(name)
