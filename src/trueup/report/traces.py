"""Traces: the `.npz` files, named by records, with one entry per image of a stream. Read without pickle."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.report.variants import Record

Trace = Mapping[str, NDArray[Any]]
LARGEST = 2**28  # bytes of all arrays; the library writes no larger file


class Traces:
    """The traces below a folder of records, each read on demand."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        root = folder if folder.is_dir() else folder.parent
        self.files = {path.stem: path for path in sorted(root.rglob("traces/*.npz"))}

    def __call__(self, record: Record) -> Trace | None:
        """Return the trace of a run; None if it has none, or a damaged one."""
        path = self.files.get(str(record.get("id")))
        if path is None or "trace" not in record:
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                if sum(member.file_size for member in archive.infolist()) > LARGEST:
                    return None
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (Exception, MemoryError):  # a damaged file fails in many ways, and only its figures are lost
            return None
