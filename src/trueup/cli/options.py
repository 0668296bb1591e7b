"""Flags that several verbs share, and their conversion to settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, get_type_hints

import typer

from trueup.bench.method_spec import parse_assignments
from trueup.data.channels import Normalize, check_normalize
from trueup.data.pictures import RESIZES, Reading
from trueup.report.page_markup import jsonable

MODELS = "dataset root target network weights checkpoint training"
PICTURES = "resize limits mean std grey"
Limits = tuple[float, float]
Verb = TypeVar("Verb", bound=Callable[..., None])
flag = partial(typer.Option, None)


class Flags:
    """Flags that several verbs share."""

    dataset: list[str] = flag("--dataset", "-d", help="digits, digits-c, pacs, …, or folder; see `trueup list`.")
    root: str = flag("--root", "-r", help="Folder that holds the dataset's domains.")
    target: list[str] = flag("--target", "-t", help="A domain to adapt to; repeatable; a+b is one stream over both.")
    network: list[str] = flag("--network", "-n", help="A torchvision or timm name, or your own: module:function.")
    weights: str = flag("--weights", "-w", help="none, imagenet, or a file of weights.")
    checkpoint: str = flag("--checkpoint", help="A trained model's file; {target} and {seed} are filled in.")
    training: list[str] = flag(
        "--train", help="A setting of source training: iterations=150, algorithm=swad, size=112."
    )
    resize: str = flag(
        "--resize", metavar="[squash|crop|pad]",
        help="How pictures become square: squash, crop the centre, or pad with black bars.",
    )  # fmt: skip
    limits: Limits = flag(
        "--range", metavar="LOW HIGH",
        help="Values of black and white in pictures of more than 8 bits without that information: 0 4095 for 12 bits.",
    )  # fmt: skip
    mean: str = flag(
        "--mean", metavar="M[,M,M]",
        help="Mean that images are normalised with, of values from 0 to 1: 0.5, or one for each channel.",
    )  # fmt: skip
    std: str = flag("--std", metavar="S[,S,S]", help="Standard deviation for the normalisation; with --mean.")
    grey: bool = flag("--grey", help="The network takes one channel: images are converted to grey.")
    method: list[str] = flag(
        "--method", "-m", help="A method, optionally with values: tsd:lr=1e-5,guard=true, or tsd:preset=safe."
    )
    seed: list[int] = flag("--seed", "-s", help="Seed of training, stream and adaptation; repeatable.")
    stream: list[str] = flag("--stream", help="iid, dirichlet, class-sorted, continual, gradual, mixed, label-shift, …")
    stream_options: list[str] = flag("--stream-option", help="A setting of the stream: concentration=0.1.")
    batch: list[int] = flag("--batch", "-b", help="Images per batch.")
    limit: int = flag("--limit", help="Use only this many images of the stream.")
    reset: bool = flag("--reset/--no-reset", help="Reset the adapter when the stream enters another domain.")
    plugin: list[str] = flag("--plugin", help="A module to import first, which registers your own methods.")
    out: str = typer.Option("runs", "--out", "-o", help="Folder for records and checkpoints.")
    checkpoints: str = flag("--checkpoints", help="Folder for source models, if not in --out.")
    workers: int = flag("--workers", "-j", min=1, help="Processes at a time; cores are shared among them.")
    device: str = typer.Option("cpu", "--device", help="cpu, cuda, cuda:1, mps; for training and adaptation.")
    as_json: bool = typer.Option(
        False, "--json", help="Print the result as JSON; nothing else is written to standard output."
    )


class Single:
    """Some of the flags for verbs that take one value."""

    target: str = typer.Option(..., "--target", "-t", help="The domain to adapt to; a+b is one stream over both.")
    dataset: str = typer.Option("digits", "--dataset", "-d", help="digits, digits-c, pacs, …, or folder.")
    network: str = flag("--network", "-n", help="A torchvision or timm name, or module:function.")
    seed: int = typer.Option(0, "--seed", "-s", help="Seed of training, stream and adaptation.")
    stream: str = typer.Option("iid", "--stream", help="iid, dirichlet, class-sorted, continual, gradual, mixed, …")
    batch: int = flag("--batch", "-b", help="Images per batch.")


def flags_in_order(names: str, single: str = "") -> Callable[[Verb], Verb]:
    """Declare the flags of a verb in the order of --help: its parameters with defaults, and others from Flags.

    Those named in `single` are from Single. Flags that the verb does not name arrive as its `**settings`.
    """

    def declare(verb: Verb) -> Verb:
        own = {name: p.default for name, p in inspect.signature(verb).parameters.items() if p.default is not p.empty}
        declared = []
        for name in names.split():
            owner: Any = verb if name in own else Single if name in single.split() else Flags
            default = own[name] if name in own else getattr(owner, name)
            kind = inspect.Parameter.KEYWORD_ONLY
            declared.append(inspect.Parameter(name, kind, default=default, annotation=get_type_hints(owner)[name]))
        verb.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
        return verb

    return declare


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


def settings_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were given, as settings of a sweep; those of pictures become settings of training."""
    settings = dict(flags)
    resize, limits, mean, std, grey = (settings.pop(name, None) for name in PICTURES.split())
    training = parse_assignments(settings.pop("training", None) or [])
    how = reading(resize, limits)
    if (mean, std) != (None, None) and (pair := normalization(mean, std, training.get("normalize"))) is not None:
        training["normalize"] = pair if isinstance(pair, str) else [[*part] for part in pair]
    training |= passed(grey=grey, resize=how.resize, range=list(how.range or ()))
    settings["stream_options"] = parse_assignments(settings.get("stream_options") or [])
    return passed(**settings, training=training)


def passed(**flags: Any) -> dict[str, Any]:
    """Return the flags that were given."""
    return {name: value for name, value in flags.items() if value not in (None, [], (), {})}


def print_json(content: Any) -> None:
    """Print plain values as JSON; NaN and infinity become null."""
    typer.echo(json.dumps(jsonable(content, lambda _: None), indent=2, allow_nan=False))


def check_model_flags(model: str | None, given: dict[str, Any]) -> None:
    """Refuse flags that a checkpoint's recipe already sets, and missing ones without a checkpoint."""
    others = [name for name in given if name != "arch"]
    if model is not None and others:
        raise ValueError(f"--{others[0]} cannot be given with --model: the checkpoint sets it")
    missing = [name for name in ("arch", "weights", "classes") if name not in given]
    if model is None and missing:
        raise ValueError(f"--{missing[0]} is missing: give --model, or --arch with --weights and --classes")
