"""Journals of overwritten rows, so that a batch can be undone without copying a whole memory."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Journal:
    """The old values of rows that were overwritten, in order."""

    def __init__(self) -> None:
        self._entries: list[tuple[Tensor, Any, Tensor]] = []

    def record(self, tensor: Tensor, rows: Any) -> None:
        """Copy rows of a tensor before they are overwritten in place."""
        self._entries.append((tensor, rows, tensor[rows].clone()))

    @torch.no_grad()
    def undo(self) -> None:
        """Restore all old values, the newest first; call again if interrupted."""
        for tensor, rows, values in reversed(self._entries):
            tensor[rows] = values
        self._entries.clear()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy as an empty journal: a copy has nothing to undo."""
        return Journal, ()


class Journaled(nn.Module):
    """A module with large buffers that are overwritten row by row.

    Before it overwrites rows of a buffer in `large`, it calls `record`. A buffer may also be replaced by a new tensor.
    """

    large: ClassVar[tuple[str, ...]] = ()
    journal: Journal | None = None
    """Set for the duration of a batch that may have to be undone."""

    def record(self, tensor: Tensor, rows: Any) -> None:
        """Record rows of a tensor before they are overwritten, if there is a journal."""
        if self.journal is not None:
            self.journal.record(tensor, rows)
