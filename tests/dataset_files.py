"""Empty files in the layouts of datasets, and what is found there."""

from pathlib import Path

import numpy as np

from trueup.data.datasets import open_dataset
from trueup.data.domains import FileDomain


def put(root: Path, *paths: str) -> Path:
    """Empty files below a root."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def files(name: str, root: Path, domain: str) -> list[str]:
    found = open_dataset(name, root).domain(domain)
    assert isinstance(found, FileDomain)
    return list(found.files)


def labels(name: str, root: Path, domain: str) -> list[int]:
    found = open_dataset(name, root).domain(domain).labels
    assert found.dtype == np.int64
    return found.tolist()
