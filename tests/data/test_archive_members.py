"""Archives with unsafe members: bad names, collisions, links, devices, encryption."""

import stat
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
from archive_files import Place, either, info, tar, zipped

from trueup.data.archives import unpack_archive


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


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
