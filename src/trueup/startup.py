"""Ctrl-C during startup: importing torch takes seconds, and an interrupted import ends in a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

INTERRUPTED = 130  # the shells' exit status for SIGINT
COMMANDS = ("trueup", "trueup.exe")


def is_command() -> bool:
    """Return True if this process is the `trueup` command or `python -m trueup`, not a program that imports trueup."""
    if parent_process() is not None:  # a worker of the command, which has the command's arguments
        return False
    return ("-m", "trueup") in pairwise(sys.orig_argv) or Path((sys.argv or [""])[0]).name in COMMANDS


@contextmanager
def interruptible(active: bool) -> Iterator[None]:
    """End the process quietly on Ctrl-C while the block runs, if `active`.

    The process ends at once instead of raising KeyboardInterrupt: extension modules turn that into errors of their own,
    and there is nothing to clean up yet.
    """
    if not active:
        yield
        return
    before = signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(*_: Any) -> None:
    os.write(2, b"Stopped before anything was done.\n")
    os._exit(INTERRUPTED)
