"""Images per second of the data pipeline, against plain PIL decoding and resizing of the same files.

Bare: one thread, open, convert, resize, nothing else. Ours: the Loader, with its checks, normalisation and batching.
Run: python benchmarks/loading.py [--quick]
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from measure import milliseconds, quartiles, take_turns, write
from PIL import Image

from trueup.data.domains import FileDomain
from trueup.data.loading import ConcatDomains, Loader
from trueup.data.streams import batches


def make_files(folder: Path, count: int, size: int) -> list[str]:
    """Write JPEG files of smooth random colour with edges."""
    rng = np.random.default_rng(0)
    names = []
    for i in range(count):
        small = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        names.append(f"{i}.jpg")
        small.resize((size, size), Image.Resampling.BICUBIC).save(folder / names[-1], quality=90)
    return names


def bare(folder: Path, names: list[str], to: int, _: None) -> None:
    """Do the least that any pipeline must do."""
    for name in names:
        with Image.open(folder / name) as file:
            np.asarray(file.convert("RGB").resize((to, to), Image.Resampling.BILINEAR))


def ours(folder: Path, names: list[str], to: int, threads: int, _: None) -> None:
    """Read the same files with our loader."""
    domain = FileDomain("files", folder, names, np.zeros(len(names), dtype=np.int64))
    loader = Loader(ConcatDomains([domain]), to, threads=threads)
    assert sum(len(x) for x, _ in loader.batches(list(batches(np.arange(len(names)), 64)))) == len(names)


def main() -> None:
    """Measure, print, and save the record."""
    quick = "--quick" in sys.argv
    rows = []
    for size, to in ((128, 112), (256, 224), (800, 224)):
        count = 16 if quick else 256
        with tempfile.TemporaryDirectory() as folder:
            names = make_files(Path(folder), count, size)
            variants: dict[str, Callable[[None], object]] = {"bare": partial(bare, Path(folder), names, to)}
            variants |= {f"ours_{n}": partial(ours, Path(folder), names, to, n) for n in (1, 2)}
            times = take_turns(variants, 2 if quick else 9, lambda: None)
        row: dict[str, object] = {"files": f"{size} px JPEG to {to} px"}
        for name, taken in times.items():
            row[f"{name}_images_per_second"] = round(1000 * count / milliseconds(taken))
        for n in (1, 2):
            row[f"ratio_{n}"] = quartiles(times["bare"], times[f"ours_{n}"])
        print(
            f"{row['files']}: bare PIL {row['bare_images_per_second']} images/s; pipeline with one thread "
            f"{row['ours_1_images_per_second']}, with two {row['ours_2_images_per_second']}; "
            f"ratio {quartiles(times['bare'], times['ours_1'])[1]:.2f} and "
            f"{quartiles(times['bare'], times['ours_2'])[1]:.2f}"
        )
        rows.append(row)
    if not quick:
        write("loading", rows)


if __name__ == "__main__":
    main()
