"""The folder scanner of all commands: it lists files, and names the entries that it skips.

Hidden files and files of operating systems are ignored silently. Links to files and folders are followed. Skipped and
named are broken and circular links, links back into a scanned folder, named pipes, sockets, devices, and folders that
cannot be read. None of them stops a scan, and none is opened.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

log = logging.getLogger("trueup")

JUNK = ("__MACOSX", ".DS_Store")
KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
LINKS = {errno.ELOOP: "a circular link", errno.ENOENT: "a broken link"}
UNREADABLE = "cannot be read"
BACK = "a link back into a scanned folder"
Entry = os.DirEntry[str]


class FolderScan:
    """A scan below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.skipped: dict[str, str] = {}  # the reason for each skipped entry, by its path below the root
        self._scanned = [Path(os.path.realpath(root))]

    def list_folder(self, folder: Path) -> tuple[list[Entry], list[Entry]]:
        """Return the folders and the regular files in a folder, each sorted by name."""
        folders, files = list[Entry](), list[Entry]()
        here = Path(os.path.realpath(folder))
        for entry, is_folder in self._entries(folder):
            if is_folder and entry.is_symlink() and here.is_relative_to(os.path.realpath(entry.path)):
                self._skip(entry, BACK)
            else:
                (folders if is_folder else files).append(entry)
        return folders, files

    def walk(self, leave: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
        """Yield all files below the root, sorted by name; `leave` is True for folders to ignore."""
        return self._walk(self.root, leave, (self._scanned[0],))

    def _walk(self, folder: Path, leave: Callable[[Path], bool], above: tuple[Path, ...]) -> Iterator[Path]:
        """Yield the files below a folder; `above`: the root, and the targets of the links that led to the folder."""
        for entry, is_folder in self._entries(folder):
            path = Path(entry.path)
            if not is_folder:
                yield path
            elif not leave(path) and self._enters(entry, above):
                linked = (Path(os.path.realpath(path)),) if entry.is_symlink() else ()
                yield from self._walk(path, leave, (*above, *linked))

    def _entries(self, folder: Path) -> list[tuple[Entry, bool]]:
        """List the usable entries of a folder, sorted by name, each with True if it is a folder."""
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            if folder == self.root:
                raise ValueError(f"{folder} cannot be read: {error.strerror}") from error
            self._skip(folder, f"{UNREADABLE}: {error.strerror}")
            return []
        usable = []
        for entry in entries:
            if entry.name.startswith(".") or entry.name in JUNK:
                continue
            try:
                if entry.is_dir() or entry.is_file():
                    usable.append((entry, entry.is_dir()))
                else:
                    mode = entry.stat().st_mode
                    self._skip(entry, next((name for test, name in KINDS if test(mode)), "a device"))
            except OSError as error:
                self._skip(entry, LINKS.get(error.errno or 0, f"{UNREADABLE}: {error.strerror}"))
        return usable

    def _enters(self, entry: Entry, above: tuple[Path, ...]) -> bool:
        """Return True if a folder is to be scanned; each is scanned once, even if several links lead to it."""
        target = Path(os.path.realpath(entry.path))
        if not entry.is_symlink():
            if target in self._scanned:
                self._skip(entry, "already scanned through a link")
            return target not in self._scanned
        # A link to a folder above the current one would never end. A link above a finished one still has new files.
        if any(target.is_relative_to(known) for known in self._scanned) or any(
            known.is_relative_to(target) for known in above
        ):
            self._skip(entry, BACK)
            return False
        self._scanned.append(target)
        return True

    def _skip(self, entry: Entry | Path, why: str) -> None:
        self.skipped[os.path.relpath(entry, self.root)] = why


def log_skipped(name: str, skipped: Mapping[str, str]) -> None:
    """Log the skipped entries in one line, once; worker processes log nothing."""
    if skipped and multiprocessing.parent_process() is None:
        log_once(f"{name}: left out {describe_skipped(skipped)}")


@cache
def log_once(line: str) -> None:
    """Log a warning, unless this process has logged it before."""
    log.warning("%s", line)


def find_skipped(root: Path) -> dict[str, str]:
    """Scan a folder and return the skipped entries with the reasons."""
    scan = FolderScan(root)
    for _ in scan.walk():
        pass
    return scan.skipped


def describe_skipped(skipped: Mapping[str, str]) -> str:
    """Return the first skipped entries with the reasons, and the number of the others."""
    return first_names(f"{name} ({why})" for name, why in skipped.items())


def first_names(names: Iterable[str], most: int = 5) -> str:
    """Return the first names, and the number of the others."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
