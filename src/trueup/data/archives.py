"""Safe unpacking of archives: everything or nothing, and never outside the given folder.

tarfile's `data` filter is not enough here: it drops the slash of an absolute path and allows links, and zips have none.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import re
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unicodedata import normalize

from trueup.atomic import is_alive

Progress = Callable[[int, int], None]
CHUNK = 2**20  # bytes in memory at a time
FREE = 10 * 10**6  # bytes that every archive may unpack to: small archives of equal files compress well
HEADER = 2**16  # bytes of one member's headers in a tar
LONGEST, DEEPEST = 1024, 100  # bytes and parts of a path that every system can create and remove
ENDINGS = re.compile(r"\.(zip|tar|tgz|tbz2?|txz|tar\.(gz|bz2|xz))$", re.IGNORECASE)
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
READABLE = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # zipfile decompresses the others without a memory bound
COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_CHANGED = "changed while it was read"
_TRUST = "; if you trust its maker, allow more with Limits"


class _RefusedError(ValueError):
    """The reason why an archive is refused, without its name."""


class _Member(NamedTuple):
    name: str
    folder: bool
    size: int


Members = Iterator[tuple[_Member, Iterator[bytes]]]
Paths = dict[str, tuple[str, bool]]  # by folded name: the path, and True for a folder


@dataclass(frozen=True)
class Limits:
    """Size limits against archive bombs."""

    members: int = 2_000_000
    """Files and folders."""
    size: int = 500 * 10**9
    """Unpacked bytes; for a tar including its headers."""
    ratio: float = 200.0
    """Unpacked size as a multiple of the archive's size; the first 10 MB are free."""

    def check(self, size: int, packed: int) -> None:
        """Refuse an archive of `packed` bytes that unpacks to `size` bytes."""
        if size > self.size:
            raise _RefusedError(f"unpacks to more than {self.size:,} bytes{_TRUST}(size=...)")
        if size > max(FREE, self.ratio * packed):
            raise _RefusedError(f"unpacks to more than {self.ratio:g} times its size{_TRUST}(ratio=...)")


USUAL = Limits()


@dataclass(frozen=True)
class Unpacked:
    """The number and size of the unpacked files, and the archive's SHA-256."""

    files: int
    bytes: int
    sha256: str


def unpack_archive(
    archive: str | Path, out: str | Path, *, sha256: str | None = None, limits: Limits = USUAL,
    progress: Progress = lambda done, of: None,
) -> Unpacked:  # fmt: skip
    """Unpack a .zip, .tar, .tar.gz, .tar.bz2 or .tar.xz into the new folder `out`; on any error there is no `out`.

    The hash is compared, then all members are checked, then they are written; `progress` gets the bytes of each step.
    """
    archive, out = Path(archive), Path(out).absolute()
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise ValueError(f"{sha256!r} is not a SHA-256: it must have 64 hexadecimal digits")
    if not archive.is_file():
        raise ValueError(f"{archive} is not a file")
    if not out.parent.is_dir():
        raise ValueError(f"cannot create {out}: there is no folder {out.parent}")
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} exists and is not an empty folder: choose another --out")
    _remove_leftovers(out)
    with archive.open("rb") as handle:  # opened once, so the hashed file is the unpacked file
        try:
            return _unpack(handle, out, sha256, limits, progress)
        except _RefusedError as error:
            raise ValueError(f"{archive.name}: {error}; nothing was unpacked") from error


def folder_for(archive: str | Path) -> Path:
    """Return the archive's name without its suffixes, as a folder in the current one."""
    name = ENDINGS.sub("", Path(archive).name)
    if name in ("", Path(archive).name):
        raise ValueError(f"{archive} does not end like an archive, so the folder has no name: give --out")
    return Path(name)


def _remove_leftovers(out: Path) -> None:
    """Remove partial folders of processes that are dead."""
    partial = re.compile(rf"\.{re.escape(out.name)}\.([1-9][0-9]{{,8}})\.partial")
    for folder in list(out.parent.iterdir()):
        match = partial.fullmatch(folder.name)
        if match and not is_alive(int(match[1])) and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)


def _unpack(handle: BinaryIO, out: Path, sha256: str | None, limits: Limits, progress: Progress) -> Unpacked:
    before, hashed = os.fstat(handle.fileno()), hashlib.sha256()
    packed = before.st_size
    while chunk := handle.read(CHUNK):
        hashed.update(chunk)
        progress(handle.tell(), packed)
    if sha256 is not None and (digest := hashed.hexdigest()) != sha256.lower():
        raise _RefusedError(f"its SHA-256 is {digest}, not {sha256.lower()}: it is damaged, or another file")
    members, paths, total = list[_Member](), Paths(), 0
    for member, _ in _members(handle, packed, limits):
        _add_paths(paths, member)
        members.append(member)
        if max(len(members), len(paths)) > limits.members:
            raise _RefusedError(f"holds more than {limits.members:,} files and folders{_TRUST}(members=...)")
        total += member.size
        limits.check(total, packed)
        progress(handle.tell(), packed)
    if total > (free := shutil.disk_usage(out.parent).free):
        raise _RefusedError(f"unpacks to {total:,} bytes, and {out.parent} has {free:,} free")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(mode=0o755)
    try:
        for path, folder in sorted(paths.values()):  # a folder before its content
            if folder:
                (partial / path).mkdir(mode=0o755)
        _write(partial, members, _members(handle, packed, limits), lambda done: progress(done, total))
        after = os.fstat(handle.fileno())
        if (after.st_mtime_ns, after.st_ctime_ns) != (before.st_mtime_ns, before.st_ctime_ns):
            raise _RefusedError(_CHANGED)
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Unpacked(sum(not member.folder for member in members), total, hashed.hexdigest())


def _write(root: Path, checked: list[_Member], members: Members, progress: Callable[[int], None]) -> None:
    """Write the members that were checked; each must have as many bytes as its header says."""
    done = 0
    for member in checked:
        found, content = next(members, (None, iter(())))
        if found != member:
            raise _RefusedError(_CHANGED)
        if member.folder:
            continue
        path, left = root.joinpath(*_safe_parts(member.name)), member.size
        path.touch(mode=0o644, exist_ok=False)
        with path.open("wb") as file:
            for chunk in content:
                left -= len(chunk)
                if left < 0:
                    break
                file.write(chunk)
                progress(done := done + len(chunk))
        more = "more" if left < 0 else "less"
        _refuse_if(member.name, {f"holds {more} than the {member.size:,} bytes that its header says": left})


def _add_paths(paths: Paths, member: _Member) -> None:
    """Add the path of a member and the folders above it; no two may share one, on any file system."""
    parts, folder = _safe_parts(member.name), member.folder
    _refuse_if(member.name, {"has no file name": not parts and not folder})
    while parts:
        path = "/".join(parts)
        there = paths.setdefault(normalize("NFC", path.casefold()), (here := (path, folder)))
        if there is not here:
            _refuse_if(member.name, {f"has the same path as {there[0]!r}": there != here or not folder})
            break  # a known folder: those above it are known, too
        parts, folder = parts[:-1], True


def _safe_parts(name: str) -> list[str]:
    """Split a member's name into path parts; refuse a name that leads elsewhere."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    reasons = {
        "has no name": not name,
        "has a NUL in its name": "\0" in name,
        "has a Windows path": "\\" in name or re.match("[A-Za-z]:", "".join(parts[:1])),
        "has an absolute path": name.startswith("/"),
        "leaves the folder": ".." in parts,
        "has too long a name": len(os.fsencode(name)) > LONGEST or any(len(os.fsencode(p)) > 255 for p in parts),
        "is nested too deeply": len(parts) > DEEPEST,
    }
    _refuse_if(name, reasons)
    return parts


def _refuse_if(name: str, reasons: dict[str, Any]) -> None:
    """Raise the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise _RefusedError(f"member {name[:120]!r} {reason}")


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn any error of a library that reads damaged files into a refusal."""
    try:
        yield
    except _RefusedError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _RefusedError(f"{what} is damaged or was cut off ({reason})") from error


def _members(handle: BinaryIO, packed: int, limits: Limits) -> Members:
    """Yield all members in the archive's order; the first bytes tell the kind of archive."""
    with _reading("it"):
        handle.seek(0)
        head = handle.read(tarfile.BLOCKSIZE)
        handle.seek(0)
        if head.startswith(ZIP):
            yield from _zip_members(zipfile.ZipFile(handle))
            return
        decompress = next((reader for magic, reader in COMPRESSED.items() if head.startswith(magic)), None)
        file = handle if decompress is None else decompress(handle)
        head = file.read(tarfile.BLOCKSIZE)
        file.seek(0)
        if head[257:262] != b"ustar":
            kind = "not an archive" if decompress is None else "a single compressed file, not an archive"
            raise _RefusedError(f"is {kind}; its content must be a .zip, .tar, .tar.gz, .tar.bz2 or .tar.xz")
        yield from _tar_members(_TarStream(file, packed, limits))


def _zip_members(archive: zipfile.ZipFile) -> Members:
    for info in archive.infolist():
        name, kind = info.orig_filename, stat.S_IFMT(info.external_attr >> 16)
        reasons = {
            "is encrypted": info.flag_bits & 0x2041,
            "is a link": kind == stat.S_IFLNK,
            "is neither a file nor a folder": kind not in (0, stat.S_IFREG, stat.S_IFDIR),
            "is a folder with content": name.endswith("/") and info.file_size,
            f"is compressed by method {info.compress_type}, not deflated": info.compress_type not in READABLE,
        }
        _refuse_if(name, reasons)
        yield _Member(name, name.endswith("/"), info.file_size), _zip_chunks(archive, info)


def _zip_chunks(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    with _reading(f"member {info.filename[:120]!r}"), archive.open(info) as file:
        while chunk := file.read(CHUNK):  # the last read compares the checksum
            yield chunk


def _tar_members(stream: _TarStream) -> Members:
    archive: Any = tarfile.TarFile(fileobj=stream)  # type: ignore[arg-type]
    while info := archive.next():
        reasons = {
            "is a link": info.issym() or info.islnk(),
            "is neither a plain file nor a folder": not (info.isreg() or info.isdir()) or info.issparse(),
            "has a negative size": info.size < 0,
        }
        _refuse_if(info.name, reasons)
        yield _Member(info.name, info.isdir(), 0 if info.isdir() else info.size), stream.chunks(info.size)
        archive.members.clear()  # or memory grows with the archive
        archive.pax_headers.clear()
        stream.header = 0
    if stream.last != bytes(tarfile.BLOCKSIZE):  # tarfile stops silently at a damaged header
        raise _RefusedError("is damaged or was cut off: its end is missing")
    if any(rest.strip(b"\0") for rest in stream.chunks(stream.limits.size)):  # reads on to the compressor's checksum
        raise _RefusedError("is damaged: there is data after its end")


class _TarStream:
    """The bytes of a tar as tarfile reads them: forwards only, within the limits."""

    def __init__(self, file: Any, packed: int, limits: Limits) -> None:
        self.file, self.packed, self.limits = file, packed, limits
        self.at, self.header, self.last = 0, 0, b""

    def tell(self) -> int:
        """Return the number of bytes read."""
        return self.at

    def seek(self, position: int) -> None:
        """Skip to a later position; never back, where a negative size would loop for ever."""
        for _ in self.chunks(position - self.at):
            pass

    def read(self, size: int) -> bytes:
        """Read bytes of a header."""
        self.header += size
        if size < 0 or self.header > HEADER:
            raise _RefusedError(f"is damaged: a header has a negative size, or more than {HEADER:,} bytes")
        self.last = b"".join(self.chunks(size))
        return self.last

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes, fewer if the tar ends."""
        with _reading("it"):
            while size > 0 and (chunk := self.file.read(min(size, CHUNK))):
                size -= len(chunk)
                self.at += len(chunk)
                self.limits.check(self.at, self.packed)
                yield chunk
