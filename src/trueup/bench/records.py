"""Records: one JSON line per run, in a file that only grows. A line that a kill cut short does not count."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]
FILE = "records.jsonl"


class Entry(NamedTuple):
    """A cell of a published table: what was printed there, and the runs that it is made of here."""

    paper: float | None = None
    deviation: float | None = None
    runs: tuple[tuple[int, str], ...] = ()
    """Seed and id of each."""
    metric: str = "accuracy"
    parts: tuple[str, ...] = ()
    """Of an average: the columns that it is over."""
    counted: float | None = None
    """Of what needs no runs: the number itself."""


UNSTEADY = ("cost", "finished")  # what differs between two runs of the same settings


def read_records(path: str | Path) -> list[Record]:
    """All whole records of a file, or of every records file below a folder; of one run only the last."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the folder of a sweep, or its {FILE}")
    files = sorted(path.rglob(FILE)) if path.is_dir() else [path]
    records: dict[str, Record] = {}
    for file in files:
        for line in file.read_bytes().splitlines():
            record = _parse(line)
            if record is not None and ("results" in record or "results" not in records.get(record["id"], {})):
                records[record["id"]] = record  # a failure never takes the place of a finished run
    return list(records.values())


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and isinstance(record.get("id"), str) and isinstance(record.get("settings"), dict)
    return record if whole else None


def finished_records(path: str | Path) -> dict[str, Record]:
    """The records of runs that came to an end, by id."""
    path = Path(path)
    return {r["id"]: r for r in read_records(path) if "results" in r} if path.exists() else {}


def reproducible_part(record: Mapping[str, Any]) -> Record:
    """A record without what differs from run to run: time and memory."""
    return {key: value for key, value in record.items() if key not in UNSTEADY}


@contextmanager
def open_writer(path: str | Path) -> Iterator[Writer]:
    """Append records to a file; one process at a time."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows: no lock, so the user takes care
            pass
        except OSError as error:
            raise ValueError(f"another sweep is writing to {path}; wait for it, or choose another folder") from error
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")  # what a kill cut short stays a line of its own
        yield Writer(file)


class Writer:
    """Adds records, each safely on disk before the next."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        self.file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
