"""`trueup segment`: masks for a folder of images, by a model that adapts as it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from torch import nn

from trueup.bench.settings import make_sweep, resolve
from trueup.cli import options
from trueup.cli.progress import bar
from trueup.data.cards import CARDS
from trueup.data.scanning import describe_skipped
from trueup.deploy import Setup, Summary
from trueup.deploy import segment as segment_folder
from trueup.source.checkpoints import load_model, read_checkpoint, recipe_in

HELP = """Write masks for all images in a folder, with a segmenter that adapts to them as it goes.

A mask lies on its image, voxel for voxel. A command that was stopped goes on when it is given again, \
to the same masks as without the stop. Given again later, it does the images that are new.

Pictures are shown whole, with black bars (--resize pad), and slices too unless a field is known: crop them as for \
training. Grey pictures of more than 8 bits are windowed, each by its own percentiles, unless --range is given.

With --volumes the network is 3-D and sees windows (N, 1, X, Y, Z), axes towards right, front and head: it answers \
each batch of windows, then adapts; the mask is that of the blended logits. Values from 0 to 1 are those between \
the 1st and 99th percentile, or --range; --mean and --std normalise them.

Example: trueup segment --model heart.safetensors --images scans --out masks

Example: trueup segment --volumes --arch nets:unet3d --weights unet.pt --classes 3 --images scans --out masks"""
LABEL = typer.Option(None, "--label", help="The name of a label, for its masks; again for the next.")
VOLUMES = typer.Option(False, "--volumes", help="The network is 3-D: a window slides over each volume (needs monai).")
WINDOW = typer.Option(
    None, "--window", metavar="X Y Z", help="Voxels that a 3-D network sees at a time; 96 96 96 if left out."
)
BATCH = typer.Option(
    None, "--batch", "-b", min=1, help="Slices of a volume, or pictures, shown together; 8. Of --volumes, windows; 1."
)
SIDES = (96, 96, 96)
SHOWN = 5  # files that are no images


def segment(
    images: str = typer.Option(
        ..., "--images", "-i", help="A folder of NIfTI, MetaImage, NRRD, PNG, JPEG, TIFF or BMP files, also in folders."
    ),
    out: str = typer.Option(..., "--out", "-o", help="The folder for masks, which are named as the images are."),
    model: str = typer.Option(None, "--model", help="A checkpoint of `trueup train`, for --weights to --multilabel."),
    arch: str = typer.Option(None, "--arch", help="smp:unet/resnet34, …; your own module:function also with --model."),
    weights: str = typer.Option(None, "--weights", "-w", help="Its state dict: a .safetensors or torch.save file."),
    classes: int = typer.Option(None, "--classes", min=1, help="Its outputs: classes with the background, or labels."),
    size: int = typer.Option(None, "--size", min=8, help="Side in pixels of what it sees; 256 if left out."),
    normalize: str = typer.Option(None, "--normalize", help="imagenet (if left out) or half; or --mean, --std."),
    multilabel: bool = typer.Option(None, "--multilabel", help="Its outputs are labels (sigmoid): a mask for each."),
    label: list[str] = LABEL,
    resize: str = options.RESIZE,
    limits: options.Limits = options.RANGE,
    mean: str = options.MEAN,
    std: str = options.STD,
    grey: bool = options.GREY,
    field: float = typer.Option(None, "--field", help="Millimetres of a volume's slices that it sees, in the middle."),
    method: str = typer.Option("tsd", "--method", "-m", help="A method, with values if you like: tsd:lr=1e-5."),
    volumes: bool = VOLUMES,
    window: tuple[int, int, int] = WINDOW,
    overlap: float = typer.Option(None, "--overlap", help="Part of a window that the next sees again; 0.25."),
    batch: int = BATCH,
    seed: int = typer.Option(0, "--seed", "-s", min=0, help="Of adaptation."),
    device: str = options.DEVICE,
    fresh: bool = typer.Option(False, "--fresh", help="Forget what was done and learnt; masks are replaced."),
) -> None:
    """Write masks for all images in a folder, with a segmenter that adapts to them as it goes."""
    foreign = {"arch": arch, "weights": weights, "classes": classes}
    seen = {"size": size, "normalize": normalize, "mean": mean, "std": std, "grey": grey, "multilabel": multilabel}
    refuse_others(volumes, model=model, size=size, grey=grey, window=window, overlap=overlap)
    network, settings = open_model(model, volumes=volumes, **foreign, **seen)
    settings |= options.given(labels=tuple(label or ()), field=field, resize=resize, range=limits, overlap=overlap)
    settings |= {"window": window or SIDES, "batch": batch or 1} if volumes else options.given(batch=batch)
    name, hyper = parse_method(method)
    setup = Setup(network, **settings, method=name, hyper=hyper, seed=seed, device=device)
    with bar("images") as advance:
        summary = segment_folder(setup, images, out, fresh=fresh, progress=advance)
    tell(summary, name, out, "volumes" if volumes else "images")
    if model is not None and (legend := _legend(Path(model))):
        Console(highlight=False, soft_wrap=True).print(f"values in them: {legend}")
    if summary.broken:
        raise typer.Exit(1)


def refuse_others(volumes: bool, **flags: Any) -> None:
    """Refuse flags of networks that are 3-D where it is not, and the other way round."""
    given = options.given(**flags)
    if volumes and "model" in given:
        raise ValueError("--model is of `trueup train`, whose networks are 2-D: give --arch, --weights and --classes")
    if others := [name for name in (("size", "grey") if volumes else ("window", "overlap")) if name in given]:
        why = (
            "does not go with --volumes: a 3-D network sees one channel, in a --window"
            if volumes
            else "is of --volumes"
        )
        raise ValueError(f"--{others[0]} {why}")


def open_model(model: str | None, *, volumes: bool = False, **flags: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The segmenter, and what it wants to see; `flags` are those of a network of others."""
    given = options.given(**flags)
    if model is not None:
        if others := [name for name in given if name != "arch"]:
            raise ValueError(f"--{others[0]} does not go with --model: the checkpoint says it")
        network, settings = _ours(Path(model), given.get("arch"))
    else:
        if missing := [name for name in ("arch", "weights", "classes") if name not in given]:
            raise ValueError(f"--{missing[0]} is missing: give --model, or --arch with --weights and --classes")
        if recipe_in(given["weights"]) is not None:
            raise ValueError(f"{given['weights']} holds its recipe: give it as --model, without --arch")
        settings = {key: given[key] for key in ("size", "grey", "multilabel") if key in given}
        normalize = options.normalization(given.get("mean"), given.get("std"), given.get("normalize"))
        settings |= options.given(normalize=normalize)
        channels = 1 if volumes or given.get("grey") else 3
        network = load_model(given["weights"], given["arch"], given["classes"], given.get("size", Setup.size), channels)
    if volumes:
        return network, settings
    if any(parameter.ndim > 4 for parameter in network.parameters()):
        raise ValueError(f"{given['arch']} is a 3-D network: say --volumes")
    return network.to(memory_format=torch.channels_last), settings  # as images come; convolutions are faster this way


def _ours(path: Path, arch: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """A model of ours, and what its recipe says; a function of the user's own is called only if the user names it."""
    from trueup.data.datasets.mask_datasets import NAMES, ON_DISK

    recipe = recipe_in(path)
    if recipe is None:
        raise ValueError(f"{path} holds no recipe of trueup's: give --arch, --weights and --classes instead of --model")
    if recipe.dataset not in NAMES:
        raise ValueError(f"{path} was trained on {recipe.dataset} and tells images apart; masks take a segmenter")
    if arch not in (None, recipe.network):
        raise ValueError(f"{path} is a {recipe.network}, not a {arch}: leave --arch out, or say {recipe.network}")
    network, _ = read_checkpoint(path, arch)
    training, known = recipe.training, ON_DISK.get(recipe.dataset.removesuffix("-sim"))
    settings: dict[str, Any] = training.model_dump(include={"size", "normalize", "multilabel", "grey"})
    settings |= options.given(resize=training.resize, range=training.range)
    if recipe.dataset in ON_DISK:
        settings["field"] = getattr(known, "FIELD", None)  # photographs have none
    if training.multilabel and known is not None:
        settings["labels"] = tuple(known.STRUCTURES)
    return network, settings


def _legend(path: Path) -> str:
    """What the numbers in masks mean, if the recipe's dataset has names for them."""
    recipe = recipe_in(path)
    card = CARDS.get(recipe.dataset) if recipe is not None and not recipe.training.multilabel else None
    return ", ".join(f"{k} {name}" for k, name in enumerate(card.class_names)) if card is not None else ""


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """The name and all hyper-parameters of "tsd:lr=1e-5"."""
    name, hyper = (make_sweep({"method": [text]}).method or [])[0]
    return name, resolve(name, hyper, "default", "segmentation")


def tell(summary: Summary, method: str, out: str, what: str = "images") -> None:
    """Say what was done, and what could not be."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, reason in summary.broken.items():
        console.print(f"left out, cannot be read: {name} ({reason})", style="red")
    if others := summary.others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        console.print(f"no {what}: {', '.join(others[:SHOWN])}{more}")
    if summary.left_out:
        console.print(f"left out: {describe_skipped(summary.left_out)}")
    if summary.skipped:
        console.print(f"{len(summary.skipped)} {what} were done before")
    console.print(f"{summary.masks} masks in {out}; {method}, {summary.updates} updates so far")
