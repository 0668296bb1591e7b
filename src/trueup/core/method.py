"""What a method is: frozen hyper-parameters with hooks. It holds no state; the adapter owns all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from trueup.model.params import Params
from trueup.model.split_model import Output, SplitModel
from trueup.norm.policy import parse_norm
from trueup.validate import check_bool, check_float, check_int, check_pattern

Named = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Info:
    """What a method is called, where it comes from, and what it asks for.

    `needs` may hold "head" (it reads features), "prepare" (it wants source data before deployment) and "one class" (of
    each image, so not several labels). `tasks` are "classification" (of images) and "segmentation" (of pixels); `unfit`
    says why a method does not serve both.
    """

    name: str
    title: str
    paper: str
    tasks: tuple[str, ...] = ("classification",)
    needs: tuple[str, ...] = ()
    unfit: str = ""
    passes: str = "1 forward"
    """What an image costs: forward and backward passes of the network."""
    memory: str = "nothing"
    """What it remembers of the stream; one that keeps images of users says so here and when it saves."""
    images: bool = False
    """Whether it keeps images of users."""
    lost: str = ""
    """The part of its answers that lies beyond the weights and statistics of the model: `unwrap()` loses it."""
    settings: str = ""
    """Published settings for CIFAR and ImageNet where they differ from the defaults, each with its repository."""
    features: bool = False
    """True if it keeps features of single images or pixels, from which images can be recovered in part."""
    works: str = ""
    """When it helps, in a sentence or two."""
    breaks: str = ""
    """And when it does harm."""

    @property
    def private(self) -> bool:
        """Return True if saved states hold images or features, so that only their owner may read them."""
        return self.images or self.features


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods. Only `observe` and `after` may write, and only to `state`; after its step a method may also
    move the parameters that it selects, by a rule that needs no gradient."""

    norm: str = "source"
    """Statistics of BatchNorm layers: "source"; "batch"; "ema" (running estimates that start at the source's); "mix",
    "prior" (of the source's and the batch's: a fixed part, or by the number of images); "instance" (an image's own,
    where they are far from the estimates); "robust" (estimates that move after the answer, one image at a time, by a
    frequent class less). "ema:0.05", "mix:0.1", "prior:16", "instance:4" say the policy's number."""
    episodic: bool = False
    """Forget everything after each batch."""

    info: ClassVar[Info]
    radius: ClassVar[float] = 0.0
    """Of a sharpness-aware step: the loss is worked out again so far up its gradient, and that gradient is used."""
    many_views: ClassVar[bool] = False
    """Whether it makes a batch of each image, so that one is enough to learn from."""
    features_only: ClassVar[bool] = False
    """Whether it looks at features and scores alone, so that several methods can share one pass of the backbone."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        parse_norm(self.norm)
        check_bool("episodic", self.episodic)

    def init(self, net: SplitModel) -> nn.Module:
        """The state: a module whose buffers are remembered and whose parameters join the optimiser."""
        return nn.Module()

    def prepare(self, net: SplitModel, loader: Iterable[Tensor], state: nn.Module) -> None:
        """Learn from batches of source images before deployment; part of the fresh state from then on."""
        raise ValueError(f"{self.info.name} needs no preparation: leave out adapter.prepare(...)")

    def forward(self, net: SplitModel, x: Tensor, state: nn.Module) -> Output:
        """The forward pass, with gradient."""
        return net(x, update=True)

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        """Remember the batch, without gradient, before the loss."""

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """What to minimise; None for no update."""
        return None

    def after(self, net: SplitModel, out: Output, state: Any) -> Literal["reset"] | None:
        """Clean up after the step; "reset" asks the adapter to start afresh."""
        return None

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """What the user gets."""
        return out.logits

    def rows(self, state: Any, n: int) -> int:
        """How many of the n waiting rows to take next."""
        return n

    def hyperparameters(self) -> dict[str, Any]:
        """Name and value of each hyper-parameter, those that every method has last."""
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
    """Gradient steps per batch; the batch is remembered once and answered from the first pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("lr", self.lr, 0)
        check_int("steps", self.steps, 1)
        if not callable(self.params):
            check_pattern("params", self.params)

    def optimizer(self, named: Named) -> torch.optim.Optimizer:
        """The optimiser of the parameters that are updated: Adam, with torch's other defaults."""
        parameters = [p for _, p in named]
        return torch.optim.Adam(parameters, lr=self.lr, fused=fusable(parameters))


def fusable(parameters: Iterable[Tensor]) -> bool:
    """Whether torch has a fused optimiser for all of these."""
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
