"""Records of runs: what tells them apart, and which metric shows them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from trueup.report.metrics import METRICS, Metric

Record = Mapping[str, Any]
RunKey = tuple[Any, Any]  # the seed, and the seed of source training if the recipe has its own


def latest_runs(records: Iterable[Record]) -> list[Record]:
    """Keep the last of the records with one id."""
    return list({record.get("id", f"#{i}"): record for i, record in enumerate(records)}.values())


def metric_of(records: Iterable[Record]) -> Metric:
    """Return Dice if there are masks, else accuracy."""
    return METRICS["dice" if any("dice" in (record.get("results") or {}) for record in records) else "accuracy"]


def is_finished(record: Record) -> bool:
    """Return True if the run has results."""
    return bool(record.get("results"))


def target_of(record: Record) -> str:
    """Return the target of a run."""
    return str(record["settings"].get("target"))


def run_key(record: Record) -> RunKey:
    """Return the seeds, which tell apart the runs of a variant on one target."""
    settings = record["settings"]
    return settings.get("seed"), (settings.get("source") or {}).get("seed")


def unique_texts(values: Iterable[Any]) -> list[str]:
    """Return each value once, as text, with numbers sorted by size."""
    return sorted({str(value) for value in values}, key=lambda text: (len(text), text))


def seeds_text(records: Iterable[Record]) -> str:
    """Return "seed 0" or "seeds 0, 1"."""
    seeds = unique_texts(record["settings"].get("seed") for record in records)
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"


def json_key(value: Any) -> str:
    """Return a text that is equal for equal values."""
    return json.dumps(value, sort_keys=True)
