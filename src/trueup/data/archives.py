"""Archives come out whole or not at all, and nothing in them reaches beyond the folder that they are given."""

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unicodedata import normalize

from trueup.atomic import is_alive

Progress = Callable[[int, int], None]
PIECE = 2**20  # bytes in memory at a time
FREE = 10 * 10**6  # bytes that any archive may unpack to: a small one of equal files shrinks a lot
HEADER = 2**16  # bytes that describe a member of a tar, at most
LONGEST, DEEPEST = 1024, 100  # bytes of a path, and its parts: every system can hold them, and remove them again
ENDINGS = re.compile(r"\.(zip|tar|tgz|tbz2?|txz|tar\.(gz|bz2|xz))$", re.IGNORECASE)
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
READABLE = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the others would fill memory without a bound
COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}


@dataclass(frozen=True)
class Limits:
    """What an archive may hold; more is a bomb, or a mistake."""

    members: int = 2_000_000
    """Files and folders."""
    size: int = 500 * 10**9
    """Bytes once unpacked; of a tar with its headers."""
    ratio: float = 200.0
    """Times the archive's own size; the first 10 MB are free."""

    def check(self, size: int, packed: int) -> None:
        """Refuse an archive of `packed` bytes that unpacks to `size`."""
        if size > self.size:
            raise _UnfitError(f"unpacks to more than {self.size:,} bytes{_TRUST}(size=...)")
        if size > max(FREE, self.ratio * packed):
            raise _UnfitError(f"unpacks to more than {self.ratio:g} times its size{_TRUST}(ratio=...)")


USUAL = Limits()
_TRUST = "; if you trust its maker, allow more with Limits"


@dataclass(frozen=True)
class Unpacked:
    """What came out, and the SHA-256 of the archive."""

    files: int
    bytes: int
    sha256: str


def unpack(
    archive: str | Path,
    out: str | Path,
    *,
    sha256: str | None = None,
    limits: Limits = USUAL,
    progress: Progress = lambda done, of: None,
) -> Unpacked:
    """Make the folder `out` of a .zip, .tar, .tar.gz, .tar.bz2 or .tar.xz; if anything is wrong there is no `out`.

    The hash is compared, then all members are checked, then they are written; `progress` hears of each step in bytes.
    """
    archive, out = Path(archive), Path(out).absolute()
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise ValueError(f"{sha256!r} is no SHA-256: it has 64 digits from 0 to f")
    if not archive.is_file():
        raise ValueError(f"{archive} is not a file")
    if not out.parent.is_dir():
        raise ValueError(f"{out} cannot be made: there is no folder {out.parent} for it")
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} is there already and is no empty folder: choose another --out")
    _tidy(out)
    with archive.open("rb") as handle:  # once, so that what is hashed is what is unpacked
        try:
            return _unpack(handle, out, sha256, limits, progress)
        except _UnfitError as error:
            raise ValueError(f"{archive.name}: {error}; nothing was unpacked") from error


def folder_for(archive: str | Path) -> Path:
    """The archive's name without its suffixes, in the current folder."""
    name = ENDINGS.sub("", Path(archive).name)
    if name in ("", Path(archive).name):
        raise ValueError(f"{archive} does not end like an archive, so it names no folder: say --out")
    return Path(name)


class _UnfitError(ValueError):
    """Why an archive is not unpacked; the sentence still lacks its name."""


class _Member(NamedTuple):
    name: str
    folder: bool
    size: int


Entries = Iterator[tuple[_Member, Iterator[bytes]]]


def _tidy(out: Path) -> None:
    """Remove what killed processes left half done; that of living ones stays."""
    left = re.compile(rf"\.{re.escape(out.name)}\.([1-9][0-9]{{,8}})\.partial")
    for folder in list(out.parent.iterdir()):
        match = left.fullmatch(folder.name)
        if match and not is_alive(int(match[1])) and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)


def _unpack(handle: BinaryIO, out: Path, sha256: str | None, limits: Limits, progress: Progress) -> Unpacked:
    before, hashed = os.fstat(handle.fileno()), hashlib.sha256()
    packed = before.st_size
    while piece := handle.read(PIECE):
        hashed.update(piece)
        progress(handle.tell(), packed)
    if sha256 is not None and (digest := hashed.hexdigest()) != sha256.lower():
        raise _UnfitError(f"its SHA-256 is {digest}, not {sha256.lower()}: it is damaged, or another file")
    tree, plan, total = _Tree(limits), [], 0
    for member, _ in _entries(handle, packed, limits):
        tree.add(member)
        plan.append(member)
        total += member.size
        limits.check(total, packed)
        progress(handle.tell(), packed)
    if total > (free := shutil.disk_usage(out.parent).free):
        raise _UnfitError(f"unpacks to {total:,} bytes, and {out.parent} has room for {free:,}")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(mode=0o755)
    try:
        for path, folder in sorted(tree.known.values()):  # a folder before what is in it
            if folder:
                (partial / path).mkdir(mode=0o755)
        _write(partial, plan, _entries(handle, packed, limits), progress)
        now = os.fstat(handle.fileno())
        if (now.st_mtime_ns, now.st_ctime_ns) != (before.st_mtime_ns, before.st_ctime_ns):
            raise _UnfitError("was changed while it was read")
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Unpacked(sum(not member.folder for member in plan), total, hashed.hexdigest())


def _write(root: Path, plan: list[_Member], entries: Entries, progress: Progress) -> None:
    """Write what was planned; bytes are counted as they come, whatever headers say."""
    done, total = 0, sum(member.size for member in plan)
    for member in plan:
        found, pieces = next(entries, (None, iter(())))
        if found != member:
            raise _UnfitError("was changed while it was read")
        if member.folder:
            continue
        place, left = root.joinpath(*_parts(member.name)), member.size
        place.touch(mode=0o644, exist_ok=False)
        with place.open("wb") as file:
            for piece in pieces:
                left -= len(piece)
                if left < 0:
                    break
                file.write(piece)
                progress(done := done + len(piece), total)
        more = "more" if left < 0 else "less"
        _refuse(member.name, {f"holds {more} than the {member.size:,} bytes that its header says": left})


class _Tree:
    """The paths of members and of the folders above them: each has a place of its own, on every system."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.members = limits, 0
        self.known: dict[str, tuple[str, bool]] = {}

    def add(self, member: _Member) -> None:
        """Take one more, or refuse it."""
        parts, folder = _parts(member.name), member.folder
        _refuse(member.name, {"names no file": not parts and not folder})
        while parts:
            path = "/".join(parts)
            there = self.known.setdefault(normalize("NFC", path.casefold()), (here := (path, folder)))
            if there is not here:
                _refuse(member.name, {f"would land where {there[0]!r} is already": there != here or not folder})
                break  # a folder that is known, and so are those above it
            parts, folder = parts[:-1], True
        self.members += 1
        if max(self.members, len(self.known)) > self.limits.members:
            raise _UnfitError(f"holds more than {self.limits.members:,} files and folders{_TRUST}(members=...)")


def _parts(name: str) -> list[str]:
    """Where a member goes, below the folder; one that would go elsewhere is refused."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    reasons = {
        "has no name": not name,
        "has a NUL in its name": "\0" in name,
        "has a path of Windows": "\\" in name or re.match("[A-Za-z]:", "".join(parts[:1])),
        "has an absolute path": name.startswith("/"),
        "leaves the folder": ".." in parts,
        "has too long a name": max(len(os.fsencode(name)) - LONGEST, *(len(os.fsencode(p)) - 255 for p in parts), 0),
        "lies below too many folders": len(parts) > DEEPEST,
    }
    _refuse(name, reasons)
    return parts


def _refuse(name: str, reasons: Mapping[str, object]) -> None:
    """Raise the first reason that holds."""
    for why, holds in reasons.items():
        if holds:
            raise _UnfitError(f"member {name[:120]!r} {why}")


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Readers raise whatever they like on damaged files."""
    try:
        yield
    except _UnfitError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _UnfitError(f"{what} is damaged or was cut off ({reason})") from error


def _entries(handle: BinaryIO, packed: int, limits: Limits) -> Entries:
    """All members in the archive's order, each with its content; the first bytes say what kind of archive it is."""
    handle.seek(0)
    head = handle.read(tarfile.BLOCKSIZE)
    handle.seek(0)
    if head.startswith(ZIP):
        return _zip_entries(handle)
    decompress = next((reader for magic, reader in COMPRESSED.items() if head.startswith(magic)), None)
    if decompress is not None:
        with _blaming("it"), decompress(handle) as file:
            head = file.read(tarfile.BLOCKSIZE)
        handle.seek(0)
    if head[257:262] != b"ustar":
        kind = "no archive" if decompress is None else "a single compressed file and no archive"
        raise _UnfitError(f"is {kind}; there are .zip, .tar, .tar.gz, .tar.bz2 and .tar.xz, by their content")
    return _tar_entries(_Stream(handle if decompress is None else decompress(handle), packed, limits))


def _zip_entries(handle: BinaryIO) -> Entries:
    with _blaming("it"):
        archive = zipfile.ZipFile(handle)
    for info in archive.infolist():
        name, kind = info.orig_filename, stat.S_IFMT(info.external_attr >> 16)
        reasons = {
            "is encrypted": info.flag_bits & 0x2041,
            "is a link": kind == stat.S_IFLNK,
            "is neither a file nor a folder": kind not in (0, stat.S_IFREG, stat.S_IFDIR),
            "is a folder with content": name.endswith("/") and info.file_size,
            f"is compressed by method {info.compress_type}, not deflated": info.compress_type not in READABLE,
        }
        _refuse(name, reasons)
        yield _Member(name, name.endswith("/"), info.file_size), _zip_pieces(archive, info)


def _zip_pieces(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    with _blaming(f"member {info.filename[:120]!r}"), archive.open(info) as file:
        while piece := file.read(PIECE):  # at its end the checksum is compared
            yield piece


def _tar_entries(stream: _Stream) -> Entries:
    with _blaming("it"):
        archive: Any = tarfile.TarFile(fileobj=stream)  # type: ignore[arg-type]
    while True:
        archive.members.clear()  # or memory grows with the archive
        archive.pax_headers.clear()
        stream.header = 0
        with _blaming("it"):
            info: tarfile.TarInfo | None = archive.next()
        if info is None:
            break
        reasons = {
            "is a link": info.issym() or info.islnk(),
            "is neither a plain file nor a folder": not (info.isreg() or info.isdir()) or info.issparse(),
            "has a negative size": info.size < 0,
        }
        _refuse(info.name, reasons)
        yield _Member(info.name, info.isdir(), 0 if info.isdir() else info.size), stream.pieces(info.size)
    if stream.last != bytes(tarfile.BLOCKSIZE):  # tarfile takes any nonsense for the end
        raise _UnfitError("is damaged or was cut off: its end is missing")
    if any(rest.strip(b"\0") for rest in stream.pieces(stream.limits.size)):  # a checksum comes last
        raise _UnfitError("is damaged: something follows its end")


class _Stream:
    """A tar's bytes, forwards only, as tarfile wants them; not too many."""

    def __init__(self, file: Any, packed: int, limits: Limits) -> None:
        self.file, self.packed, self.limits = file, packed, limits
        self.at, self.header, self.last = 0, 0, b""

    def tell(self) -> int:
        """How many were read."""
        return self.at

    def seek(self, position: int) -> None:
        """Go on to a position; never back, where a header with a negative size would lead for ever."""
        while self.at < position and self.piece(position - self.at):
            pass

    def read(self, size: int) -> bytes:
        """Bytes of a header."""
        self.header += size
        if size < 0 or self.header > HEADER:
            raise _UnfitError(f"is damaged: a header has more than {HEADER:,} bytes, or less than none")
        self.last = self.piece(size)
        return self.last

    def pieces(self, size: int) -> Iterator[bytes]:
        """The content of a file."""
        with _blaming("it"):
            while size and (piece := self.piece(size)):
                size -= len(piece)
                yield piece

    def piece(self, size: int) -> bytes:
        """Some bytes, as many as memory should hold at most."""
        data: bytes = self.file.read(min(size, PIECE))
        self.at += len(data)
        self.limits.check(self.at, self.packed)
        return data
