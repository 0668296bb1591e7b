"""`trueup compare`: several methods on a user's model and unlabelled images."""

from __future__ import annotations

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

from trueup.bench.method_spec import read_specs, split_guard
from trueup.bench.settings import PAPER_METHODS, resolve_hyper
from trueup.bench.sweep import check_device
from trueup.cli import options
from trueup.cli.options import Limits
from trueup.cli.progress import make_grid, progress_bar
from trueup.core.registry import make_method
from trueup.data.cards import CARDS
from trueup.data.channels import make_channels
from trueup.data.check import preflight_domains
from trueup.data.domains import CorruptedDomain, Domain, FileDomain
from trueup.data.loading import ConcatDomains, Loader
from trueup.data.pictures import AS_STORED, Reading
from trueup.data.scanning import FolderScan, log_skipped
from trueup.data.streams import batches
from trueup.deploy.compare_methods import Trial, compare_methods
from trueup.deploy.estimates import Estimate, MethodReport, Score, advise, estimate
from trueup.source.checkpoints import load_model, read_checkpoint, recipe_in
from trueup.views import make_normalization

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
USUAL = tuple(name for name in PAPER_METHODS if name != "source")
SHOWN = 3  # folders named in a message
SCENES = ("gaussian_noise", "defocus_blur", "fog", "pixelate")  # one of each family of corruptions
SEVERITY = 4
NOTE = "range of the accuracy by AETTA (Lee et al., 2024), GDE (Jiang et al., 2022) and confidence; "
GUESS = "not calibrated, so a guess: labelled source images (--source) would calibrate it"
HELP = """Try several methods on your own model and unlabelled images, and recommend one, with reasons.

It estimates each accuracy without labels, as a range, or says that this is not possible: if the estimates disagree, or
if adapted models rarely agree with the source. With --source, it runs the methods on labelled source images, clean and
corrupted, and calibrates the range by the errors of the estimates there. It recommends a method only if its lead is
more than two standard errors; otherwise it says that there are too few images. If the data allow no conclusion, it
gives no advice, and you keep your model.

Folders with the names of the model's classes count as labels; if the class names are unknown, so do as many folders as
the model has classes, in the order of their names. Then the accuracy is shown, and decides.

Example: trueup compare --model model.safetensors --data photos

--json prints an object: images, unreadable, said, methods (for each its name, range, why there is none, accuracy if
there are labels, aetta, gde, confidence, agreement, all as shares of 1, entropy, classes, seconds), scenes (the same on
source images), take (names; the source if there is no advice), certain (false if so) and reasons."""


@dataclass(frozen=True)
class ImageFolder:
    """The images below a folder, and the meaning of its subfolders."""

    domain: FileDomain
    labelled: bool
    nested: bool
    said: str


@options.flags_in_order(
    f"data model arch weights classes size normalize {options.PICTURES} method batch limit shuffle seed device source "
    "as_json"
)
def compare(
    data: str = typer.Option(..., "--data", "-i", help="Folder of images and subfolders; one per class if labelled."),
    model: str = typer.Option(None, "--model", help="Checkpoint of `trueup train`; replaces --arch to --size."),
    arch: str = typer.Option(None, "--arch", help="resnet50, timm/vit_base_patch16_224, or your own module:function."),
    weights: str = typer.Option(None, "--weights", "-w", help="State dict: a .safetensors or torch.save file."),
    classes: int = typer.Option(None, "--classes", min=2, help="Number of classes."),
    size: int = typer.Option(None, "--size", min=8, help="Input size in pixels; 224 by default."),
    normalize: str = typer.Option(None, "--normalize", help="imagenet (default) or half."),
    batch: int = typer.Option(64, "--batch", "-b", min=1, help="Images per batch."),
    limit: int = typer.Option(None, "--limit", min=1, help="Use only the first N images."),
    shuffle: bool = options.flag(
        "--shuffle/--no-shuffle", help="In random order, or sorted by name; by default random if in folders."
    ),
    seed: int = typer.Option(0, "--seed", "-s", min=0, help="Seed of adaptation and order."),
    source: str = options.flag(
        "--source", help="Labelled source images, not used for training: a folder per class. Takes six times as long."
    ),
    *, resize: str | None, limits: Limits | None, method: list[str] | None, device: str, as_json: bool, **colours: Any,
) -> None:  # fmt: skip
    """Try several methods on a model and images, and recommend one."""
    check_device(device)
    trials = trials_of(method or list(USUAL))
    foreign = {"arch": arch, "weights": weights, "classes": classes, "size": size, "normalize": normalize}
    network, seen = open_classifier(model, **foreign, **colours)
    asked, known = options.reading(resize, limits), seen.get("reading", AS_STORED)
    reading = Reading(asked.range or known.range, asked.resize or known.resize)
    images = open_image_folder(Path(data), seen["classes"], seen["names"], reading)
    labelled = None if source is None else open_image_folder(Path(source), seen["classes"], seen["names"], reading)
    if labelled is not None and not labelled.labelled:
        raise ValueError(f"--source {source}: {labelled.said}; it needs one folder per class, named like the classes")
    preflight_domains(data, [images.domain])
    mixed = images.nested if shuffle is None else shuffle
    comparison = Comparison(network, trials, seen, batch, device, seed)
    order = comparison.order(images.domain, mixed)[:limit]
    reports, broken = comparison.run(images.domain, order, labelled=images.labelled)
    scenes = {} if labelled is None else comparison.calibrate(labelled.domain, len(order))
    way = "in random order (--no-shuffle: by name)" if mixed else "sorted by name (--shuffle: random)"
    said = f"{len(order) - broken} image{'s' * (len(order) - broken != 1)} {way}; {images.said}"
    (print_reports_as_json if as_json else print_report)(reports, scenes, broken=broken, said=said)


@dataclass(frozen=True)
class Comparison:
    """A network, the methods to try, and how images are shown."""

    network: nn.Module
    trials: dict[str, Trial]
    seen: dict[str, Any]
    batch: int
    device: str
    seed: int

    def order(self, domain: Domain, mixed: bool) -> NDArray[np.int64]:
        """Return the indices of a domain's images in the order of the stream."""
        every = np.arange(len(domain.labels))
        return np.random.default_rng(self.seed).permutation(every) if mixed else every

    def run(
        self, domain: Domain, order: NDArray[np.int64], *, labelled: bool, title: str = "batches"
    ) -> tuple[list[MethodReport], int]:
        """Run the methods over images in this order; also return the number of unreadable images."""
        channels = make_channels(self.seen["normalize"], self.seen.get("grey", False))
        loader = Loader(ConcatDomains([domain]), self.seen["size"], channels, keep=True, device=self.device)
        stream = list(batches(order, self.batch))

        def shown() -> Iterator[tuple[Tensor, NDArray[np.int64] | None]]:
            for x, at in loader.batches(stream):
                yield x, domain.labels[at] if labelled else None

        pixels = make_normalization(channels.mean, channels.std)
        how: dict[str, Any] = {"device": self.device, "seed": self.seed, "pixels": pixels}
        with progress_bar(title) as advance:
            done, total = iter(range(1, 10**9)), 2 * len(stream) * len(self.trials)
            found = compare_methods(self.network, self.trials, shown, tick=lambda: advance(next(done), total), **how)
        return found, len(loader.broken)

    def calibrate(self, domain: Domain, most: int) -> dict[str, list[MethodReport]]:
        """Run the methods on at most `most` labelled source images, clean and corrupted."""
        views: dict[str, Domain] = {"clean": domain}
        views |= {f"{name}-{SEVERITY}": CorruptedDomain(domain, name, SEVERITY, self.seed) for name in SCENES}
        order = self.order(domain, mixed=True)[:most]
        return {name: self.run(view, order, labelled=True, title=name)[0] for name, view in views.items()}


def open_classifier(model: str | None, **flags: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return the classifier and its view of images; `flags` describe a network without a recipe."""
    from trueup.data.datasets.mask_datasets import NAMES

    given = options.passed(**flags)
    options.check_model_flags(model, given)
    if model is not None:
        recipe = recipe_in(Path(model))
        if recipe is None:
            raise ValueError(f"{model} has no trueup recipe: give --arch, --weights and --classes instead")
        if recipe.dataset in NAMES:
            raise ValueError(f"{model} was trained on {recipe.dataset} and predicts masks: compare takes a classifier")
        network, _ = read_checkpoint(Path(model), given.get("arch"))
        card = CARDS.get(recipe.dataset)
        names = card.class_names if card is not None and len(card.class_names) == recipe.classes else ()
        seen: dict[str, Any] = {"classes": recipe.classes, "names": names}
        seen |= {key: getattr(recipe.training, key) for key in ("size", "normalize", "grey", "reading")}
    else:
        seen = {"size": 224, "names": (), "grey": False, **given}
        normalize = options.normalization(seen.get("mean"), seen.get("std"), seen.get("normalize")) or "imagenet"
        channels = make_channels(normalize, seen["grey"]).count
        network = load_model(seen["weights"], seen["arch"], seen["classes"], seen["size"], channels)
        seen = {key: seen[key] for key in ("classes", "names", "size", "grey")} | {"normalize": normalize}
    return network.to(memory_format=torch.channels_last), seen


def open_image_folder(
    folder: Path, classes: int, names: Sequence[str] = (), reading: Reading = AS_STORED
) -> ImageFolder:
    """Find the images below a folder, sorted by name; subfolders may be classes, called `names` if known."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    scan = FolderScan(folder)
    found = sorted(str(path.relative_to(folder)) for path in scan.walk() if path.name.lower().endswith(SUFFIXES))
    log_skipped(str(folder), scan.skipped)
    if not found:
        raise ValueError(f"{folder} contains no images ({', '.join(SUFFIXES)})")
    firsts = [Path(name).parts[0] if len(Path(name).parts) > 1 else "" for name in found]
    numbers, said = _class_numbers(sorted(set(firsts)), classes, [name.casefold() for name in names])
    labels = np.array([numbers.get(first, 0) for first in firsts], dtype=np.int64)
    return ImageFolder(FileDomain(folder.name, folder, found, labels, reading), bool(numbers), any(firsts), said)


def _class_numbers(folders: list[str], classes: int, names: list[str]) -> tuple[dict[str, int], str]:
    """Return the class of each folder, if they are classes, and a remark; "" stands for images in no folder."""
    if folders == [""]:
        return {}, "no folders: no labels"
    if folders[0] == "":
        return {}, "some images are not in folders: no labels"
    many = "1 folder" if len(folders) == 1 else f"{len(folders)} folders"
    if names and all(folder.casefold() in names for folder in folders):
        what = "the model's classes" if len(folders) == classes else f"some of the model's {classes} classes"
        return {folder: names.index(folder.casefold()) for folder in folders}, f"{many} that are {what}: labels"
    if not names and len(folders) == classes:
        return {folder: k for k, folder in enumerate(folders)}, f"{many}, as many as classes: labels, by their order"
    listed = ", ".join(folders[:SHOWN]) + (", …" if len(folders) > SHOWN else "")
    return {}, f"folders are not the model's {classes} classes ({listed}): no labels"


def trials_of(texts: list[str]) -> dict[str, Trial]:
    """Make the methods from their specs, with the frozen source first."""
    import yaml

    made = {"source": Trial(make_method("source", {}))}
    for text in texts:
        try:
            name, values = read_specs(text)[0]
        except yaml.YAMLError as error:
            raise ValueError(f"-m {text}: a value cannot be read; quote it within: params='[bf].*'") from error
        hyper, guard = split_guard(values)
        made[text] = Trial(make_method(name, resolve_hyper(name, hyper, "default")), guard)
    return made


def print_reports_as_json(
    reports: list[MethodReport], scenes: dict[str, list[MethodReport]], *, broken: int, said: str
) -> None:
    """Print the result as JSON, with shares of 1 and null for unknown values."""
    streams = list(scenes.values())
    found, advice = estimate(reports, streams), advise(reports, streams)
    options.print_json(
        {
            "images": len(reports[0].answers),
            "unreadable": broken,
            "said": said,
            "methods": [
                _json_values(f) | {"range": e.range, "why": e.why} for f, e in zip(reports, found, strict=True)
            ],
            "scenes": {name: [_json_values(f) for f in scene] for name, scene in scenes.items()},
            "take": advice.take,
            "certain": advice.certain,
            "reasons": advice.reasons,
        }
    )


def _json_values(report: MethodReport) -> dict[str, Any]:
    values = {key: value.value if isinstance(value, Score) else value for key, value in vars(report).items()}
    del values["answers"]
    return values


def print_report(reports: list[MethodReport], scenes: dict[str, list[MethodReport]], *, broken: int, said: str) -> None:
    """Print the reports of all methods, and the advice."""
    streams = list(scenes.values())
    found, advice = estimate(reports, streams), advise(reports, streams)
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    console.print(said, markup=False)
    console.print(_table(reports, found, "estimate %" if scenes else "guess %"))
    if broken:
        console.print(f"{broken} images cannot be read and are left out", style="red")
    names = " or ".join(f"[bold]{escape(name)}[/]" for name in advice.take)
    console.print(f"\ntake {names}" if advice.certain else f"\nno advice: keep your model ({names})")
    for reason in advice.reasons:
        console.print(f"• {reason}", markup=False)
    how = f"calibrated on {len(streams[0][0].answers)} source images, {', '.join(scenes)}" if scenes else GUESS
    console.print(NOTE + how, style="dim")


def _table(reports: list[MethodReport], found: list[Estimate], title: str) -> Table:
    labelled = any(report.accuracy is not None for report in reports)
    heads = [title, "agreement %", "confidence %", "entropy", "classes", "seconds"]
    table = make_grid(["method"], [*(["accuracy %"] if labelled else []), *heads])
    for f, e in zip(reports, found, strict=True):
        row = [f"{100 * f.accuracy.value:.1f}" if f.accuracy is not None else "–"] if labelled else []
        row += ["–" if e.range is None else f"{100 * e.range[0]:.0f}–{100 * e.range[1]:.0f}"]
        row += [f"{100 * part:.1f}" for part in (f.agreement, f.confidence.value)]
        table.add_row(escape(f.name), *row, f"{f.entropy:.2f}", f"{f.classes:.1f}", f"{f.seconds:.1f}")
    return table
