"""Atomic writes, locks, and file names that fit the file system."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_atomic(path: Path, blob: bytes, *, private: bool = False) -> None:
    """Write a file that is complete or absent; the old one stays until the new one is safely on disk.

    private: readable by the owner only, from the first byte on; otherwise the umask decides.
    """
    end = f".{os.getpid()}.partial"
    partial = path.with_name(shorten_name(f".{path.name}{end}", end, longest_name(path.parent)))
    partial.unlink(missing_ok=True)  # an existing file would keep its mode
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


@contextmanager
def single_writer(lock_file: Path, message: str) -> Iterator[None]:
    """Hold a lock inside the block; raise a ValueError with the message if another process holds it.

    The lock ends with its process, even if that is killed; the file stays. A drive without locks is not protected.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file)
    with suppress(OSError, NotImplementedError):
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(message) from error
    try:
        yield
    finally:
        lock.release()


def longest_name(folder: Path) -> int:
    """Return how many bytes a name may have in a folder, which need not exist yet."""
    existing = next((each for each in (folder, *folder.absolute().parents) if each.exists()), Path())
    try:
        return os.pathconf(existing, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # Windows has no pathconf
        return 255


def shorten_name(path: str, end: str, longest: int) -> str:
    """Shorten the last name of a path to `longest` bytes: its start, a hash of the whole name, and `end`."""
    folder, slash, name = path.rpartition("/")
    if len(os.fsencode(name)) <= longest:
        return path
    mark = f"~{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}{end}"
    start = os.fsencode(name)[: max(0, longest - len(os.fsencode(mark)))]
    return f"{folder}{slash}{start.decode('utf-8', 'ignore')}{mark}"


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)


def is_alive(process: int) -> bool:
    """Return True if another process has this id; on Windows, where it cannot be asked safely, always True."""
    if process == os.getpid():
        return False
    try:
        if os.name != "nt":  # signal 0 would end the process there
            os.kill(process, 0)
    except OSError as error:  # also if the process is another user's
        return not isinstance(error, ProcessLookupError)
    return True
