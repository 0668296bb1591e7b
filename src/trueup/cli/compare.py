"""`trueup compare`: several methods on a model and images of one's own, without labels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from trueup.augment import pixels_of
from trueup.bench.settings import PAPER, make_sweep, resolve
from trueup.bench.sweep import check_device
from trueup.cli import options
from trueup.cli.progress import bar
from trueup.core.method import Method
from trueup.core.registry import make_method
from trueup.data.cards import CARDS
from trueup.data.domains import FileDomain
from trueup.data.loading import NORMALIZE, Loader, Place
from trueup.data.streams import batches
from trueup.deploy.compare import Advice, Finding, advise, look
from trueup.source.checkpoints import load_model, read_checkpoint, recipe_in

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
USUAL = tuple(name for name in PAPER if name != "source")
SHUFFLE = typer.Option(
    None, "--shuffle/--no-shuffle", help="In random order, or by the files' names; random if left out and in folders."
)
SHOWN = 3  # folders that are named
NOTE = (
    "AETTA (Lee et al., 2024), GDE (Jiang et al., 2022): accuracy estimated without labels, by dropout; "
    "they say which is better, more than how good"
)


@dataclass(frozen=True)
class Photos:
    """The images below a folder, and what its folders are."""

    domain: FileDomain
    labelled: bool
    nested: bool
    said: str


def compare(
    data: str = typer.Option(..., "--data", "-i", help="A folder of images, also in folders; of classes, if labelled."),
    model: str = typer.Option(None, "--model", help="A checkpoint of `trueup train`, in place of --arch to --size."),
    arch: str = typer.Option(None, "--arch", help="resnet50, timm/vit_base_patch16_224, or your own module:function."),
    weights: str = typer.Option(None, "--weights", "-w", help="Its state dict: a .safetensors or torch.save file."),
    classes: int = typer.Option(None, "--classes", min=2, help="Its classes."),
    size: int = typer.Option(None, "--size", min=8, help="Side in pixels of what it sees; 224 if left out."),
    normalize: str = typer.Option(None, "--normalize", help="imagenet (if left out) or half."),
    method: list[str] = options.METHOD,
    batch: int = typer.Option(64, "--batch", "-b", min=1, help="Images per batch."),
    limit: int = typer.Option(None, "--limit", min=1, help="Only the first so many images."),
    shuffle: bool = SHUFFLE,
    seed: int = typer.Option(0, "--seed", "-s", min=0, help="Of adaptation and order."),
    device: str = options.DEVICE,
) -> None:
    """Try several methods on your own model and unlabelled images, and recommend one, with reasons.

    It shows how often each agrees with the frozen source, how sure it is, how many classes it uses, and two estimates
    of its accuracy without labels. AETTA: how often dropout changes its answers. GDE: how often a second run, with
    features dropped, agrees; that works for all methods. Both rank methods better than they hit the number.

    Folders that are the model's classes count as labels; if its classes have no names here, as many folders as it has
    classes do, in the order of their names. Then the accuracy is shown and decides.

    Example: trueup compare --model model.safetensors --data photos
    """
    check_device(device)
    methods = methods_of(method or list(USUAL))
    network, seen = open_classifier(model, arch=arch, weights=weights, classes=classes, size=size, normalize=normalize)
    photos = find_images(Path(data), seen["classes"], seen["names"])
    mixed, every = photos.nested if shuffle is None else shuffle, np.arange(len(photos.domain.labels))
    order = (np.random.default_rng(seed).permutation(every) if mixed else every)[:limit]
    loader = Loader(Place([photos.domain]), seen["size"], seen["normalize"], keep=True, device=device)
    findings = watch(network, methods, photos, loader, list(batches(order, batch)), device=device, seed=seed)
    images = len(order) - len(loader.broken)
    way = "in random order (--no-shuffle: by name)" if mixed else "in the order of their names (--shuffle: random)"
    said = f"{images} {'image' if images == 1 else 'images'} {way}; {photos.said}"
    tell(findings, advise(findings), broken=len(loader.broken), said=said)


def watch(
    network: nn.Module, methods: dict[str, Method], photos: Photos, loader: Loader,
    stream: list[NDArray[np.int64]], **how: Any,
) -> list[Finding]:  # fmt: skip
    """Run the methods over the images in this order, with a bar."""

    def shown() -> Iterator[tuple[Tensor, NDArray[np.int64] | None]]:
        for x, at in loader.batches(stream):
            yield x, photos.domain.labels[at] if photos.labelled else None

    pixels = pixels_of(*NORMALIZE[loader.normalize])
    with bar("batches") as advance:
        done, total = iter(range(1, 10**9)), 2 * len(stream) * len(methods)
        return look(network, methods, shown, pixels=pixels, tick=lambda: advance(next(done), total), **how)


def open_classifier(model: str | None, **flags: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The classifier, and what it wants to see; `flags` are those of a network of others."""
    from trueup.data.datasets.masked import NAMES

    given = options.given(**flags)
    if model is not None:
        if others := [name for name in given if name != "arch"]:
            raise ValueError(f"--{others[0]} does not go with --model: the checkpoint says it")
        recipe = recipe_in(Path(model))
        if recipe is None:
            raise ValueError(f"{model} holds no recipe of trueup's: give --arch, --weights and --classes instead")
        if recipe.dataset in NAMES:
            raise ValueError(f"{model} was trained on {recipe.dataset} and makes masks: compare takes a classifier")
        network, _ = read_checkpoint(Path(model), given.get("arch"))
        card = CARDS.get(recipe.dataset)
        seen: dict[str, Any] = {
            "classes": recipe.classes,
            "names": card.class_names if card is not None and len(card.class_names) == recipe.classes else (),
            "size": recipe.training.size,
            "normalize": recipe.training.normalize,
        }
    else:
        if missing := [name for name in ("arch", "weights", "classes") if name not in given]:
            raise ValueError(f"--{missing[0]} is missing: give --model, or --arch with --weights and --classes")
        seen = {"size": 224, "normalize": "imagenet", "names": (), **given}
        if seen["normalize"] not in NORMALIZE:
            raise ValueError(f"--normalize {seen['normalize']!r} is not known: it must be {' or '.join(NORMALIZE)}")
        network = load_model(seen["weights"], seen["arch"], seen["classes"], seen["size"])
        seen = {key: seen[key] for key in ("classes", "names", "size", "normalize")}
    return network.to(memory_format=torch.channels_last), seen


def find_images(folder: Path, classes: int, names: Sequence[str] = ()) -> Photos:
    """The images below a folder, sorted by name, and what its folders are; `names` are those of the classes, if any."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    found = sorted(
        os.path.relpath(Path(where) / name, folder)
        for where, _, files in os.walk(folder)
        for name in files
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    )
    if not found:
        raise ValueError(f"{folder} holds no images ({', '.join(SUFFIXES)})")
    firsts = [Path(name).parts[0] if len(Path(name).parts) > 1 else "" for name in found]
    numbers, said = _number(sorted(set(firsts)), classes, [name.casefold() for name in names])
    labels = np.array([numbers.get(first, 0) for first in firsts], dtype=np.int64)
    return Photos(FileDomain(folder.name, folder, found, labels), bool(numbers), any(firsts), said)


def _number(folders: list[str], classes: int, names: list[str]) -> tuple[dict[str, int], str]:
    """The class of each folder, if they are classes, and a word on it; "" is where images lie in none."""
    if folders == [""]:
        return {}, "no folders: no labels"
    if folders[0] == "":
        return {}, "some images lie in no folder: no labels"
    many = "1 folder" if len(folders) == 1 else f"{len(folders)} folders"
    if names and all(folder.casefold() in names for folder in folders):
        what = "the model's classes" if len(folders) == classes else f"some of the model's {classes} classes"
        return {folder: names.index(folder.casefold()) for folder in folders}, f"{many} that are {what}: labels"
    if not names and len(folders) == classes:
        return {folder: k for k, folder in enumerate(folders)}, f"{many}, as many as classes: labels, by their order"
    listed = ", ".join(folders[:SHOWN]) + (", …" if len(folders) > SHOWN else "")
    return {}, f"folders are not the model's {classes} classes ({listed}): no labels"


def methods_of(texts: list[str]) -> dict[str, Method]:
    """The methods as people write them; the frozen source is always the first."""
    import yaml

    made: dict[str, Method] = {"source": make_method("source", {})}
    for text in texts:
        try:
            name, hyper = (make_sweep({"method": [text]}).method or [])[0]
        except yaml.YAMLError as error:
            raise ValueError(f"-m {text}: a value cannot be read; quote it within: params='[bf].*'") from error
        if "guard" in hyper or "preset" in hyper:
            raise ValueError(f"{text}: compare runs methods as they are; `trueup stress` has guards and presets")
        made[text] = make_method(name, resolve(name, hyper, "default"))
    return made


def tell(findings: list[Finding], advice: Advice, *, broken: int, said: str) -> None:
    """Print what was found, and what follows from it."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    labelled = any(finding.accuracy is not None for finding in findings)
    heads = ["AETTA %", "GDE %", "agreement %", "confidence %", "entropy", "classes", "seconds"]
    for name in ["method", *(["accuracy %"] if labelled else []), *heads]:
        table.add_column(name, justify="left" if name == "method" else "right")
    for f in findings:
        numbers = [f.accuracy] if labelled else []
        parts = [*numbers, f.aetta, f.gde, f.agreement, f.confidence]
        percents = ["–" if part is None else f"{100 * part:.1f}" for part in parts]
        table.add_row(escape(f.name), *percents, f"{f.entropy:.2f}", f"{f.classes:.1f}", f"{f.seconds:.1f}")
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    console.print(said, markup=False)
    console.print(table)
    if broken:
        console.print(f"{broken} images could not be read and are left out", style="red")
    console.print(f"\ntake [bold]{escape(advice.name)}[/]")
    for reason in advice.reasons:
        console.print(f"• {reason}", markup=False)
    console.print(NOTE, style="dim")
