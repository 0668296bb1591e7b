"""ROID with each form of its prior correction, on the streams of field.py.

Runs are kept in runs/roid and not repeated; the records and the table go to benchmarks/results/roid.

Run: python benchmarks/roid.py [--quick] [--workers 2]
"""

import tempfile
from pathlib import Path

from field import COLUMNS, SEEDS, cell, parse_flags, table, write_results

from trueup.bench.settings import make_sweep
from trueup.bench.sweep import plan
from trueup.cli.bench import run_and_print

PRIORS = ("none", "probabilities", "logits")


def main(quick: bool, workers: int) -> None:
    """Run what is missing, column by column, then write the table."""
    out = Path(tempfile.mkdtemp()) if quick else Path("runs/roid")
    columns = dict(list(COLUMNS.items())[:1]) if quick else COLUMNS
    few = {"target": ["neon"], "limit": 64, "training": {"iterations": 5}} if quick else {}
    cells: dict[str, dict[str, str]] = {f"roid:prior={prior}": {} for prior in PRIORS}
    for column, values in columns.items():
        sweep = make_sweep({**values, **few, "method": list(cells), "seed": [0] if quick else SEEDS})
        records = run_and_print(plan(sweep, out), workers=workers).records
        for prior in PRIORS:
            chosen = [r for r in records if r["settings"]["hyper"]["prior"] == prior]
            cells[f"roid:prior={prior}"][column] = cell(chosen)
    write_results(out, table(cells, list(columns)), None if quick else "roid")


if __name__ == "__main__":
    main(*parse_flags())
