"""`trueup run`: one run, in this process."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from trueup.bench import sweep
from trueup.cli import options


def run(
    method: str = typer.Argument("tsd", help="A method, optionally with values: tsd:lr=1e-5,per_class=20."),
    target: str = typer.Option(..., "--target", "-t", help="The domain to adapt to; a+b is one stream over both."),
    dataset: str = typer.Option("digits", "--dataset", "-d", help="digits, digits-c, pacs, …, or folder."),
    root: str = options.ROOT,
    network: str = typer.Option(None, "--network", "-n", help="A torchvision or timm name, or module:function."),
    weights: str = options.WEIGHTS,
    checkpoint: str = options.CHECKPOINT,
    training: list[str] = options.TRAIN,
    resize: str = options.RESIZE,
    limits: options.Limits = options.RANGE,
    mean: str = options.MEAN,
    std: str = options.STD,
    grey: bool = options.GREY,
    seed: int = typer.Option(0, "--seed", "-s", help="Seed of training, stream and adaptation."),
    stream: str = typer.Option("iid", "--stream", help="iid, dirichlet, class-sorted, continual, gradual, mixed, …"),
    stream_options: list[str] = options.OPTION,
    batch: int = typer.Option(None, "--batch", "-b", help="Images per batch."),
    limit: int = options.LIMIT,
    reset: bool = options.RESET,
    select: str = typer.Option("default", "--select", help="default, source (searched), oracle."),
    plugin: list[str] = options.PLUGIN,
    out: str = options.OUT,
    checkpoints: str = options.CHECKPOINTS,
    device: str = options.DEVICE,
) -> None:
    """Run one method on one stream and print its record; a missing source model is trained first."""
    training = options.training_settings(training, resize, limits, mean, std, grey)
    settings = options.passed(
        dataset=dataset, root=root, target=target, network=network, weights=weights, checkpoint=checkpoint,
        training=training, seed=seed, stream=stream, stream_options=stream_options, batch=batch, limit=limit,
        reset=reset, select=select, plugin=plugin,
    )  # fmt: skip
    settings["method"] = [method]
    with Console(stderr=True).status("running"):
        record = sweep.run(out, checkpoints=checkpoints, device=device, **settings)
    typer.echo(json.dumps(record, indent=2))
