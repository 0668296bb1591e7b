"""The base classes of methods: frozen hyper-parameters with hooks. The adapter owns all state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from trueup.model.params import Params
from trueup.model.split_model import Output, SplitModel
from trueup.norm import parse_norm
from trueup.validate import check_bool, check_float, check_int, check_pattern

Named = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Info:
    """The description of a method: its name, its paper, and what it needs.

    `needs` may hold "head" (it reads features), "prepare" (it uses source data before deployment) and "one class" (it
    does not support several labels per image). `tasks` are "classification" (of images) and "segmentation" (of
    pixels); `unfit` is the reason if a method does not support both.
    """

    name: str
    title: str
    paper: str
    tasks: tuple[str, ...] = ("classification",)
    needs: tuple[str, ...] = ()
    unfit: str = ""
    passes: str = "1 forward"
    """Forward and backward passes of the network per image."""
    memory: str = "nothing"
    """Data of the stream that its state holds."""
    images: bool = False
    """True if its state holds users' images; `save` then warns."""
    lost: str = ""
    """The part of its predictions that `unwrap()` loses, as it is not in the model's weights and statistics."""
    settings: str = ""
    """Published settings for CIFAR and ImageNet that differ from the defaults, each with its repository."""
    features: bool = False
    """True if its state holds features of single images or pixels, from which images can be recovered in part."""
    works: str = ""
    """When it helps, in a sentence or two."""
    breaks: str = ""
    """When it does harm."""

    @property
    def private(self) -> bool:
        """True if saved states hold images or features, so that only their owner may read the files."""
        return self.images or self.features


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods. Only `prepare`, `observe` and `after` write: to `state`; `after` also to parameters."""

    norm: str = "source"
    """Statistics of BatchNorm layers: "source"; "batch"; "ema" (running estimates that start at the source's); "mix"
    and "prior" (source and batch, mixed by a fixed share or by the number of images); "instance" (an image's own
    where they are far from the estimates); "robust" (estimates updated after the prediction, image by image, with
    less weight for frequent classes). "ema:0.05", "mix:0.1", "prior:16", "instance:4" set the policy's number."""
    episodic: bool = False
    """Forget after each batch what was learnt from it; the answers are still those before the step."""

    info: ClassVar[Info]
    radius: ClassVar[float] = 0.0
    """Radius of a sharpness-aware step, taken at this distance along the first gradient; 0: a plain step."""
    many_views: ClassVar[bool] = False
    """True if it makes a batch of views of each image, so that it can learn from a single image."""
    features_only: ClassVar[bool] = False
    """True if it only reads features and scores, so that several methods can share one pass of the backbone."""

    def __post_init__(self) -> None:
        parse_norm(self.norm)
        check_bool("episodic", self.episodic)

    def init(self, net: SplitModel) -> nn.Module:
        """Return the state: a module whose buffers are saved and whose parameters join the optimiser."""
        return nn.Module()

    def prepare(self, net: SplitModel, loader: Iterable[Tensor], state: nn.Module) -> None:
        """Learn from batches of source images before deployment; a reset keeps the result."""
        raise ValueError(f"{self.info.name} needs no preparation: leave out adapter.prepare(...)")

    def forward(self, net: SplitModel, x: Tensor, state: nn.Module) -> Output:
        """Run the network."""
        return net(x, update=True)

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        """Store data of the batch in the state, without gradient, before the loss."""

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """Return the loss; None for no update."""
        return None

    def after(self, net: SplitModel, out: Output, state: Any) -> Literal["reset"] | None:
        """Update the state after the step; return "reset" to ask the adapter for a reset."""
        return None

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return the logits for the user."""
        return out.logits

    def rows(self, state: Any, n: int) -> int:
        """Return how many of the batch's n remaining rows to take next."""
        return n

    def hyperparameters(self) -> dict[str, Any]:
        """Return all hyper-parameters by name, the method's own before those that every method has."""
        shared = [f.name for f in dataclasses.fields(Method)]
        own = [f.name for f in dataclasses.fields(self) if f.name not in shared]
        return {name: getattr(self, name) for name in own + shared}


@dataclass(frozen=True, kw_only=True)
class GradientMethod(Method):
    """A method that takes gradient steps on the model."""

    norm: str = "batch"
    lr: float = 1e-4
    """Learning rate."""
    params: Params = "all"
    """The parameters to update: "none", "norm", "head", "backbone", "trainable" (those that require grad in your
    model), "all" (whether they require grad or not), a regular expression, or a function of the name."""
    steps: int = 1
    """Gradient steps per batch; the batch is observed once, and predictions are those of the first pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("lr", self.lr, 0)
        check_int("steps", self.steps, 1)
        if not callable(self.params):
            check_pattern("params", self.params)

    def optimizer(self, named: Named) -> torch.optim.Optimizer:
        """Return the optimiser of (name, parameter) pairs: Adam with torch's defaults."""
        parameters = [p for _, p in named]
        return torch.optim.Adam(parameters, lr=self.lr, fused=fusable(parameters))


def fusable(parameters: Iterable[Tensor]) -> bool:
    """Return True if torch has a fused optimiser for all of these."""
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
