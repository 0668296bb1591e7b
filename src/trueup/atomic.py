"""Files that are whole or not there, and names that a file system takes."""

import hashlib
import os
from pathlib import Path


def write_atomic(path: Path, blob: bytes, *, private: bool = False) -> None:
    """Put a file in its place once it is safe on disk; the old one stays until then.

    private: only its owner may read it, from the first byte on; else the user's umask decides.
    """
    end = f".{os.getpid()}.partial"
    partial = path.with_name(shorten_name(f".{path.name}{end}", end, longest_name(path.parent)))
    partial.unlink(missing_ok=True)  # opening a file that is there would keep its mode
    try:
        with open(partial, "wb", opener=_owner_only if private else None) as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def longest_name(folder: Path) -> int:
    """Return how many bytes a name may have in a folder, which need not be there yet."""
    there = next((place for place in (folder, *folder.absolute().parents) if place.exists()), Path())
    try:
        return os.pathconf(there, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # Windows has no such question
        return 255


def shorten_name(path: str, end: str, longest: int) -> str:
    """Shorten the last name of a path to so many bytes: its beginning, a hash of all of it, and its end, `end`."""
    folder, slash, name = path.rpartition("/")
    if len(os.fsencode(name)) <= longest:
        return path
    mark = f"~{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}{end}"
    start = os.fsencode(name)[: max(0, longest - len(os.fsencode(mark)))]
    return f"{folder}{slash}{start.decode('utf-8', 'ignore')}{mark}"


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)


def is_alive(process: int) -> bool:
    """Whether another process has this number; where one cannot ask without doing harm, it counts as alive."""
    if process == os.getpid():
        return False
    if os.name == "nt":  # there, signal 0 does not only ask
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
