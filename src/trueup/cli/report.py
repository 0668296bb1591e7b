"""`trueup report`: tables of records, and a page to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from trueup.bench.records import Record, read_records
from trueup.report.figures import save
from trueup.report.page import page
from trueup.report.palette import labels_of
from trueup.report.record_figures import plates
from trueup.report.record_rows import done
from trueup.report.render import render
from trueup.report.tables import tables
from trueup.report.traces import Traces

PAGE, FIGURES = "report.html", "figures"


def report(
    folder: str = typer.Argument("runs", help="A folder of sweeps, or a records file."),
    against: str = typer.Option("", "--against", help="Another folder of sweeps, to compare with on the page."),
    figures: bool = typer.Option(False, "--figures", help="Also write each figure as PNG, SVG and PDF."),
    form: str = typer.Option("", "--form", "-f", help="Only the tables: terminal, markdown, latex or csv."),
    metric: str = typer.Option(
        None, "--metric", help="accuracy, macro, ece, nll; dice, hd95, assd; alignment, uniformity; seconds, …"
    ),
    output: str = typer.Option("", "--output", "-O", help="Write the page, or the tables of --form, to this file."),
) -> None:
    """Print the tables of all records and write a page: tables to sort, figures, every run with all its knobs.

    The page is one file that needs no network: FOLDER/report.html. Tables have mean ± deviation over seeds, best and
    second best, and the gain over the source.
    """
    records = read_records(folder)
    if form:
        text = "\n\n".join(render(table, form) for table in tables(records, metric=metric)) + "\n"
        if output:
            Path(output).write_text(text)
            typer.echo(f"wrote {output}")
        elif form == "terminal":
            print_tables(records, metric)
        else:
            typer.echo(text, nl=False)
        return
    if any(done(record) for record in records):
        print_tables(records, metric)
    else:
        typer.echo(f"no run of {len(records)} has come to its end; the page says why")
    for line in write_page(records, Path(folder), against=against, output=output, figures=figures):
        typer.echo(line)


def write_page(
    records: Sequence[Record], folder: Path, *, against: str = "", output: str = "", figures: bool = False
) -> list[str]:
    """Write the page of these records, which lie in a folder, and their figures if wanted: what was written where."""
    other = read_records(against) if against else []
    here = _folder(folder)
    with Console(stderr=True).status("drawing figures"):
        found = plates(records, Traces(folder))
        names = _told_apart(here.resolve(), _folder(Path(against)).resolve())
        text = page(records, found, title=f"Trueup: {names[0]}", against=other, names=names)
        path = Path(output) if output else here / PAGE
        path.write_text(text, encoding="utf-8")
        said = [f"page in {path}"]
        if figures:
            files = [file for plate in found for file in save(plate, here / FIGURES, labels=labels_of(found))]
            said.append(f"{len(files)} files of {len(found)} figures in {here / FIGURES}")
    return said


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _told_apart(one: Path, other: Path) -> tuple[str, str]:
    """The ends of two paths, as short as they can be and differ."""
    for count in range(1, max(len(one.parts), len(other.parts)) + 1):
        ends = ["/".join(path.parts[-count:]) for path in (one, other)]
        if ends[0] != ends[1]:
            break
    return ends[0], ends[1]


def print_tables(records: Sequence[Record], metric: str | None = None) -> None:
    """Tables for the eye; in colour where the terminal has some."""
    console = Console()
    for table in tables(records, metric=metric):
        typer.echo(render(table, "terminal", color=console.is_terminal, width=max(60, console.width)))
        typer.echo()
