"""Recipes of source models; the hash of a recipe names its checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, model_serializer, model_validator

from trueup.data.channels import Channels, Normalize, check_normalize, make_channels
from trueup.data.pictures import Range, Reading, Resize, check_range, default_resize

Normalization = Annotated[Normalize, PlainValidator(check_normalize), PlainSerializer(lambda v: v, return_type=Any)]
# Defaults of settings that came later are left out, so that hashes of older records and checkpoints do not change.
LATER = {"multilabel": False, "resize": None, "range": None, "grey": False, "guard": False, "repeat": 1, "disturb": ""}


class Settings(BaseModel):
    """A group of settings: unknown names are refused, values stay as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_serializer(mode="wrap")
    def _omit_defaults(self, dump: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        values = {key: value for key, value in dump(self).items() if key not in LATER or value != LATER[key]}
        for part in ("training", "source"):
            seen = values.get(part)
            if isinstance(seen, dict) and seen.get("resize") == default_resize(values.get("dataset", "")):
                values[part] = {key: value for key, value in seen.items() if key != "resize"}
        return values

    def digest(self) -> str:
        """Return a short hash of all values."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class SeenImages(Settings):
    """Base of settings that say how images are shown to a network."""

    if TYPE_CHECKING:  # the fields are declared by each class, in the order of its records
        normalize: Normalization
        range: Range | None
        resize: Resize | None
        grey: bool

    @property
    def channels(self) -> Channels:
        """Return the channels of a pixel as the network sees them."""
        return make_channels(self.normalize, self.grey)

    @property
    def reading(self) -> Reading:
        """Return how picture files are read."""
        return Reading(self.range, self.resize)


class Training(SeenImages):
    """Settings of source training, by default as in the paper: ERM over batches from every source domain."""

    algorithm: Literal["erm", "swad"] = "erm"
    iterations: int = Field(5000, ge=0, description="0 keeps the network's weights as they are")
    batch: int = Field(32, ge=1, description="images per source domain")
    lr: float = Field(5e-5, gt=0)
    optimizer: Literal["adam", "sgd"] = "adam"
    weight_decay: float = Field(0.0, ge=0)
    decay_at: tuple[float, ...] = Field((), description="shares of the iterations after which lr is divided by 10")
    augment: Literal["none", "shift", "domainbed", "affine"] = "domainbed"
    normalize: Normalization = Field("imagenet", description="imagenet, half, or [mean, std], of one number or three")
    size: int = Field(224, ge=8, description="side of the images in pixels")
    holdout: float = Field(0.2, gt=0, lt=1, description="share of each source domain for validation")
    every: int = Field(300, ge=1, description="iterations between validations")
    first: int = Field(100, ge=1, description="iteration of the first validation")
    converge: int = Field(3, ge=1, description="SWAD: validations without progress before averaging starts")
    tolerate: int = Field(6, ge=1, description="SWAD: validations above the threshold before it ends")
    tolerance: float = Field(0.3, ge=0, description="SWAD: threshold above the loss at the start, as a share")
    refresh: int = Field(500, ge=0, description="SWAD: batches for the new statistics of BatchNorm layers")
    multilabel: bool = Field(False, description="masks: one sigmoid per structure instead of one softmax of classes")
    resize: Resize | None = Field(None, description="how pictures become square: squash, crop, pad")
    range: Range | None = Field(None, description="values of black and white in pictures of more than 8 bits")
    grey: bool = Field(False, description="the network takes one channel, the luminance")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.range is not None:
            check_range(self.range)
        make_channels(self.normalize, self.grey)  # refuses a combination that does not fit
        if any(not 0 < part < 1 for part in self.decay_at) or sorted(self.decay_at) != list(self.decay_at):
            raise ValueError("decay_at must be rising parts between 0 and 1, such as [0.7, 0.9]")
        return self


class GivenModel(SeenImages):
    """A model that was trained before, from a file."""

    checkpoint: str = Field(description="the SHA-256 of its file")
    recipe: str = Field(default="", description="the hash of its recipe, if this library trained it")
    sources: tuple[str, ...] = Field(default=(), description="the domains it was trained on, if known")
    size: int = Field(224, ge=8)
    normalize: Normalization = "imagenet"
    multilabel: bool = False
    resize: Resize | None = None
    range: Range | None = None
    grey: bool = False


class Recipe(Settings):
    """Everything that a source model depends on."""

    dataset: str
    data: str = Field("", description="fingerprint of the files, for datasets on disk")
    sources: tuple[str, ...] = Field(min_length=1)
    classes: int
    network: str
    weights: str = Field("none", description="none, imagenet, or the SHA-256 of a file")
    code: str = Field("", description="SHA-256 of the file of a user's own network")
    seed: int = Field(0, ge=0)
    training: Training

    @property
    def name(self) -> str:
        """Return the name of its checkpoint."""
        network = "".join(c if c.isalnum() else "-" for c in self.network)
        return f"{self.dataset}-{network}-{self.training.algorithm}-{self.digest()}"


# Masks as in the paper: Adam, 1e-4. The paper gives neither iterations nor image size; these are ours.
_MASKS = {"iterations": 5000, "batch": 8, "lr": 1e-4, "augment": "affine", "size": 256, "every": 250, "first": 250}
_SIM = {"iterations": 240, "lr": 3e-3, "augment": "none", "normalize": "half", "size": 64, "every": 80, "first": 80}
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "iterations": 450, "batch": 16, "lr": 3e-3, "augment": "none", "normalize": "half", "size": 32, "every": 100,
    },
    "digits-c": {"batch": 48},
    "cifar": {
        "iterations": 29_250, "batch": 128, "lr": 0.1, "optimizer": "sgd", "weight_decay": 5e-4, "augment": "shift",
        "normalize": "half", "size": 32, "holdout": 0.1, "every": 1950, "decay_at": (2 / 3, 13 / 15),
    },
    "imagenet": {"iterations": 0},
    "domainnet": {"iterations": 15_000},
    **dict.fromkeys(("fundus", "cardiac", "prostate", "masks"), _MASKS),
    **dict.fromkeys(("fundus-sim", "cardiac-sim", "prostate-sim"), _SIM),
}  # fmt: skip
"""Differences from the paper's training, by the start of the dataset's name."""

SWAD_EVERY = {"vlcs": (50, 0.2), "domainnet": (500, 0.3), "digits": (25, 0.3)}
"""SWAD's validation interval and tolerance, if its authors chose others than 100 and 0.3."""


def training_for(dataset: str, given: Mapping[str, Any] = {}) -> Training:
    """Return the training settings of a dataset; given values override them."""
    values: dict[str, Any] = {}
    for start, preset in PRESETS.items():
        if dataset.startswith(start):
            values |= preset
    if given.get("algorithm") == "swad":
        every, tolerance = next((v for k, v in SWAD_EVERY.items() if dataset.startswith(k)), (100, 0.3))
        every = given.get("every", every)
        values |= {"every": every, "first": every, "tolerance": tolerance}
    return Training(**{**values, **given})
