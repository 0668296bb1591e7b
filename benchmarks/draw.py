"""The figure docs/speed.png, from the results of the other benchmarks; missing results are left out.

Run: python benchmarks/draw.py [--quick]
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from trueup.report.palette import COLOURS, DASHES, INK, MARKERS

RESULTS = Path(__file__).parent / "results"
FILE = Path(__file__).parent.parent / "docs" / "speed.png"
ACROSS, WIDE, HIGH = 3, 9.0, 3.0  # panels, and inches of the figure and of a row
FONT: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
}
BARE, OTHER, OURS, RELEASED = "0.6", COLOURS[1], COLOURS[0], COLOURS[3]
NAMES = {
    "forward": ("network, forward", BARE),
    "source": ("source", OTHER),
    "bn": ("bn", OTHER),
    "t3a": ("t3a", OTHER),
    "tent": ("tent", OTHER),
    "tsd-norm": ("tsd, norms", OURS),
    "tsd-late": ("tsd, late layers", OURS),
    "tsd-all": ("tsd, all", OURS),
    "tsd-low": ("tsd, low memory", OURS),
    "bare": ("network, whole step", BARE),
    "released": ("tsd as released", RELEASED),
}
Rows = list[dict[str, Any]]
Panel = Callable[[Any], None]


def whiskers(rows: Rows, key: str) -> dict[str, Any]:
    """Return the medians' distances to the quartiles, in matplotlib's form."""
    below, above = ([abs(row[key][i] - row[key][1]) for row in rows] for i in (0, 2))
    return {"xerr": [below, above], "error_kw": {"elinewidth": 1, "capsize": 2, "ecolor": INK}}


def named(axis: Any, names: list[str]) -> None:
    """Name the bars; the first is on top."""
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="0.9")


def title(axis: Any, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=9.5)


def write(axis: Any, text: str, x: float, y: float, **look: Any) -> None:
    """Write to the right of a point."""
    axis.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", **look)


def speed(rows: Rows, axis: Any) -> None:
    """Draw the time of a step over the bare one, and images per second."""
    ratios = [row["over_bare"][1] for row in rows]
    colours = [NAMES[row["variant"]][1] for row in rows]
    axis.barh(range(len(rows)), ratios, color=colours, **whiskers(rows, "over_bare"))
    for i, row in enumerate(rows):
        write(axis, f"{row['images_per_second']:.3g}/s", row["over_bare"][2], i, bbox={"color": "white", "pad": 0.5})
    axis.axvline(1, color=INK, linewidth=0.8, linestyle=(0, DASHES[1]))
    axis.set_xlim(0, 1.4 * max(row["over_bare"][2] for row in rows))
    named(axis, [NAMES[row["variant"]][0] if axis.get_subplotspec().is_first_col() else "" for row in rows])
    title(axis, f"{rows[0]['network']}, batch {rows[0]['batch']}: time")
    axis.set_xlabel("time over that of forward,\nbackward and Adam; images/s")


def memory(rows: Rows, axis: Any) -> None:
    """Draw the memory held and the memory that a step adds."""
    held, added = ([row[key] / 1024 for row in rows] for key in ("holds_mb", "step_mb"))
    axis.barh(range(len(rows)), held, color=COLOURS[5], label="held: bank, copies")
    axis.barh(range(len(rows)), added, left=held, color=COLOURS[7], label="added by a step")
    for i, total in enumerate(map(sum, zip(held, added, strict=True))):
        write(axis, f"{total:.2g}", total, i)
    axis.set_xlim(0, 1.2 * max(map(sum, zip(held, added, strict=True))))
    named(axis, [NAMES[row["variant"]][0] if axis.get_subplotspec().is_first_col() else "" for row in rows])
    title(axis, f"{rows[0]['network']}, batch {rows[0]['batch']}: memory")
    axis.set_xlabel("GB beside the network, at the peak")
    if axis.get_subplotspec().is_first_col():
        axis.legend(fontsize=7.5, loc="upper right")


def growth(rows: Rows, axis: Any) -> None:
    """Draw a step without a network, over the size of the bank."""
    for i, batch in enumerate(sorted({row["batch"] for row in rows})):
        some = sorted((row["entries"], row["step_ms"], row["bare_ms"]) for row in rows if row["batch"] == batch)
        entries, step, bare = zip(*some, strict=True)
        axis.plot(entries, step, color=COLOURS[i], marker=MARKERS[i], markersize=4, label=f"batch {batch}")
        axis.plot(entries, bare, color=COLOURS[i], linestyle=(0, DASHES[2]), linewidth=1)
    axis.plot([], [], color=INK, linestyle=(0, DASHES[2]), linewidth=1, label="product, top-k")
    logarithmic(axis, "entries of the bank", "ms")
    title(axis, f"tsd over {rows[0]['dim']} features, no network")


def bank(rows: Rows, axis: Any) -> None:
    """Draw the cost of writing a batch to the bank."""
    classes = [row["classes"] for row in rows]
    ways = {"as released": ("released_write_ms", RELEASED, "s"), "ours": ("write_ms", OURS, "o")}
    for label, (key, colour, marker) in ways.items():
        axis.plot(classes, [row[key] for row in rows], color=colour, marker=marker, markersize=5, label=label)
    for row in rows:
        times, at = row["released_over_write"][1], (row["classes"], row["write_ms"])
        axis.annotate(f"{times:.{0 if times > 9.5 else 1}f}×", at, (0, -13), textcoords="offset points", ha="center")
    logarithmic(axis, "classes", "ms")
    title(axis, "writing a batch to a full bank")


def logarithmic(axis: Any, x: str, y: str) -> None:
    axis.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axis.grid(color="0.9")
    axis.margins(x=0.1)
    low, high = axis.get_ylim()
    axis.set_ylim(low / 3, high * 12)  # room for text
    axis.legend(fontsize=7.5, loc="upper left")


def parts(rows: Rows, axis: Any) -> None:
    """Draw steps that update fewer parameters."""
    axis.barh(range(len(rows)), [row["over_all"][1] for row in rows], color=OURS, **whiskers(rows, "over_all"))
    for i, row in enumerate(rows):
        axis.annotate(
            f"{row['over_all'][1]:.2f}", (0, i), (5, 0), textcoords="offset points", va="center", color="white"
        )
    for key, colour in (("goal", COLOURS[1]), ("floor", INK)):
        axis.vlines(
            [row[key] for row in rows], [i - 0.45 for i in range(len(rows))], [i + 0.45 for i in range(len(rows))],
            color=colour, linewidth=2, linestyle=(0, DASHES[2]) if key == "goal" else "-", label=key,
        )  # fmt: skip
    axis.set_xlim(0, 1)
    named(axis, [row["params"] for row in rows])
    title(axis, f"{rows[0]['network']}, batch {rows[0]['batch']}: part updated")
    axis.set_xlabel("time over that of updating all")
    axis.legend(fontsize=7.5, loc="lower right")


def rows_of(name: str) -> Rows:
    path = RESULTS / f"{name}.json"
    rows: Rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def panels() -> list[list[Panel]]:
    """Return the panels whose results exist, row by row."""
    measured = sorted(rows_of("throughput"), key=lambda row: list(NAMES).index(row["variant"]))
    networks = list(dict.fromkeys(row["network"] for row in rows_of("throughput")))[:ACROSS]
    each = [[row for row in measured if row["network"] == network] for network in networks]
    others = [partial(draw, rows) for draw in (growth, bank, parts) if (rows := rows_of(draw.__name__))]
    lines: list[list[Panel]] = [[partial(draw, rows) for rows in each] for draw in (speed, memory)]
    lines += [list(others[i : i + ACROSS]) for i in range(0, len(others), ACROSS)]
    return [line for line in lines if line]


def figure(lines: list[list[Panel]]) -> Any:
    sheet: Any = Figure(figsize=(WIDE, HIGH * len(lines)), layout="constrained")
    sheet.get_layout_engine().set(h_pad=0.1, w_pad=0.06)
    for i, line in enumerate(lines):
        for j, panel in enumerate(line):
            axis = sheet.add_subplot(len(lines), ACROSS, i * ACROSS + j + 1)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_axisbelow(True)
            panel(axis)
    return sheet


def main() -> None:
    lines = panels()
    with matplotlib.rc_context(FONT):
        sheet = figure(lines)
        if "--quick" in sys.argv:
            sheet.draw_without_rendering()
        else:
            sheet.savefig(FILE, dpi=200)
    print(f"{sum(map(len, lines))} panels" + ("" if "--quick" in sys.argv else f", written: {os.path.relpath(FILE)}"))


if __name__ == "__main__":
    main()
