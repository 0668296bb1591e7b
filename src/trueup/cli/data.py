"""`trueup data`: what a dataset should be, and whether it is."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from trueup.cli.progress import bar
from trueup.data.cards import CARDS, get_card
from trueup.data.check import Report
from trueup.data.check import check as check_files

app = typer.Typer(help="Cards of the datasets, and a check of what is on disk.", no_args_is_help=True)


@app.command()
def card(name: str = typer.Argument(help=f"One of: {', '.join(CARDS)}.")) -> None:
    """Show a dataset's card: classes, domains, counts, licence, where to get it."""
    it = get_card(name)
    table = Table(title=it.title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    domains = ", ".join(f"{domain} {n:,}" for domain, n in it.domains.items())
    classes = f"{it.classes}" + (f": {', '.join(it.class_names)}" if it.class_names else "")
    rows = {"classes": classes, "images": f"{it.images:,}", "domains": domains, "licence": it.licence}
    for key, value in {**rows, "get it from": it.home, "layout": it.layout}.items():
        table.add_row(f"[dim]{key}[/]", value)
    Console().print(table)


@app.command()
def check(
    name: str = typer.Argument(help=f"One of: {', '.join(CARDS)}, or folder."),
    root: str = typer.Option("", help="The folder that holds the domains."),
    fast: bool = typer.Option(False, "--fast", help="Count files only; do not open them."),
) -> None:
    """Say what is missing or wrong, with counts per domain and class. Exit status 1 if anything is."""
    with bar("opening images") as advance:
        report = check_files(name, root or None, decode_all=not fast, progress=advance)
    console = Console()
    console.print(_counts(report))
    console.print(
        f"{report.images:,} images, {len(report.classes)} classes, {len(report.counts)} domains", highlight=False
    )
    if report.others:
        console.print(f"{len(report.others)} files are no images and are left out: {', '.join(report.others[:5])} …")
    for problem in report.problems:
        console.print(f"[red]✗[/] {problem}", highlight=False, soft_wrap=True)
    if report.problems:
        raise typer.Exit(1)
    console.print("[green]✓[/] as it should be" + (" (files were counted, not opened)" if fast else ""))


def _counts(report: Report) -> Table:
    """Domains down, classes across; totals alone where there are many classes."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("domain")
    few = len(report.classes) <= 12
    for label in report.classes if few else ("fewest in a class", "most"):
        table.add_column(label, justify="right")
    table.add_column("all", justify="right")
    for domain, counts in report.counts.items():
        values = list(counts.values()) if few else [min(counts.values()), max(counts.values())]
        table.add_row(domain, *(f"{n:,}" for n in values), f"{sum(counts.values()):,}")
    return table
