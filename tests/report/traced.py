"""Made-up studies with traces: records and what happened image by image, each number of a record true to its trace."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from studies import record

from trueup.report.groups import Trace
from trueup.report.runs import Record

CLASSES = 5
STRUCTURES = ("disc", "cup")
HYPER: dict[str, dict[str, Any]] = {
    "source": {"norm": "source"},
    "tent": {"lr": 0.001, "norm": "batch"},
    "tsd": {"lr": 0.0001, "per_class": 100, "neighbors": 3, "alignment": 0.1, "norm": "batch"},
}
START = {"source": 0.5, "tent": 0.55, "tsd": 0.6}
GAIN = {"source": 0.0, "tent": 0.1, "tsd": 0.25}  # from the first image of a stream to the last
Lookup = Callable[[Record], Trace | None]


def study(
    *,
    methods: Sequence[str] = ("source", "tent", "tsd"),
    targets: Sequence[str] = ("paint", "photo"),
    seeds: Sequence[int] = (0, 1),
    batches: Sequence[int] = (20,),
    values: Mapping[str, Sequence[Any]] | None = None,
    masks: bool = False,
    images: int = 400,
    **settings: Any,
) -> tuple[list[Record], Lookup]:
    """Records and their traces. `values`: of a hyper-parameter of tsd, one run each beside the usual ones.

    With `masks` the records have Dice in place of accuracy. Other settings are those of all runs.
    """
    records: list[Record] = []
    traces: dict[str, Trace] = {}
    for target in targets:
        for seed in seeds:
            for batch in batches:
                for method in methods:
                    for hyper in _hypers(method, values or {}):
                        build = _masks if masks else _classes
                        trace, results = build(method, hyper, target, seed, batch, images)
                        run = record(method, target, seed, 0.0, batch=batch, hyper=hyper, results=results, **settings)
                        run["id"] = hashlib.sha256(run["id"].encode()).hexdigest()[:16]
                        seconds = images * (0.002 + 0.01 / batch) * (1 + 2 * (method == "tsd") + (method == "tent"))
                        memory = 400.0 + 3 * batch * (1 + (method != "source"))
                        run["cost"] = {
                            "seconds": seconds,
                            "images_per_second": images / seconds,
                            "peak_memory_mb": memory,
                        }
                        run["trace"] = f"traces/{run['id']}.npz"
                        records.append(run)
                        traces[run["id"]] = trace
    return records, lambda run: traces.get(str(run["id"])) if "trace" in run else None


def write(records: Sequence[Record], trace: Lookup, folder: Path) -> Path:
    """The study as a sweep leaves it: `records.jsonl` and `traces/` in a folder."""
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(run) + "\n" for run in records))
    for run in records:
        if (arrays := trace(run)) is not None:
            np.savez_compressed(folder / run["trace"], **arrays)
    return folder


def _hypers(method: str, values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    usual = HYPER.get(method, {"norm": "batch"})
    others = [{**usual, name: value} for name, some in values.items() for value in some if method == "tsd"]
    return [usual, *(hyper for hyper in others if hyper != usual)]


def _random(*words: Any) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "big"))


def _skill(method: str, hyper: Mapping[str, Any], target: str, batch: int, n: int) -> NDArray[np.float64]:
    """The chance of being right along the stream."""
    rise = np.linspace(0, 1, n) if method in GAIN else np.zeros(n)
    skill = START.get(method, 0.52) + GAIN.get(method, 0.0) * rise - 0.1 * (sum(map(ord, target)) % 2)
    if method == "tsd":
        skill -= 0.02 * abs((hyper["neighbors"] or 0) - 3) + 0.4 / batch
    return skill


def _stream(target: str, seed: int, batch: int, n: int) -> dict[str, NDArray[Any]]:
    """What all methods of a stage see alike."""
    names = target.split("+")
    return {
        "image": _random("order", target, seed).permutation(n).astype(np.int32),
        "domain": np.sort(np.arange(n) % len(names)).astype(np.int16),
        "batch": (np.arange(n) // batch).astype(np.int32),
    }


def _classes(
    method: str, hyper: Mapping[str, Any], target: str, seed: int, batch: int, n: int
) -> tuple[Trace, dict[str, Any]]:
    same, own = _random("labels", target, seed), _random("answers", method, target, seed, sorted(hyper.items()), batch)
    label, luck = same.integers(CLASSES, size=n), same.random(n)
    right = luck < _skill(method, hyper, target, batch, n)
    prediction = np.where(right, label, (label + 1 + (luck * 97).astype(int) % 2) % CLASSES)
    entropy = np.clip(own.gamma(2.0, 0.25, n) * np.where(right, 0.7, 1.4), 0, np.log(CLASSES))
    sample = np.sort(same.permutation(n)[:200])
    spread = {"source": 1.0, "tent": 0.8}.get(method, 0.5)
    centres, noise = same.normal(size=(CLASSES, 8)) * 1.5, same.normal(size=(n, 8))
    features = (centres[prediction] * 0.6 + centres[label] * 0.4 + noise * spread)[sample].astype(np.float16)
    trace = _stream(target, seed, batch, n) | {
        "label": label.astype(np.int16),
        "prediction": prediction.astype(np.int16),
        "entropy": entropy.astype(np.float32),
        "confidence": np.exp(-entropy).astype(np.float32),
        "sample": sample.astype(np.int32),
        "features": features,
    }
    per_class = [float(np.mean(right[label == k])) if (label == k).any() else None for k in range(CLASSES)]
    results: dict[str, Any] = {"accuracy": float(np.mean(right)), "macro": _mean(per_class)}
    results |= {"per_class": per_class, "images": n, "nll": float(np.mean(entropy)), "ece": 0.1}
    if "+" in target:
        parts = enumerate(target.split("+"))
        results["per_domain"] = {name: float(np.mean(right[trace["domain"] == i])) for i, name in parts}
    return trace, results | _geometry(features.astype(np.float64), label[sample], sample, n)


def _geometry(features: NDArray[Any], label: NDArray[Any], at: NDArray[Any], n: int) -> dict[str, Any]:
    per_class = [_alignment(features[label == k]) for k in range(CLASSES)]
    ends = [n * (i + 1) // 8 for i in range(8)]
    windows = [(at >= start) & (at < end) for start, end in zip([0, *ends], ends, strict=False)]
    along = {
        "images": ends,
        "alignment": [_mean([_alignment(features[w & (label == k)]) for k in range(CLASSES)]) for w in windows],
        "uniformity": [_uniformity(features[w]) for w in windows],
    }
    whole = {"alignment": _mean(per_class), "uniformity": _uniformity(features)}
    return {**whole, "alignment_per_class": per_class, "along": along}


def _squares(features: NDArray[Any]) -> NDArray[Any]:
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    i, j = np.triu_indices(len(unit), 1)
    return np.asarray(((unit[i] - unit[j]) ** 2).sum(1))


def _alignment(features: NDArray[Any]) -> float | None:
    return float(_squares(features).mean()) if len(features) > 1 else None


def _uniformity(features: NDArray[Any]) -> float | None:
    return float(np.log(np.exp(-2 * _squares(features)).mean())) if len(features) > 1 else None


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _masks(
    method: str, hyper: Mapping[str, Any], target: str, seed: int, batch: int, n: int
) -> tuple[Trace, dict[str, Any]]:
    same = _random("masks", target, seed)
    dice = np.clip(_skill(method, hyper, target, batch, n) + same.normal(0, 0.08, n), 0, 1).astype(np.float32)
    dice[::17] = np.nan
    y, x = np.mgrid[:64, :64]
    shift = {"source": 7, "tent": 4}.get(method, 2)
    shown = [_eye(x, y, 28 + 2 * i, shift) for i in range(3)]
    trace = _stream(target, seed, batch, n) | {
        "dice": dice,
        "examples": np.stack([image for image, _, _ in shown]),
        "truth": np.stack([truth for _, truth, _ in shown]),
        "answer": np.stack([answer for _, _, answer in shown]),
        "example_names": np.array([f"eye {i + 1}" for i in range(3)]),
        "structures": np.array(STRUCTURES),
    }
    mean = float(np.nanmean(dice))
    part = {"dice": mean, "hd95": None, "assd": None, "empty": int(np.isnan(dice).sum()), "no_distance": n, "cases": n}
    return trace, {"dice": mean, "images": n, "cases": n, "per_structure": dict.fromkeys(STRUCTURES, part)}


def _eye(x: Any, y: Any, centre: int, shift: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """A picture of a disc with a cup in it; the truth; and an answer that is off by some pixels."""

    def round_(at: int, radius: int) -> Any:
        return (x - at) ** 2 + (y - centre) ** 2 < radius**2

    truth = np.stack([round_(centre, 18), round_(centre, 9)]).astype(np.uint8)
    answer = np.stack([round_(centre + shift, 18), round_(centre + shift, 9 + shift // 2)]).astype(np.uint8)
    image = np.stack([150 + 40 * truth[0] + 30 * truth[1], 60 + 80 * truth[0] + 60 * truth[1], 40 + 40 * truth[0]], -1)
    return image.astype(np.uint8), truth, answer
