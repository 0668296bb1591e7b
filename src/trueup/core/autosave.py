"""Periodic state files in a folder, and resuming from the newest complete one."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trueup.atomic import is_alive
from trueup.core import files
from trueup.core.saving import from_file
from trueup.validate import check_int

if TYPE_CHECKING:
    from trueup.core.lifecycle import AdapterBase

log = logging.getLogger("trueup")

_NAME = re.compile(r"state-(\d{10})\.safetensors")
_PARTIAL = re.compile(r"\.state-\d{10}\.safetensors\.(\d+)\.partial")


@dataclass
class Autosave:
    """A writer of periodic states; a folder is for one adapter."""

    folder: Path
    every: int
    keep: int
    waiting: int = 0
    """Batches since the last state was written."""

    def __post_init__(self) -> None:
        check_int("every", self.every, 1)
        check_int("keep", self.keep, 1)
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            partial = _PARTIAL.fullmatch(path.name)
            if partial and not is_alive(int(partial[1])):
                path.unlink(missing_ok=True)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave nothing in a copy of the adapter: two must not write to one folder."""
        return type(None), ()

    def resume(self, adapter: AdapterBase) -> bool:
        """Load the newest complete state, if there is one; a state of another model or method is an error."""
        for path in reversed(self.states()):
            try:
                content = files.read(path)
            except ValueError as error:
                log.warning("%s; trying the one before it", error)
                continue
            from_file(adapter, *content, path)
            return True
        return False

    def states(self) -> list[Path]:
        """Return the states in the folder, the oldest first."""
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def after_batch(self, adapter: AdapterBase) -> None:
        """Write a state if one is due. An error of the file system is logged, and the next batch tries again."""
        self.waiting += 1
        if self.waiting < self.every:
            return
        try:
            self.write(adapter)
        except OSError as error:
            log.error("the state could not be written to %s: %s", self.folder, error)

    def write(self, adapter: AdapterBase) -> Path:
        """Write a state now, and delete all but the newest `keep`."""
        states = self.states()
        number = 1 + (int(states[-1].name[6:16]) if states else 0)
        path = self.folder / f"state-{number:010d}.safetensors"
        adapter.save(path)
        self.waiting = 0
        for old in [*states, path][: -self.keep]:
            old.unlink(missing_ok=True)
        return path
