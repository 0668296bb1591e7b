"""Compare all methods on a shifted stream: a small model, adapted by each of them, and a table of the results.

The images are synthetic gratings, with three source models and a stream for each. `make demo` runs this.
"""

import logging
import sys
import time

import torch

import trueup
from trueup.testing import convnet, images

SEEDS, BATCHES, SIZE, SHIFT = (0, 1, 2), 60, 64, 1.55

logging.getLogger("trueup").setLevel(logging.ERROR)  # hides eata's warning that it has no source data
methods = trueup.list_methods()
scores: dict[str, list[float]] = {name: [] for name in methods}
clock = dict.fromkeys(methods, 0.0)
clean: list[float] = []
total, done = len(SEEDS) * len(methods), 0

for seed in SEEDS:
    model = convnet(seed)
    x, y = images(2000, seed=seed)
    clean.append(float((model(x).argmax(dim=1) == y).float().mean()))
    stream = [images(SIZE, seed=10_000 * (seed + 1) + i, shift=SHIFT) for i in range(BATCHES)]
    for name in methods:
        adapter = trueup.adapt(model, name)
        start = time.perf_counter()
        hits = torch.cat([adapter(x).argmax(dim=1) == y for x, y in stream])
        clock[name] += time.perf_counter() - start
        scores[name].append(float(hits.float().mean()))
        done += 1
        if sys.stderr.isatty():
            print(f"\r{'#' * done}{'.' * (total - done)} {done}/{total}", end="", file=sys.stderr, flush=True)
if sys.stderr.isatty():
    print("\r" + " " * (total + 8) + "\r", end="", file=sys.stderr)

mean = {name: sum(values) / len(values) for name, values in scores.items()}
best = max(mean.values())
print(
    f"{BATCHES} batches of {SIZE} shifted images, mean of {len(SEEDS)} models (on clean images: {sum(clean) / 3:.1%})\n"
)
print("method     accuracy     gain   ms/batch")
for name in methods:
    gain, ms = mean[name] - mean["source"], 1000 * clock[name] / len(SEEDS) / BATCHES
    bar = "█" * round(30 * mean[name]) + (" ◀ best" if mean[name] == best else "")
    print(f"{name:<10} {mean[name]:7.1%} {100 * gain:+9.1f} {ms:9.1f}   {bar}")
