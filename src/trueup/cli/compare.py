"""`trueup compare`: several methods on a model and images of one's own, without labels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from trueup.augment import pixels_of
from trueup.bench.settings import PAPER, make_sweep, resolve
from trueup.cli import options
from trueup.cli.progress import bar
from trueup.core.method import Method
from trueup.core.registry import make_method
from trueup.data.domains import FileDomain
from trueup.data.loading import NORMALIZE, Loader, Place
from trueup.data.streams import batches
from trueup.deploy.compare import Advice, Finding, advise, look
from trueup.source.checkpoints import load_model, read_checkpoint, recipe_in

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
USUAL = tuple(name for name in PAPER if name != "source")


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
    limit: int = options.LIMIT,
    shuffle: bool = typer.Option(False, "--shuffle", help="In random order; else in the order of the files' names."),
    seed: int = typer.Option(0, "--seed", "-s", min=0, help="Of adaptation and order."),
    device: str = options.DEVICE,
) -> None:
    """Try several methods on your own model and unlabelled images, and recommend one, with reasons.

    It shows how often each agrees with the frozen source, how sure it is, how many classes it uses, and an estimate
    of its accuracy without labels (AETTA: how often dropout changes its answers), which ranks methods better than it
    hits the number. If there are as many folders as the model has classes, they count as labels, in the order of
    their names, and the accuracy is shown, too.

    Example: trueup compare --model model.safetensors --data photos
    """
    network, seen = open_classifier(model, arch=arch, weights=weights, classes=classes, size=size, normalize=normalize)
    domain, labelled = find_images(Path(data), seen.pop("classes"))
    order = np.random.default_rng(seed).permutation(len(domain.labels)) if shuffle else np.arange(len(domain.labels))
    stream = list(batches(order[:limit], batch))
    loader = Loader(Place([domain]), seen["size"], seen["normalize"], keep=True, device=device)
    methods = methods_of(method or list(USUAL))

    def shown() -> Iterator[tuple[Tensor, NDArray[np.int64] | None]]:
        for x, at in loader.batches(stream):
            yield x, domain.labels[at] if labelled else None

    with bar("batches") as advance:
        done = iter(range(1, 10**9))
        total = len(stream) * len(methods)
        pixels = pixels_of(*NORMALIZE[seen["normalize"]])
        findings = look(
            network, methods, shown, device=device, seed=seed, pixels=pixels, tick=lambda: advance(next(done), total)
        )
    tell(findings, advise(findings), broken=len(loader.broken))


def open_classifier(model: str | None, **flags: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The classifier, and what it wants to see; `flags` are those of a network of others."""
    given = options.given(**flags)
    if model is not None:
        if others := [name for name in given if name != "arch"]:
            raise ValueError(f"--{others[0]} does not go with --model: the checkpoint says it")
        recipe = recipe_in(Path(model))
        if recipe is None:
            raise ValueError(f"{model} holds no recipe of trueup's: give --arch, --weights and --classes instead")
        network, _ = read_checkpoint(Path(model), given.get("arch"))
        seen: dict[str, Any] = {
            "classes": recipe.classes,
            "size": recipe.training.size,
            "normalize": recipe.training.normalize,
        }
    else:
        if missing := [name for name in ("arch", "weights", "classes") if name not in given]:
            raise ValueError(f"--{missing[0]} is missing: give --model, or --arch with --weights and --classes")
        seen = {"size": 224, "normalize": "imagenet", **given}
        network = load_model(seen["weights"], seen["arch"], seen["classes"], seen["size"])
        seen = {key: seen[key] for key in ("classes", "size", "normalize")}
    return network.to(memory_format=torch.channels_last), seen


def find_images(folder: Path, classes: int) -> tuple[FileDomain, bool]:
    """The images below a folder, sorted by name, and whether its folders are labels."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    found = sorted(
        os.path.relpath(Path(where) / name, folder)
        for where, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    )
    if not found:
        raise ValueError(f"{folder} holds no images ({', '.join(SUFFIXES)})")
    tops = sorted({Path(name).parts[0] for name in found if len(Path(name).parts) > 1})
    labelled = len(tops) == classes and all(len(Path(name).parts) > 1 for name in found)
    labels = [tops.index(Path(name).parts[0]) if labelled else 0 for name in found]
    return FileDomain(folder.name, folder, found, np.array(labels, dtype=np.int64)), labelled


def methods_of(texts: list[str]) -> dict[str, Method]:
    """The methods as people write them; the frozen source is always the first."""
    made: dict[str, Method] = {"source": make_method("source", {})}
    for text in texts:
        name, hyper = (make_sweep({"method": [text]}).method or [])[0]
        if "guard" in hyper or "preset" in hyper:
            raise ValueError(f"{text}: compare runs methods as they are; `trueup stress` has guards and presets")
        made[text] = make_method(name, resolve(name, hyper, "default"))
    return made


def tell(findings: list[Finding], advice: Advice, *, broken: int) -> None:
    """Print what was found, and what follows from it."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    labelled = any(finding.accuracy is not None for finding in findings)
    heads = ["estimate %", "agreement %", "confidence %", "entropy", "classes", "seconds"]
    for name in ["method", *(["accuracy %"] if labelled else []), *heads]:
        table.add_column(name, justify="left" if name == "method" else "right")
    for f in findings:
        numbers = [f.accuracy] if labelled else []
        parts = [*numbers, f.estimate, f.agreement, f.confidence]
        percents = ["–" if part is None else f"{100 * part:.1f}" for part in parts]
        table.add_row(f.name, *percents, f"{f.entropy:.2f}", f"{f.classes:.1f}", f"{f.seconds:.1f}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if broken:
        console.print(f"{broken} images could not be read and are left out", style="red")
    console.print(f"\ntake [bold]{advice.name}[/]")
    for reason in advice.reasons:
        console.print(f"• {reason}", markup=False)
    console.print("estimate: without labels, by dropout; it says which is better, more than how good", style="dim")
