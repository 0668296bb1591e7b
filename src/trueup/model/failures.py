"""Whose error it is when a model fails: its own, or one about an input that does not fit."""

from __future__ import annotations

import dis
import re
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent / "_")[:-1]  # with a separator at its end: torchvision is another
_INPUT = re.compile(r"shape|\bsizes?\b|\bchannels?\b|\bdimensions?\b|\bdtype\b|\bheight\b|\bwidth\b", re.IGNORECASE)


def raised_by_model(error: Exception) -> bool:
    """Return whether an error is the model's own and must reach the user as it is.

    It is if a `raise` or `assert` outside of torch made it, unless it is a plain RuntimeError, IndexError or
    AssertionError that speaks of the input: of shape, size, channels, dimensions, height, width or dtype. A failing
    operation of torch has no `raise` in Python, or one in torch's own files.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if dis.opname[code.co_code[trace.tb_lasti]] != "RAISE_VARARGS" or code.co_filename.startswith(_TORCH):
        return False
    plain = type(error) in (RuntimeError, IndexError, AssertionError)
    return not (plain and _INPUT.search(str(error)))
