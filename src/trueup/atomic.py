"""Files that are whole or not there."""

import os
from pathlib import Path


def put(path: Path, blob: bytes) -> None:
    """Put a file in its place once it is safe on disk; the old one stays until then."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
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


def alive(process: int) -> bool:
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
