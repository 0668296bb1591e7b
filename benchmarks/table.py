"""The tables of docs/fast.md, from the results of the other benchmarks: benchmarks/results/speed.md.

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
    """Return images per second, time over the bare step, and memory of each variant on each network."""
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
    """Return the peak memory that a step adds."""
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
    """Return the milliseconds of a step without a network, and of product and top-k alone."""
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


def one(name: str, **which: Any) -> dict[str, Any]:
    """Return the row of a benchmark with these values."""
    return next(row for row in rows_of(name) if which.items() <= row.items())


def span(values: list[float], digits: int = 2) -> str:
    low, high = (f"{end(values):.{digits}f}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def goals() -> str:
    """Return goals and results; medians of ratios."""
    full = {"classes": 1000, "dim": 2048}
    bank, stream = one("bank", **full), one("stream")
    sketch = [row for row in rows_of("sketch") if full.items() <= row.items()]
    parts = {row["params"]: row for row in rows_of("parts")}
    waits = [row["waiting_share"] for row in rows_of("waiting")]
    rows = [
        [f"whole TSD step over forward + backward + Adam, {network}, batch {row['batch']}",
         f"{row['tsd_over_bare'][1]:.2f}", "1.05", "step"]
        for network in ("resnet18", "resnet50") for row in [one("step", network=network)]
    ] + [
        ["bank step (insert, prototypes, neighbours) over the bare product and top-k, 100,000 entries of 2,048",
         f"{bank['step_over_bare'][1]:.2f}", "1.2", "bank"],
        ["the same by sketches, upkeep included; recall, four kinds of features",
         f"{span([r['sketch_over_bare'][1] for r in sketch])}; {span([r['recall'] for r in sketch], 3)}",
         "0.7; 0.95", "sketch"],
        ["insertion and prototypes, times faster than the released way",
         f"{bank['released_over_write'][1]:,.0f}", "100", "bank"],
    ] + [
        [f"of the step that updates all, ResNet-50: `params={name!r}` (by FLOPs {parts[name]['floor']:.2f})",
         f"{parts[name]['over_all'][1]:.2f}", f"{parts[name]['goal']}", "parts"]
        for name in ("norm", "layer[34]", "layer4")
    ] + [
        ["batch 1,000 over batch 10 of a stream of 128,000 features", f"{stream['late_over_early'][1]:.2f}", "1.05",
         "stream"],
        ['what a step adds to memory with `memory="low"`, of the usual, ResNet-50, batch 32',
         f"{one('peak', network='resnet50', variant='tsd-low')['step_over_all']:.2f}", "0.5", "peak"],
        ["share of the time that the network waits for images, JPEGs of 256 and of 800 pixels",
         " and ".join(f"{100 * share:.1f} %" for share in waits), "a few %", "waiting"],
    ]  # fmt: skip
    return table(["what", "measured", "aim", "command"], [[*row[:3], f"`benchmarks/{row[3]}.py`"] for row in rows])


def page() -> str:
    return "\n\n".join((goals(), speed(), peak(), growth())) + "\n"


def main() -> None:
    FILE.write_text(page())
    print(page())


if __name__ == "__main__":
    main()
