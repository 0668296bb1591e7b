"""`trueup report`: tables of records, and an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from trueup.bench.records import Record, read_records
from trueup.cli.progress import print_table
from trueup.report.figures import save_figure
from trueup.report.groups import Traces
from trueup.report.page import render_page
from trueup.report.palette import curve_labels
from trueup.report.record_figures import make_figures
from trueup.report.render import render_table
from trueup.report.runs import is_finished
from trueup.report.tables import make_tables

PAGE, FIGURES = "report.html", "figures"


def report(
    folder: str = typer.Argument("runs", help="A folder of sweeps, or a records file."),
    against: str = typer.Option("", "--against", help="Another folder of sweeps to compare with on the page."),
    figures: bool = typer.Option(False, "--figures", help="Also write each figure as PNG, SVG and PDF."),
    form: str = typer.Option("", "--form", "-f", help="Only the tables: terminal, markdown, latex or csv."),
    metric: str = typer.Option(
        None, "--metric", help="accuracy, macro, ece, nll; dice, hd95, assd; alignment, uniformity; seconds, …"
    ),
    output: str = typer.Option("", "--output", "-O", help="Write the page, or the tables of --form, to this file."),
) -> None:
    """Print the tables of all records, and write a page with sortable tables, figures and all settings of every run.

    The page is one file that works offline: FOLDER/report.html. Tables have mean ± deviation over seeds, best and
    second best, and the gain over the source.
    """
    records = read_records(folder)
    if form:
        text = "\n\n".join(render_table(table, form) for table in make_tables(records, metric=metric)) + "\n"
        if output:
            Path(output).write_text(text)
            typer.echo(f"wrote {output}")
        elif form == "terminal":
            print_tables(records, metric)
        else:
            typer.echo(text, nl=False)
        return
    if any(is_finished(record) for record in records):
        print_tables(records, metric)
    else:
        typer.echo(f"none of {len(records)} runs has finished; the page shows their errors")
    for line in write_page(records, Path(folder), against=against, output=output, figures=figures):
        typer.echo(line)


def write_page(
    records: Sequence[Record], folder: Path, *, against: str = "", output: str = "", figures: bool = False
) -> list[str]:
    """Write the page of the records in a folder, and optionally the figures; return a line on each."""
    other = read_records(against) if against else []
    here = _folder(folder)
    with Console(stderr=True).status("drawing figures"):
        specs = make_figures(records, Traces(folder))
        names = _short_names(here.resolve(), _folder(Path(against)).resolve())
        text = render_page(records, specs, title=f"Trueup: {names[0]}", against=other, names=names)
        path = Path(output) if output else here / PAGE
        path.write_text(text, encoding="utf-8")
        lines = [f"page in {path}"]
        if figures:
            labels = curve_labels(specs)
            files = [file for spec in specs for file in save_figure(spec, here / FIGURES, labels=labels)]
            lines.append(f"{len(files)} files of {len(specs)} figures in {here / FIGURES}")
    return lines


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _short_names(one: Path, other: Path) -> tuple[str, str]:
    """Return the shortest ends of two paths that differ."""
    for count in range(1, max(len(one.parts), len(other.parts)) + 1):
        ends = ["/".join(path.parts[-count:]) for path in (one, other)]
        if ends[0] != ends[1]:
            break
    return ends[0], ends[1]


def print_tables(records: Sequence[Record], metric: str | None = None) -> None:
    """Print the tables of records."""
    for table in make_tables(records, metric=metric):
        print_table(table)
        typer.echo()
