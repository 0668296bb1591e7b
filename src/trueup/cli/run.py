"""`trueup run`: one run, in this process."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console

from trueup.bench import sweep
from trueup.cli.options import PICTURES, flags_in_order, settings_of


@flags_in_order(
    f"method target dataset root network weights checkpoint training {PICTURES} seed stream stream_options batch limit "
    "reset select plugin out checkpoints device",
    single="target dataset network seed stream batch",
)
def run(
    method: str = typer.Argument("tsd", help="A method, optionally with values: tsd:lr=1e-5,per_class=20."),
    select: str = typer.Option("default", "--select", help="default, source (searched), oracle."),
    *, out: str, checkpoints: str | None, device: str, **settings: Any,
) -> None:  # fmt: skip
    """Run one method on one stream and print its record; a missing source model is trained first."""
    flags = settings_of(settings | {"method": [method], "select": select})
    with Console(stderr=True).status("running"):
        record = sweep.run(out, checkpoints=checkpoints, device=device, **flags)
    typer.echo(json.dumps(record, indent=2))
