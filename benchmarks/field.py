"""All methods on the embedded benchmarks, on i.i.d., correlated and continual streams.

Runs are kept in runs/field and not repeated; the records and the table go to benchmarks/results/field.

Run: python benchmarks/field.py [--quick] [--workers 2]
"""

import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import trueup
from trueup.bench.records import FILE, Record
from trueup.bench.settings import make_sweep
from trueup.bench.sweep import plan
from trueup.cli.bench import run_and_print
from trueup.data.datasets import open_dataset

CORRUPTIONS = "+".join(open_dataset("digits-c").targets)
ONE = {"dataset": ["digits-c"], "target": [CORRUPTIONS]}  # all corruptions, one after the other
COLUMNS: dict[str, dict[str, Any]] = {
    "digits, i.i.d.": {"dataset": ["digits"], "stream": ["iid"]},
    "digits, correlated": {"dataset": ["digits"], "stream": ["dirichlet"]},
    "digits-c, i.i.d.": {**ONE, "stream": ["continual"], "reset": True},
    "digits-c, correlated": {**ONE, "stream": ["dirichlet"], "reset": True},
    "digits-c, continual": {**ONE, "stream": ["continual"]},
}
SEEDS = [0, 1, 2]


def main(quick: bool, workers: int) -> None:
    """Run what is missing, column by column, then write the table."""
    out = Path(tempfile.mkdtemp()) if quick else Path("runs/field")
    methods = ["source", "tent", "memo"] if quick else trueup.list_methods()
    cells: dict[str, dict[str, str]] = {name: {} for name in methods}
    for column, values in list(COLUMNS.items())[: 1 if quick else None]:
        few = {"target": ["neon"], "limit": 64, "training": {"iterations": 5}} if quick else {}
        for names, seeds in (([m for m in methods if m != "memo"], SEEDS), (["memo:views=8"], SEEDS[:1])):
            sweep = make_sweep({**values, **few, "method": names, "seed": [0] if quick else seeds})
            records = run_and_print(plan(sweep, out), workers=workers).records
            for method in {r["settings"]["method"] for r in records}:
                cells[method][column] = cell([r for r in records if r["settings"]["method"] == method])
    write_results(out, table(cells, list(COLUMNS)[: 1 if quick else None]), None if quick else "field")


def write_results(out: Path, text: str, name: str | None) -> None:
    """Print and write a table; copy it with its records to benchmarks/results, if a name is given."""
    (out / "table.md").write_text(text)
    print(text)
    if name is not None:
        results = Path(__file__).parent / "results" / name
        results.mkdir(exist_ok=True)
        for file in (FILE, "table.md"):
            shutil.copy(out / file, results / file)


def parse_flags() -> tuple[bool, int]:
    """Return --quick and --workers."""
    workers = int(sys.argv[sys.argv.index("--workers") + 1]) if "--workers" in sys.argv else 2
    return "--quick" in sys.argv, workers


def cell(records: list[Record]) -> str:
    """Return accuracy in %: the mean over targets ± its deviation over seeds."""
    by_seed: dict[int, list[float]] = {}
    for r in records:
        by_seed.setdefault(r["settings"]["seed"], []).append(100 * r["results"]["accuracy"])
    means = [statistics.mean(values) for values in by_seed.values()]
    spread = f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else ""
    return f"{statistics.mean(means):.1f}{spread}"


def table(cells: dict[str, dict[str, str]], columns: list[str]) -> str:
    """Return the table as Markdown."""
    lines = [["method", *columns], ["---"] + ["---:"] * len(columns)]
    lines += [[f"`{name}`", *(row.get(c, "–") for c in columns)] for name, row in cells.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main(*parse_flags())
