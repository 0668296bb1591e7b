"""Source models on disk: safetensors files that hold their recipe and are named by its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn

from trueup.core import files
from trueup.source.external_checkpoints import find_misfits, load_external, refuse_misfits
from trueup.source.networks import build_network
from trueup.source.recipe import GivenModel, Recipe, Training

KIND = "source"


@dataclass(frozen=True)
class Store:
    """A folder of checkpoints."""

    folder: Path

    def path(self, recipe: Recipe) -> Path:
        """Return the file of a recipe's finished model."""
        return self.folder / f"{recipe.name}.safetensors"

    def partial(self, recipe: Recipe) -> Path:
        """Return the file of a recipe's unfinished training."""
        return self.folder / f"{recipe.name}.unfinished.safetensors"

    def has(self, recipe: Recipe) -> bool:
        """Return True if the model exists."""
        return self.path(recipe).is_file()

    def save(self, recipe: Recipe, model: nn.Module, report: dict[str, Any]) -> None:
        """Save a finished model with its recipe and training report."""
        self.folder.mkdir(parents=True, exist_ok=True)
        header = {"recipe": recipe.model_dump(mode="json"), "report": report}
        files.write(self.path(recipe), model.state_dict(), header, KIND)

    def load(self, recipe: Recipe) -> tuple[nn.Module, dict[str, Any]]:
        """Load the model of a recipe and its training report."""
        tensors, header = files.read(self.path(recipe), KIND)
        if header.get("recipe") != recipe.model_dump(mode="json"):
            raise ValueError(f"{self.path(recipe)} holds the model of another recipe; delete it to train again")
        return _model(tensors, header, self.path(recipe), recipe.network), header["report"]


def read_checkpoint(path: Path, network: str | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Load a finished model of ours and its header; the network is built from the recipe in the file.

    network: a function that the file names (module:function) is imported and called only if it is given here too.
    """
    tensors, header = files.read(path, KIND)
    return _model(tensors, header, path, network), header


def _model(tensors: dict[str, Tensor], header: dict[str, Any], path: Path, network: str | None) -> nn.Module:
    recipe = _recipe(header, path)
    if "report" not in header:
        raise ValueError(f"{path} is an unfinished training; the same command continues it")
    if ":" in recipe.network.removeprefix("smp:") and recipe.network != network:
        raise ValueError(
            f"{path} names the network {recipe.network!r}, which would have to be imported and run. Nothing was run: "
            f"if you trust it, name it too (--network or --arch {recipe.network})"
        )
    training = recipe.training
    model = build_network(recipe.network, recipe.classes, size=training.size, channels=training.channels.count)
    refuse_misfits(find_misfits(model.state_dict(), tensors), path)
    model.load_state_dict(tensors)
    return model.eval()


def _recipe(header: dict[str, Any], path: str | Path) -> Recipe:
    try:
        return Recipe(**header["recipe"])
    except (KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"{path} holds no recipe that this version can read; train the model again") from error


def read_header(path: Path) -> dict[str, Any]:
    """Return recipe and training report of a model of ours."""
    return files.read(path, KIND)[1]


def load_model(path: str | Path, network: str, classes: int, size: int, channels: int = 3) -> nn.Module:
    """Load a trained model from a file of ours, of DomainBed, of the TSD authors, or a plain state dict."""
    recipe = recipe_in(path)
    if recipe is None:
        model = build_network(network, classes, size=size, channels=channels)
        load_external(path, model, torch.zeros(2, channels, size, size))
        return model.eval()
    if recipe.classes != classes:
        raise ValueError(f"{Path(path).name} has {recipe.classes} classes; the dataset has {classes}")
    if recipe.network != network:
        raise ValueError(f"{Path(path).name} is a {recipe.network}, not a {network}: say --network {recipe.network}")
    return read_checkpoint(Path(path), network)[0]


def recipe_in(path: str | Path) -> Recipe | None:
    """Return the recipe in a file of ours; None for any other file."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file")
    try:
        header = read_header(Path(path))
    except files.ForeignFileError:
        return None
    return _recipe(header, path)


def describe_given(path: str | Path, targets: Sequence[str], dataset: str, training: Training) -> GivenModel:
    """Describe a model's file for a record. Refuse a model of ours that was trained on a target."""
    recipe = recipe_in(path)
    own = recipe.training if recipe is not None else training
    shown = own.model_dump(include={"size", "normalize", "multilabel", "grey"})
    # The target's files may have another bit depth than those of training.
    shown |= {"resize": training.resize or own.resize, "range": training.range or own.range}
    if recipe is None:
        return GivenModel(checkpoint=digest_of_file(path), **shown)
    tensors, _ = files.read(path, KIND)
    sources = {source.partition(":")[0] for source in recipe.sources}
    if recipe.dataset == dataset and (seen := [name for name in targets if name.partition(":")[0] in sources]):
        raise ValueError(f"{Path(path).name} was trained on {', '.join(seen)}, which cannot be a target for it")
    values = f"sha256:{files.digest(tensors)[:16]}"  # not of the bytes: the order of tensors in a file may vary
    return GivenModel(checkpoint=values, recipe=recipe.digest(), sources=recipe.sources, **shown)


class _Averaging(BaseModel, strict=True):
    losses: list[float]
    threshold: float | None
    start: int | None
    end: int | None
    steps: int = Field(ge=0)
    count: int = Field(ge=0)
    waiting: int = Field(ge=0)


class _Unfinished(BaseModel, strict=True):
    recipe: dict[str, Any]
    done: int = Field(ge=0)
    best: dict[str, float] = Field(min_length=2, max_length=2)
    history: list[dict[str, float]]
    broken: list[str]
    swad: _Averaging


def read_unfinished(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and header of an unfinished training; the header is validated."""
    tensors, header = files.read(path, KIND)
    try:
        _Unfinished.model_validate(header)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "header"
        raise ValueError(f"{path} is damaged: its {where} is invalid") from error
    return tensors, header


def digest_of_file(path: str | Path) -> str:
    """Return sha256:… of a file's bytes."""
    with Path(path).open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
