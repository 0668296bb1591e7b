"""`trueup data`: cards of datasets, checks of their files, and unpacking of archives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trueup.cli import options
from trueup.cli.options import Flags, Limits
from trueup.cli.progress import make_grid, progress_bar
from trueup.data.archives import folder_for
from trueup.data.archives import unpack_archive as unpack_archive
from trueup.data.cards import CARDS, get_card
from trueup.data.check import ImageReport
from trueup.data.check import check_dataset as check_files
from trueup.data.check_masks import DomainPart, MaskReport, Report
from trueup.data.contact_sheets import draw_sheets
from trueup.data.datasets.mask_datasets import NAMES, ON_DISK, USUAL
from trueup.data.scanning import first_names

app = typer.Typer(help="Cards of the datasets, their archives, and a check of what is on disk.", no_args_is_help=True)
MANY = 12  # columns for classes or structures
LINES = 10  # reasons why files cannot be read


@app.command()
def card(name: str = typer.Argument(help=f"One of: {', '.join(CARDS)}.")) -> None:
    """Show a dataset's card: classes, domains, counts, licence, where to get it."""
    it = get_card(name)
    table = make_grid((), title=it.title, show_header=False)
    domains = ", ".join(f"{domain} {n:,}" for domain, n in it.domains.items())
    classes = f"{it.classes}" + (f": {', '.join(it.class_names)}" if it.class_names else "")
    unit = "cases" if name in NAMES else "images"
    rows = {"classes": classes}
    if name in NAMES:
        structures = ON_DISK[name.removesuffix("-sim")].STRUCTURES
        parts = {scored: " and ".join(it.class_names[k] for k in numbers) for scored, numbers in structures.items()}
        rows["scored"] = ", ".join(s if s == made else f"{s} ({made})" for s, made in parts.items())
    rows |= {unit: f"{it.images:,}", "domains": domains}
    if name in USUAL:
        (source,) = {*USUAL[name].values()}
        rows["usually"] = f"trained on {source}, adapted to {' and '.join(USUAL[name])}"
    if it.range is not None:
        rows["range"] = f"{it.range[0]:g} to {it.range[1]:g}, in files of more than 8 bits"
    for key, value in {**rows, "licence": it.licence, "get it from": it.home, "layout": it.layout}.items():
        table.add_row(f"[dim]{key}[/]", escape(value))
    Console(emoji=False).print(table)


@app.command()
def check(
    name: str = typer.Argument(help=f"One of: {', '.join(CARDS)}, or your own: folder, masks."),
    root: str = typer.Option("", help="The folder that holds the domains."),
    fast: bool = typer.Option(False, "--fast", help="Count files only; do not open them (volumes: read the headers)."),
    limits: Limits = Flags.limits,
    pictures: str = typer.Option(
        "", metavar="DIR", help="For masks: draw some cases of each domain with outlines, into this folder."
    ),
    as_json: bool = Flags.as_json,
) -> None:
    """Report what is missing or wrong, with counts per domain and class. Exit status 1 if there are problems.

    With --json: ok, problems, notes, broken, others, and for each domain the images of each class; for masks its cases,
    slices, sizes and spacings, and for each structure the cases that show it and its share of the pixels.
    """
    if pictures and name in {*CARDS, "folder"} - {*NAMES}:
        raise ValueError(f"{name} has no masks to draw: --pictures is for {', '.join(NAMES)}")
    with progress_bar("opening images") as advance:
        reading = options.reading(None, limits)
        report = check_files(name, root or None, decode_all=not fast, reading=reading, progress=advance)
    drawn = None
    if pictures and isinstance(report, MaskReport):
        cases = {domain: found.cases for domain, found in report.found.items()}
        with progress_bar("drawing") as advance:
            drawn = [str(f) for f in draw_sheets(report.name, cases, report.structures, Path(pictures), advance)]
    if as_json:
        options.print_json(as_values(report, opened=not fast) | ({} if drawn is None else {"drawn": drawn}))
    else:
        _tell_all(Console(emoji=False), report, drawn, fast=fast)  # with emoji, ":train:" becomes a picture
    if report.problems:
        raise typer.Exit(1)


def as_values(report: Report, *, opened: bool) -> dict[str, Any]:
    """Return a report as plain values; `opened` is False if files were only counted."""
    values: dict[str, Any] = {"dataset": report.name, "ok": not report.problems, "opened": opened}
    values |= {key: list(getattr(report, key)) for key in ("problems", "notes", "broken", "others")}
    if isinstance(report, ImageReport):
        return values | {"images": report.images, "classes": list(report.classes), "domains": report.counts}
    assert isinstance(report, MaskReport)
    structures = list(report.structures)
    values |= {"missing": report.missing, "cases": report.cases, "slices": report.slices, "structures": structures}
    values["domains"] = {}
    for name, part in report.parts.items():
        values["domains"][name] = {
            "cases": part.cases,
            "slices": part.slices,
            "read": part.read,
            "structures": {s: {"cases": part.having[s], "share": part.share(s)} for s in structures},
            "sizes": [list(size) for size in sorted(part.sizes)],
            "spacings": [list(spacing) for spacing in sorted(part.spacings)],
        }
    return values


def _tell_all(console: Console, report: Report, drawn: list[str] | None, *, fast: bool) -> None:
    if isinstance(report, MaskReport) and report.parts:
        console.print(_parts(report))
        amounts = {"case": report.cases, "slice": report.slices}
        amounts |= {"structure": len(report.structures), "domain": len(report.found)}
        _tell(console, ", ".join(f"{n:,} {thing}{'s' * (n != 1)}" for thing, n in amounts.items()))
    if isinstance(report, MaskReport) and len(report.structures) > MANY:
        _tell(console, f"· the first {MANY} of {len(report.structures)} structures are shown")
    if isinstance(report, ImageReport):
        console.print(_counts(report))
        _tell(console, f"{report.images:,} images, {len(report.classes)} classes, {len(report.counts)} domains")
    for note in report.notes:
        _tell(console, f"· {note}")
    if drawn is not None:
        _tell(console, f"drawn: {', '.join(drawn) or 'nothing'}")
    if report.others:
        what = "neither images nor masks" if isinstance(report, MaskReport) else "not images"
        _tell(console, f"{len(report.others)} files are {what} and are ignored: {first_names(report.others)}")
    for problem in report.problems:
        console.print(f"[red]✗[/] {escape(problem)}", highlight=False, soft_wrap=True)
    if isinstance(report, MaskReport) and len(report.broken) > 1:
        more = len(report.broken) - LINES
        for line in [*report.broken[:LINES], *([f"and {more} more"] if more > 0 else [])]:
            _tell(console, f"  {line}")
    if not report.problems:
        console.print("[green]✓[/] complete" + (" (files were counted, not opened)" if fast else " and readable"))


@app.command()
def unpack(
    archive: str = typer.Argument(help="A .zip, .tar, .tar.gz, .tar.bz2 or .tar.xz file."),
    sha256: str = typer.Option("", metavar="HEX", help="Its SHA-256 as published; compared first."),
    out: str = typer.Option(
        "", metavar="DIR", help="The new folder. Default: the archive's name, in the current folder."
    ),
    unverified: bool = typer.Option(False, "--unverified", help="Unpack without comparing a SHA-256."),
) -> None:
    """Unpack a dataset's archive, everything or nothing. Links and paths outside the folder are refused."""
    if bool(sha256) == unverified:
        raise ValueError("give either --sha256 HEX, as published with the archive, or --unverified")
    folder = Path(out) if out else folder_for(archive)
    with progress_bar("MB read, then written") as advance:
        done = unpack_archive(
            archive, folder, sha256=sha256 or None, progress=lambda n, of: advance(n // 10**6, of // 10**6)
        )
    console = Console(emoji=False)
    _tell(console, f"{folder}: {done.files:,} file{'s' * (done.files != 1)}, {done.bytes:,} bytes")
    if unverified:
        console.print("[yellow]![/] not verified; compare its SHA-256 with the published one:", soft_wrap=True)
        _tell(console, done.sha256)
    else:
        console.print("[green]✓[/] its SHA-256 matches", highlight=False)


def _tell(console: Console, line: str) -> None:
    console.print(escape(line), highlight=False, soft_wrap=True)


def _counts(report: ImageReport) -> Table:
    """Return a table of domains by classes; only extremes and totals if there are many classes."""
    few_classes = len(report.classes) <= MANY
    heads = map(escape, report.classes) if few_classes else ("fewest in a class", "most")
    table = make_grid(["domain"], [*heads, "all"])
    for domain, counts in report.counts.items():
        values = list(counts.values()) if few_classes else [min(counts.values()), max(counts.values())]
        table.add_row(escape(domain), *(f"{n:,}" for n in values), f"{sum(counts.values()):,}")
    return table


def _parts(report: MaskReport) -> Table:
    """Return a table of parts by structures: the cases that show each, and its share of the pixels."""
    structures = list(report.structures)[:MANY] if any(part.read for part in report.parts.values()) else []
    spaced = any(part.spacings for part in report.parts.values())
    columns = [*structures, *(["pixel, mm", "slice, mm"] if spaced else []), *(["size"] if structures else [])]
    table = make_grid(["domain"], map(escape, ("cases", "slices", *columns)))
    for name, part in report.parts.items():
        cells = [f"{part.having[s]}/{part.read} [dim]{_percent(part.share(s))}[/]" for s in structures]
        if spaced:
            cells += [_range(mm for _, y, x in part.spacings for mm in (y, x)), _range(z for z, _, _ in part.spacings)]
        if structures:
            cells.append(_sizes(part))
        table.add_row(escape(name), f"{part.cases:,}", f"{part.slices:,}", *cells)
    return table


def _percent(share: float) -> str:
    return "–" if not share else "<0.1 %" if share < 0.001 else f"{100 * share:.1f} %"


def _range(values: Iterable[float]) -> str:
    """Format the smallest and the largest value."""
    least_first = sorted({f"{value:.3g}" for value in values}, key=float)
    return "–" if not least_first else "–".join({least_first[0]: 0, least_first[-1]: 0})


def _sizes(part: DomainPart) -> str:
    """Format rows and columns of the smallest and the largest size."""
    by_area = sorted(part.sizes, key=lambda size: size[0] * size[1])
    return " to ".join(dict.fromkeys(f"{h}×{w}" for h, w in (*by_area[:1], *by_area[-1:]))) or "–"
