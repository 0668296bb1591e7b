"""`trueup segment`: masks for a folder of images, from an adapting segmenter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from torch import nn

from trueup.bench.method_spec import read_specs
from trueup.bench.settings import resolve_hyper
from trueup.cli import options
from trueup.cli.options import Flags, Limits
from trueup.cli.progress import progress_bar
from trueup.data.cards import CARDS
from trueup.data.scanning import describe_skipped
from trueup.deploy import SegmentConfig, SegmentSummary, segment_folder
from trueup.source.checkpoints import load_model, read_checkpoint, recipe_in

HELP = """Write masks for all images in a folder, with a segmenter that adapts to them.

A mask has the voxel grid of its image. A stopped command resumes when it is run again, with the same masks as without \
the stop. Run again later, it segments new images.

Pictures are shown whole, with black bars (--resize pad), and so are slices unless a field is known: crop them as for \
training. Grey pictures of more than 8 bits are scaled by their percentiles, unless --range is given.

With --volumes the network is 3-D and sees windows (N, 1, X, Y, Z), with axes towards right, front and head: it \
predicts each batch of windows, then adapts; the mask comes from the blended logits. Values are scaled from the 1st \
and 99th percentile, or --range, to 0 and 1; --mean and --std normalise them.

Example: trueup segment --model heart.safetensors --images scans --out masks

Example: trueup segment --volumes --arch nets:unet3d --weights unet.pt --classes 3 --images scans --out masks"""
LABEL = typer.Option(None, "--label", help="Name of a label in its mask files; repeat for the next label.")
VOLUMES = typer.Option(False, "--volumes", help="The network is 3-D: slide a window over each volume (needs monai).")
WINDOW = typer.Option(None, "--window", metavar="X Y Z", help="Window of a 3-D network in voxels; 96 96 96 by default.")
BATCH = typer.Option(
    None, "--batch", "-b", min=1, help="Slices or pictures per batch (default 8); with --volumes windows (default 1)."
)
SIDES = (96, 96, 96)
SHOWN = 5  # file names in a message


def segment(
    images: str = typer.Option(
        ..., "--images", "-i", help="Folder of NIfTI, MetaImage, NRRD, PNG, JPEG, TIFF or BMP files, with subfolders."
    ),
    out: str = typer.Option(..., "--out", "-o", help="Folder for masks, which have the names of the images."),
    model: str = typer.Option(None, "--model", help="Checkpoint of `trueup train`; sets --weights to --multilabel."),
    arch: str = typer.Option(None, "--arch", help="smp:unet/resnet34, …; your own module:function, also with --model."),
    weights: str = typer.Option(None, "--weights", "-w", help="State dict: a .safetensors or torch.save file."),
    classes: int = typer.Option(None, "--classes", min=1, help="Outputs: classes with the background, or labels."),
    size: int = typer.Option(None, "--size", min=8, help="Input size in pixels; 256 by default."),
    normalize: str = typer.Option(None, "--normalize", help="imagenet (default) or half; or --mean, --std."),
    multilabel: bool = typer.Option(None, "--multilabel", help="The outputs are labels (sigmoid): a mask for each."),
    label: list[str] = LABEL,
    resize: str = Flags.resize,
    limits: Limits = Flags.limits,
    mean: str = Flags.mean,
    std: str = Flags.std,
    grey: bool = Flags.grey,
    field: float = typer.Option(None, "--field", help="Side in mm of the central square of a slice that is seen."),
    method: str = typer.Option("tsd", "--method", "-m", help="Method, with optional values: tsd:lr=1e-5."),
    volumes: bool = VOLUMES,
    window: tuple[int, int, int] = WINDOW,
    overlap: float = typer.Option(None, "--overlap", help="Overlap of windows; 0.25 by default."),
    batch: int = BATCH,
    seed: int = typer.Option(0, "--seed", "-s", min=0, help="Seed of adaptation."),
    device: str = Flags.device,
    fresh: bool = typer.Option(False, "--fresh", help="Start over from the source model and replace masks."),
) -> None:
    """Write masks for all images in a folder, with a segmenter that adapts to them."""
    foreign = {"arch": arch, "weights": weights, "classes": classes}
    seen = {"size": size, "normalize": normalize, "mean": mean, "std": std, "grey": grey, "multilabel": multilabel}
    check_volume_flags(volumes, model=model, size=size, grey=grey, window=window, overlap=overlap)
    network, settings = open_segmenter(model, volumes=volumes, **foreign, **seen)
    seen_too = {"field": field, "resize": resize, "range": limits, "overlap": overlap}
    settings |= options.passed(labels=tuple(label or ()), **seen_too)
    settings |= {"window": window or SIDES, "batch": batch or 1} if volumes else options.passed(batch=batch)
    name, hyper = parse_method(method)
    config = SegmentConfig(network, **settings, method=name, hyper=hyper, seed=seed, device=device)
    with progress_bar("images") as advance:
        summary = segment_folder(config, images, out, fresh=fresh, progress=advance)
    print_summary(summary, name, out, "volumes" if volumes else "images")
    if model is not None and (legend := _legend(Path(model))):
        Console(highlight=False, soft_wrap=True).print(f"values: {legend}")
    if summary.broken:
        raise typer.Exit(1)


def check_volume_flags(volumes: bool, **flags: Any) -> None:
    """Refuse flags for 3-D networks without --volumes, and those for 2-D networks with it."""
    given = options.passed(**flags)
    if volumes and "model" in given:
        raise ValueError("--model is from `trueup train`, whose networks are 2-D: give --arch, --weights and --classes")
    if others := [name for name in (("size", "grey") if volumes else ("window", "overlap")) if name in given]:
        unused = "is not used with --volumes: a 3-D network sees one channel, in a --window"
        why = unused if volumes else "needs --volumes"
        raise ValueError(f"--{others[0]} {why}")


def open_segmenter(model: str | None, *, volumes: bool = False, **flags: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return the segmenter and its view of images; `flags` describe a network without a recipe."""
    given = options.passed(**flags)
    options.check_model_flags(model, given)
    if model is not None:
        network, settings = _from_recipe(Path(model), given.get("arch"))
    else:
        if recipe_in(given["weights"]) is not None:
            raise ValueError(f"{given['weights']} has a recipe: give it as --model, without --arch")
        settings = {key: given[key] for key in ("size", "grey", "multilabel") if key in given}
        normalize = options.normalization(given.get("mean"), given.get("std"), given.get("normalize"))
        settings |= options.passed(normalize=normalize)
        channels = 1 if volumes or given.get("grey") else 3
        size = given.get("size", SegmentConfig.size)
        network = load_model(given["weights"], given["arch"], given["classes"], size, channels)
    if volumes:
        return network, settings
    if any(parameter.ndim > 4 for parameter in network.parameters()):
        raise ValueError(f"{given['arch']} is a 3-D network: give --volumes")
    return network.to(memory_format=torch.channels_last), settings  # the layout of images; convolutions are faster


def _from_recipe(path: Path, arch: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model with a recipe, and its settings; a user's function is called only if the user names it."""
    from trueup.data.datasets.mask_datasets import NAMES, ON_DISK

    recipe = recipe_in(path)
    if recipe is None:
        raise ValueError(f"{path} has no trueup recipe: give --arch, --weights and --classes instead of --model")
    if recipe.dataset not in NAMES:
        raise ValueError(f"{path} was trained on {recipe.dataset} and is a classifier; masks need a segmenter")
    if arch not in (None, recipe.network):
        raise ValueError(f"{path} is a {recipe.network}, not a {arch}: omit --arch, or give {recipe.network}")
    network, _ = read_checkpoint(path, arch)
    training, known = recipe.training, ON_DISK.get(recipe.dataset.removesuffix("-sim"))
    settings: dict[str, Any] = training.model_dump(include={"size", "normalize", "multilabel", "grey"})
    settings |= options.passed(resize=training.resize, range=training.range)
    if recipe.dataset in ON_DISK:
        settings["field"] = getattr(known, "FIELD", None)  # photographs have none
    if training.multilabel and known is not None:
        settings["labels"] = tuple(known.STRUCTURES)
    return network, settings


def _legend(path: Path) -> str:
    """Return the class names of the numbers in masks, if the recipe's dataset has them."""
    recipe = recipe_in(path)
    card = CARDS.get(recipe.dataset) if recipe is not None and not recipe.training.multilabel else None
    return ", ".join(f"{k} {name}" for k, name in enumerate(card.class_names)) if card is not None else ""


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and all hyper-parameters of a spec such as "tsd:lr=1e-5"."""
    name, hyper = read_specs(text)[0]
    return name, resolve_hyper(name, hyper, "default", "segmentation")


def print_summary(summary: SegmentSummary, method: str, out: str, what: str = "images") -> None:
    """Print what was done and left out."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, reason in summary.broken.items():
        console.print(f"left out, cannot be read: {name} ({reason})", style="red")
    if others := summary.others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        console.print(f"not {what}: {', '.join(others[:SHOWN])}{more}")
    if summary.left_out:
        console.print(f"left out: {describe_skipped(summary.left_out)}")
    if summary.skipped:
        console.print(f"{len(summary.skipped)} {what} were already done")
    console.print(f"{summary.masks} masks in {out}; {method}, {summary.updates} updates so far")
