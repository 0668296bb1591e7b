"""The tables of docs/fast.md, from what the other benchmarks have measured: benchmarks/results/speed.md.

Run: python benchmarks/table.py
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "speed.md"
NAMES = {
    "forward": "the network, forward",
    "bare": "the network: forward, backward, Adam",
    "source": "`source`",
    "bn": "`bn`",
    "t3a": "`t3a`",
    "tent": "`tent`",
    "tsd-norm": '`tsd`, `params="norm"`',
    "tsd-late": "`tsd`, late layers",
    "tsd-all": "`tsd`",
    "tsd-low": '`tsd`, `memory="low"`',
    "released": "TSD's step as released",
}
Rows = list[dict[str, Any]]


def rows_of(name: str) -> Rows:
    rows: Rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join([line(*head), "|" + "---|" * len(head), *(line(*row) for row in rows)])


def speed() -> str:
    """Images per second, time beside the bare step, and memory, of each variant on each network."""
    rows = rows_of("throughput")
    found = {(row["variant"], row["network"]): row for row in rows}
    networks = {row["network"]: row["batch"] for row in rows}
    lines = []
    for variant, name in NAMES.items():
        cells = [name]
        for network in networks:
            row = found[variant, network]
            ratio, memory = row["over_bare"][1], (row["holds_mb"] + row["step_mb"]) / 1024
            cells.append(f"{row['images_per_second']:.1f} ({ratio:.2f}), {memory:.1f} GB")
        lines.append(cells)
    return table(["", *(f"{network}, batch {batch}" for network, batch in networks.items())], lines)


def peak() -> str:
    """What a step adds to memory at its peak."""
    rows = rows_of("peak")
    variants = [v for v in NAMES if any(row["variant"] == v for row in rows)]
    networks = {row["network"]: row["batch"] for row in rows}
    found = {(row["network"], row["variant"]): row for row in rows}
    lines = [
        [network, *(f"{(row := found[network, v])['step_mb']:,.0f} MB ({row['step_over_all']:.2f})" for v in variants)]
        for network in networks
    ]
    batch = next(iter(networks.values()))
    return table([f"a step adds, batch {batch}", *(NAMES[v] for v in variants)], lines)


def growth() -> str:
    """A step without a network: milliseconds, and those of the product and top-k alone."""
    rows = rows_of("growth")
    sizes = sorted({row["per_class"] for row in rows})
    batches = sorted({row["batch"] for row in rows})
    found = {(row["classes"], row["per_class"], row["batch"]): row for row in rows}
    lines = []
    for classes in sorted({row["classes"] for row in rows}):
        for batch in batches:
            cells = [f"{(row := found[classes, m, batch])['step_ms']:.1f} ({row['bare_ms']:.1f})" for m in sizes]
            lines.append([f"{classes:,}", str(batch), *cells])
    return table(["classes", "batch", *(f"M = {m}" for m in sizes)], lines)


def page() -> str:
    return "\n\n".join((speed(), peak(), growth())) + "\n"


def main() -> None:
    FILE.write_text(page())
    print(page())


if __name__ == "__main__":
    main()
