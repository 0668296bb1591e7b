"""Archives made in memory, good and bad, and a folder to unpack them in."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from trueup.data.archives import unpack_archive

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
