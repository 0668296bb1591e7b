"""State files: safetensors with a header and a SHA-256 over every byte, written atomically."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup.atomic import write_atomic

_BLANK = b"0" * 64


class ForeignFileError(ValueError):
    """A file that is not a trueup state file, or was cut off."""


def write(
    path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], kind: str = "adapter",
    private: bool = False,
) -> None:  # fmt: skip
    """Write a file atomically: the old one stays until the new one is complete.

    private: only the owner may read it.
    """
    from safetensors.torch import save

    path = Path(path)
    metadata = {"format": f"trueup-{kind}-1", "header": json.dumps(header), "sha256": _BLANK.decode()}
    blob = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, metadata)
    blob = blob.replace(_BLANK, hashlib.sha256(blob).hexdigest().encode(), 1)
    write_atomic(path, blob, private=private)


def read(path: str | Path, kind: str = "adapter") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and header of a file that `write` made of this kind; raise ValueError for anything else."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    blob = Path(path).read_bytes()
    try:
        length = int.from_bytes(blob[:8], "little")
        metadata = json.loads(blob[8 : 8 + length])["__metadata__"]
        found, digest = metadata["format"], metadata["sha256"].encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ForeignFileError(f"{path} is not a trueup state file (kind {kind!r}), or was cut off") from error
    if found != f"trueup-{kind}-1":
        raise ValueError(f"{path} has the format {found!r}; this version reads 'trueup-{kind}-1'")
    if hashlib.sha256(blob.replace(digest, _BLANK, 1)).hexdigest().encode() != digest:
        raise ValueError(f"{path} was altered or cut off: its SHA-256 does not match its content")
    try:
        tensors, header = load(blob), json.loads(metadata["header"])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} cannot be read: its header is a {type(header).__name__}")
    return tensors, header


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(flat.view(dtype=torch.uint8).numpy().data)
    return total.hexdigest()
