"""Draw each stream: the classes and domains of its images in order of arrival."""

import sys
from itertools import groupby
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap

from trueup.data import streams

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
COLOURS = ListedColormap(["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000"])  # Okabe and Ito
GREYS = ListedColormap(["#E4E4E4", "#C0C0C0", "#969696", "#5A5A5A"])
LABELS, DOMAINS = np.tile(np.arange(6), 40), np.repeat(np.arange(4), 60)
TITLES = {
    "iid": "one domain, any class at any time",
    "dirichlet": "the lower the concentration, the longer a class stays",
    "class-sorted": "one class after the other, in each domain anew",
    "continual": "one domain after the other, any class at any time",
    "gradual": "severity rises to the top and falls again",
    "mixed": "any class and any domain at any time",
    "label-shift": "some classes are frequent, others rare, at any time",
    "batches": "how many of the 6 classes does a batch see on average?",
}
for name, title in TITLES.items():
    domains = DOMAINS * (name in ("class-sorted", "continual", "gradual", "mixed"))
    rows: list[tuple[str, np.ndarray, int, str]] = []  # name, classes or domains, batch size, remark
    for value in (10, 1, 0.1, 0.01) if name == "dirichlet" else ():
        order = streams.dirichlet(LABELS, domains, seed=1, concentration=value)
        rows.append((f"concentration {value:g}", LABELS[order], 999, ""))
    for kind, size in [(kind, size) for kind in ("iid", "dirichlet") for size in (16, 4, 1) if name == "batches"]:
        order = streams.order(kind, LABELS, domains, seed=1)
        seen = np.mean([len(set(LABELS[batch])) for batch in streams.batches(order, size)])
        rows.append((f"{kind}, batches of {size}", LABELS[order[:64]], size, f"{seen:.1f}"))
    if not rows:
        order = streams.order(name, LABELS, domains, seed=1)
        rows = [("class", LABELS[order], 999, "")] + [("domain", domains[order], 999, "")] * bool(domains.any())
        rows += [("counted", np.sort(LABELS[order]), 999, "")] * (name == "label-shift")
    figure, axes = plt.subplots(len(rows), squeeze=False, figsize=(8, 0.75 + 0.36 * len(rows)), layout="constrained")
    for axis, (row, values, size, remark) in zip(axes[:, 0], rows, strict=True):
        cmap = GREYS if row == "domain" else COLOURS
        axis.imshow(values[None], cmap=cmap, vmin=0, vmax=cmap.N - 1, aspect="auto", interpolation="nearest")
        axis.set(xticks=[], yticks=[], frame_on=False)
        axis.set_ylabel(row, rotation=0, ha="right", va="center")
        axis.text(1.01, 0.5, remark, transform=axis.transAxes, va="center")
        axis.vlines(np.arange(size, len(values), size) - 0.5, -0.5, 0.5, color="white", linewidth=3)
        start, runs = 0, [(value, len(list(run))) for value, run in groupby(values)]
        for value, length in runs if row == "counted" or (row == "domain" and len(runs) < 10) else ():
            text, box = str(length if row == "counted" else value), {"fc": "white", "ec": "none", "pad": 1.5}
            axis.text(start + length / 2 - 0.5, 0, text, ha="center", va="center_baseline", bbox=box)
            start += length
    figure.suptitle(f"{name}: {title}", fontsize=11)
    axes[-1, 0].set_xlabel("time →  (a stripe is an image, its colour the class)")
    figure.savefig(FOLDER / f"{name}.png", dpi=100)
    print(f"{FOLDER / name}.png: {title}")
