"""All verbs of the command line, and error handling."""

from __future__ import annotations

import logging
import sys
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from trueup.cli import bench, compare, data, demo, listing, report, reproduce, run, segment, stress, train
from trueup.cli.progress import stoppable
from trueup.version import __version__

app = typer.Typer(
    name="trueup",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Test-time adaptation for vision models: train source models, stream shifted data, compare methods.",
    epilog="Start with `trueup demo`. For your own comparison: `trueup bench --help`.",
)
app.command("list")(listing.list_all)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("run")(run.run)
app.command("bench", help=bench.HELP)(bench.bench)
app.command("stress", help=stress.HELP)(stress.stress)
app.command("reproduce", help=reproduce.HELP)(reproduce.reproduce)
app.command("compare", help=compare.HELP)(compare.compare)
app.command("report")(report.report)
app.command("segment", help=segment.HELP)(segment.segment)
app.command("demo")(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trueup {__version__}")
        raise typer.Exit


@app.callback()
def settings(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show more log messages, and tracebacks of errors."),
) -> None:
    """Set what applies to all verbs."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s")
    _state.update(verbose=verbose, verb=context.invoked_subcommand)


_state: dict[str, Any] = {"verbose": False, "verb": None}
RESUMABLE = ("train", "run", "bench", "stress", "reproduce", "segment", "demo")


def start() -> None:
    """Run the command line; print an expected error as one sentence, without a traceback."""
    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with stoppable():
            app()
    except (ValueError, OSError, ImportError) as error:
        if _state["verbose"]:
            raise
        stderr.print(f"[bold red]Error:[/] {escape(' '.join(str(error).split()) or type(error).__name__)}")
        sys.exit(2)
    except SystemExit as end:
        if end.code == 130:  # typer's exit code for Ctrl-C
            kept = "Finished work is kept; the same command continues from there."
            stderr.print(f"Stopped. {kept if _state['verb'] in RESUMABLE else 'The same command starts over.'}")
        raise
