"""Runs from a few settings, and a small folder of images."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trueup.bench.settings import Run, make_sweep

GREY = {"training": {"normalize": [[0.1, 0.2, 0.3], 0.25]}}


GUARDED = {"repeat": 3, "disturb": "ood:0.5", "method": "tsd:guard=true"}


def runs(**values: Any) -> list[Run]:
    return make_sweep(values).runs()


def one(**values: Any) -> Run:
    (run,) = runs(**{"target": "hand", "seed": 0, "method": "tsd"} | values)
    return run


def folder(root: Path, *domains: str) -> Path:
    """Two classes with one image each."""
    for domain in domains:
        for i, name in enumerate(("cat", "dog")):
            (root / domain / name).mkdir(parents=True)
            Image.fromarray(np.full((8, 8, 3), 40 * i, dtype=np.uint8)).save(root / domain / name / "0.png")
    return root
