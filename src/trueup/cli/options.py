"""Flags that several verbs share, and their conversion to settings."""

from __future__ import annotations

import json
import math
from typing import Any

import typer

from trueup.bench.method_spec import parse_assignments
from trueup.data.channels import Normalize, check_normalize
from trueup.data.pictures import RESIZES, Reading

DATASET = typer.Option(None, "--dataset", "-d", help="digits, digits-c, pacs, …, or folder; see `trueup list`.")
ROOT = typer.Option(None, "--root", "-r", help="Folder that holds the dataset's domains.")
TARGET = typer.Option(None, "--target", "-t", help="A domain to adapt to; repeatable; a+b is one stream over both.")
NETWORK = typer.Option(None, "--network", "-n", help="A torchvision or timm name, or your own: module:function.")
WEIGHTS = typer.Option(None, "--weights", "-w", help="none, imagenet, or a file of weights.")
CHECKPOINT = typer.Option(None, "--checkpoint", help="A trained model's file; {target} and {seed} are filled in.")
METHOD = typer.Option(
    None, "--method", "-m", help="A method, optionally with values: tsd:lr=1e-5,guard=true, or tsd:preset=safe."
)
SEED = typer.Option(None, "--seed", "-s", help="Seed of training, stream and adaptation; repeatable.")
STREAM = typer.Option(None, "--stream", help="iid, dirichlet, class-sorted, continual, gradual, mixed, label-shift, …")
BATCH = typer.Option(None, "--batch", "-b", help="Images per batch.")
LIMIT = typer.Option(None, "--limit", help="Use only this many images of the stream.")
RESET = typer.Option(None, "--reset/--no-reset", help="Reset the adapter when the stream enters another domain.")
TRAIN = typer.Option(None, "--train", help="A setting of source training: iterations=150, algorithm=swad, size=112.")
OPTION = typer.Option(None, "--stream-option", help="A setting of the stream: concentration=0.1.")
PLUGIN = typer.Option(None, "--plugin", help="A module to import first, which registers your own methods.")
OUT = typer.Option("runs", "--out", "-o", help="Folder for records and checkpoints.")
CHECKPOINTS = typer.Option(None, "--checkpoints", help="Folder for source models, if not in --out.")
WORKERS = typer.Option(None, "--workers", "-j", min=1, help="Processes at a time; cores are shared among them.")
DEVICE = typer.Option("cpu", "--device", help="cpu, cuda, cuda:1, mps; for training and adaptation.")
JSON = typer.Option(False, "--json", help="Print the result as JSON; nothing else is written to standard output.")

RESIZE = typer.Option(
    None, "--resize", metavar="[squash|crop|pad]",
    help="How pictures become square: squash, crop the centre, or pad with black bars.",
)  # fmt: skip
RANGE = typer.Option(
    None, "--range", metavar="LOW HIGH",
    help="Values of black and white in pictures of more than 8 bits without that information: 0 4095 for 12 bits.",
)  # fmt: skip
Limits = tuple[float, float]
MEAN = typer.Option(
    None, "--mean", metavar="M[,M,M]",
    help="Mean that images are normalised with, of values from 0 to 1: 0.5, or one for each channel.",
)  # fmt: skip
STD = typer.Option(None, "--std", metavar="S[,S,S]", help="Standard deviation for the normalisation; with --mean.")
GREY = typer.Option(None, "--grey", help="The network takes one channel: images are converted to grey.")


def reading(resize: str | None, limits: Limits | None) -> Reading:
    """Return how picture files are read, from the flags."""
    if resize is not None and resize not in RESIZES:
        raise ValueError(f"--resize {resize!r} is unknown: it must be {', '.join(RESIZES)}")
    return Reading(limits, resize)


def normalization(mean: str | None, std: str | None, normalize: str | None = None) -> Normalize | None:
    """Return how images are normalised, from the flags; None if not given."""
    if mean is None and std is None:
        return None if normalize is None else check_normalize(normalize)
    if mean is None or std is None:
        raise ValueError(f"--{'mean' if std is None else 'std'} is given alone: give --mean and --std together")
    if normalize is not None:
        raise ValueError(f"--mean and --std contradict the normalisation {normalize!r}: give one or the other")
    return check_normalize((_numbers("mean", mean), _numbers("std", std)))


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--{name} {text!r} must be one number, or three with commas: 0.485,0.456,0.406") from error


def training_settings(
    training: list[str] | None, resize: str | None, limits: Limits | None,
    mean: str | None = None, std: str | None = None, grey: bool | None = None,
) -> list[str]:  # fmt: skip
    """Return the training settings with those of the flags, which describe the images that networks see."""
    how, words = reading(resize, limits), list(training or [])
    normalize = next((word.partition("=")[2] for word in words if word.partition("=")[0].strip() == "normalize"), None)
    if (mean, std) != (None, None) and (pair := normalization(mean, std, normalize)) is not None:
        words.append(f"normalize={pair if isinstance(pair, str) else [[*part] for part in pair]}")
    words += ["grey=true"] if grey else []
    words += [f"resize={how.resize}"] if how.resize else []
    words += [f"range=[{how.range[0]!r}, {how.range[1]!r}]"] if how.range else []
    return words


def passed(**flags: Any) -> dict[str, Any]:
    """Return the flags that were given, as settings."""
    values = {key: value for key, value in flags.items() if value not in (None, [], ())}
    for key in ("training", "stream_options"):
        if key in values:
            values[key] = parse_assignments(values[key])
    return values


def print_json(content: Any) -> None:
    """Print plain values as JSON; NaN and infinity become null."""
    typer.echo(json.dumps(_finite(content), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_model_flags(model: str | None, given: dict[str, Any]) -> None:
    """Refuse flags that a checkpoint's recipe already sets, and missing ones without a checkpoint."""
    others = [name for name in given if name != "arch"]
    if model is not None and others:
        raise ValueError(f"--{others[0]} cannot be given with --model: the checkpoint sets it")
    missing = [name for name in ("arch", "weights", "classes") if name not in given]
    if model is None and missing:
        raise ValueError(f"--{missing[0]} is missing: give --model, or --arch with --weights and --classes")
