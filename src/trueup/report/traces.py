"""What happened along a stream, image by image: the `.npz` files that records name, read without pickle."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.report.record_rows import Record

Trace = Mapping[str, NDArray[Any]]
LARGEST = 2**28  # bytes of all arrays; a file that asks for more is not one of ours


class Traces:
    """The traces below a folder of records, each read when it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        root = folder if folder.is_dir() else folder.parent
        self.files = {path.stem: path for path in sorted(root.rglob("traces/*.npz"))}

    def __call__(self, record: Record) -> Trace | None:
        """The trace of a run; None if it has none, or one that cannot be read."""
        path = self.files.get(str(record.get("id")))
        if path is None or "trace" not in record:
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                if sum(member.file_size for member in archive.infolist()) > LARGEST:
                    return None
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (Exception, MemoryError):  # a damaged file fails in many ways, and costs its figures alone
            return None
