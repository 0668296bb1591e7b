"""Records: one JSON line per run, in a file that is only appended to. A line cut short by a kill is ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from trueup.atomic import single_writer

Record = dict[str, Any]
FILE = "records.jsonl"


class Entry(NamedTuple):
    """A cell of a published table: the printed number, and our runs for it."""

    paper: float | None = None
    deviation: float | None = None
    runs: tuple[tuple[int, str], ...] = ()  # seed and id of each run
    metric: str = "accuracy"
    parts: tuple[str, ...] = ()  # the columns that an average is taken over
    counted: float | None = None  # the number itself, for a cell without runs


def read_records(path: str | Path) -> list[Record]:
    """Return the complete records of a file, or of every records file below a folder; the last one of each run."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the folder of a sweep, or its {FILE}")
    files = sorted(path.rglob(FILE)) if path.is_dir() else [path]
    records: dict[str, Record] = {}
    for file in files:
        for line in file.read_bytes().splitlines():
            record = _parse(line)
            if record is not None and ("results" in record or "results" not in records.get(record["id"], {})):
                records[record["id"]] = record  # a failure never replaces a finished run
    return list(records.values())


def _parse(line: bytes) -> Record | None:
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("settings"), dict) and isinstance(record.get("id"), str):
            return record
    return None


def finished_records(path: str | Path) -> dict[str, Record]:
    """Return the records of finished runs, by id."""
    path = Path(path)
    return {r["id"]: r for r in read_records(path) if "results" in r} if path.exists() else {}


@contextmanager
def open_writer(path: str | Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open a records file, for one process at a time; yields a function that adds a record, safely on disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = f"another sweep is writing to {path}; wait for it, or choose another folder"
    with single_writer(path.with_name(f".{path.name}.lock"), busy), path.open("ab+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")  # a line cut short by a kill stays on its own

        def add(record: Mapping[str, Any]) -> None:
            file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

        yield add
