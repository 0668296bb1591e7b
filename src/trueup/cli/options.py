"""Flags that several verbs share, and how they become settings."""

from __future__ import annotations

from typing import Any

import typer

from trueup.bench.specs import name_value

DATASET = typer.Option(None, "--dataset", "-d", help="digits, digits-c, pacs, …, or folder; see `trueup list`.")
ROOT = typer.Option(None, "--root", "-r", help="The folder that holds the dataset's domains.")
TARGET = typer.Option(None, "--target", "-t", help="A domain to adapt to; again for more; a+b is one stream over both.")
NETWORK = typer.Option(None, "--network", "-n", help="A torchvision or timm name, or your own: module:function.")
WEIGHTS = typer.Option(None, "--weights", "-w", help="none, imagenet, or a file of weights.")
CHECKPOINT = typer.Option(None, "--checkpoint", help="A trained model's file; {target} and {seed} are filled in.")
METHOD = typer.Option(
    None, "--method", "-m", help="A method, with values if you like: tsd:lr=1e-5,guard=true, or tsd:preset=safe."
)
SEED = typer.Option(None, "--seed", "-s", help="Of training, stream and adaptation; again for more.")
STREAM = typer.Option(None, "--stream", help="iid, dirichlet, class-sorted, continual, gradual, mixed, label-shift, …")
BATCH = typer.Option(None, "--batch", "-b", help="Images per batch.")
LIMIT = typer.Option(None, "--limit", help="Only the first so many images of the stream.")
RESET = typer.Option(None, "--reset/--no-reset", help="Start afresh wherever the stream enters another domain.")
TRAIN = typer.Option(None, "--train", help="A setting of source training: iterations=150, algorithm=swad, size=112.")
OPTION = typer.Option(None, "--stream-option", help="A setting of the stream: concentration=0.1.")
PLUGIN = typer.Option(None, "--plugin", help="A module to import first, which registers methods of your own.")
OUT = typer.Option("runs", "--out", "-o", help="The folder for records and checkpoints.")
CHECKPOINTS = typer.Option(None, "--checkpoints", help="Where source models are kept, if not in --out.")
WORKERS = typer.Option(None, "--workers", "-j", min=1, help="Processes at a time; cores are shared among them.")
DEVICE = typer.Option("cpu", "--device", help="cpu, cuda, cuda:1, mps; for training and adaptation.")


def given(**flags: Any) -> dict[str, Any]:
    """The flags that were given, as settings."""
    values = {key: value for key, value in flags.items() if value not in (None, [], ())}
    for key in ("training", "stream_options"):
        if key in values:
            values[key] = name_value(values[key])
    return values
