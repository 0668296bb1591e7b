"""CIFAR-10-C and CIFAR-100-C in the published .npy layout, and the clean training sets in the binary layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trueup.data.datasets.folders import short_hash
from trueup.data.domains import ArrayDomain, Domain, Image, Labels, parse_corruption

ROWS = 10_000  # per severity
BYTES = 3 * 32 * 32


def cifar_class_names(name: str, root: Path) -> tuple[str, ...]:
    """Return the names of the classes, from the clean set's list if it exists."""
    folder, lists, n = _clean(name, root)
    file = folder / lists
    if file.is_file():
        return tuple(file.read_text().split())[:n]
    return tuple(f"class {i}" for i in range(n))


def cifar_domain(name: str, root: Path, which: str) -> Domain:
    """Return the clean training set ("clean"), or a corruption at a severity ("fog-3")."""
    if which == "clean":
        images, labels = read_clean(name, root)
        return ArrayDomain("clean", images, labels)
    corruption, severity = parse_corruption(which)
    images, labels = read_corrupted(name, root, corruption)
    rows = slice((severity - 1) * ROWS, severity * ROWS)
    return ArrayDomain(which, images[rows], labels[rows])


def read_corrupted(name: str, root: Path, corruption: str) -> tuple[Image, Labels]:
    """Return all five severities of a corruption; the images are mapped from disk."""
    images = _array(root / f"{corruption}.npy")
    labels = _array(root / "labels.npy")
    if images.shape != (5 * ROWS, 32, 32, 3) or images.dtype != np.uint8:
        raise ValueError(f"{corruption}.npy has {images.dtype} {images.shape}; expected uint8 ({5 * ROWS}, 32, 32, 3)")
    if labels.shape != (5 * ROWS,):
        raise ValueError(f"labels.npy has shape {labels.shape}; expected ({5 * ROWS},)")
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels.npy has {labels.dtype}; expected whole numbers")
    classes = _clean(name, root)[2]
    if (wrong := labels[(labels < 0) | (labels >= classes)]).size:
        raise ValueError(f"labels.npy has a label {wrong[0]}; expected 0 to {classes - 1}")
    return images, labels.astype(np.int64)


def read_clean(name: str, root: Path) -> tuple[Image, Labels]:
    """Read the 50,000 training images; each row of the binary files holds one or two label bytes, then three planes."""
    folder, _, n = _clean(name, root)
    files = [folder / f"data_batch_{i}.bin" for i in range(1, 6)] if n == 10 else [folder / "train.bin"]
    head = 1 if n == 10 else 2  # CIFAR-100 has the coarse label first, then the fine one
    parts = []
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file.parent.name}/{file.name} is missing: unpack the clean set's binary version here")
        rows = np.fromfile(file, dtype=np.uint8)
        if rows.size == 0 or rows.size % (head + BYTES):
            raise ValueError(f"{file.name} has {rows.size} bytes, which is not a multiple of {head + BYTES}")
        parts.append(rows.reshape(-1, head + BYTES))
        if (worst := parts[-1][:, head - 1].max()) >= n:
            raise ValueError(f"{file.name} has a label {worst}; expected 0 to {n - 1}")
    table = np.concatenate(parts)
    images = table[:, head:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), table[:, head - 1].astype(np.int64)


def _clean(name: str, root: Path) -> tuple[Path, str, int]:
    if name == "cifar10-c":
        return root / "cifar-10-batches-bin", "batches.meta.txt", 10
    return root / "cifar-100-binary", "fine_label_names.txt", 100


def _array(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    if not path.is_file():
        raise ValueError(f"{path.name} is missing in {path.parent.name}/")
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header may raise any error
        raise ValueError(f"{path.name} is not an array of numbers: {str(error) or type(error).__name__}") from error


def cifar_fingerprint(root: Path) -> str:
    """Return a short hash of the arrays' names, sizes and some of their bytes."""
    return short_hash(f"{file.name} {file.stat().st_size} {_sample(file)}" for file in sorted(root.glob("*.npy")))


def _sample(file: Path, count: int = 64) -> str:
    data = np.memmap(file, dtype=np.uint8, mode="r") if file.stat().st_size else np.empty(0, dtype=np.uint8)
    return data[:: max(1, len(data) // count)].tobytes().hex()
