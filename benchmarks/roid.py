"""ROID's answers with each form of its prior correction, on the streams of the field's table.

What runs is kept in runs/roid, and is not run again; the records and the table go to benchmarks/results/roid.

Run: python benchmarks/roid.py [--quick] [--workers 2]
"""

import shutil
import sys
import tempfile
from pathlib import Path

from field import COLUMNS, SEEDS, cell, table

from trueup.bench.records import FILE
from trueup.bench.settings import make_sweep
from trueup.bench.sweep import plan
from trueup.cli.bench import run_and_print

PRIORS = ("none", "probabilities", "logits")


def main(quick: bool, workers: int) -> None:
    """Run what is not there yet, column by column, then write the table."""
    out = Path(tempfile.mkdtemp()) if quick else Path("runs/roid")
    columns = dict(list(COLUMNS.items())[:1]) if quick else COLUMNS
    few = {"target": ["neon"], "limit": 128, "training": {"iterations": 5}} if quick else {}
    cells: dict[str, dict[str, str]] = {f"roid:prior={prior}": {} for prior in PRIORS}
    for column, values in columns.items():
        sweep = make_sweep({**values, **few, "method": list(cells), "seed": [0] if quick else SEEDS})
        run_and_print(sweep, str(out), workers=workers)
        done = plan(sweep, out)
        records = [done.done[run.digest()] for run in done.done_here]
        for prior in PRIORS:
            chosen = [r for r in records if r["settings"]["hyper"]["prior"] == prior]
            cells[f"roid:prior={prior}"][column] = cell(chosen)
    (out / "table.md").write_text(table(cells, list(columns)))
    print((out / "table.md").read_text())
    if not quick:
        results = Path(__file__).parent / "results" / "roid"
        results.mkdir(exist_ok=True)
        for name in (FILE, "table.md"):
            shutil.copy(out / name, results / name)


if __name__ == "__main__":
    workers = int(sys.argv[sys.argv.index("--workers") + 1]) if "--workers" in sys.argv else 2
    main("--quick" in sys.argv, workers)
