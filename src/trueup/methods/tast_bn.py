"""TAST-BN: TAST without projections; the supports are images, which the network sees anew beside each batch."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.core.method import GradientMethod, Info
from trueup.core.registry import register
from trueup.losses import cosine, entropy
from trueup.memory.image_buffer import LowEntropyBuffer
from trueup.model.params import Params
from trueup.model.split_model import Output, SplitModel
from trueup.validate import check_int


@register
@dataclass(frozen=True, kw_only=True)
class TastBn(GradientMethod):
    """L = KL(t || softmax(τ cos(z, centroids))), τ = 10; t is the mean vote of the nearest images that are kept."""

    lr: float = 1e-3
    params: Params = "norm"
    per_class: int = 20
    """M: how many images of lowest entropy each class keeps. Paper: 1, 5 or 20."""
    neighbors: int = 4
    """k: nearest kept images that vote on an image, at most as many as a class keeps. Paper: 1 to 8."""
    capacity: int = 150
    """Kept images in all; each class keeps an equal part of them, if that is less than `per_class`."""

    info = Info(
        name="tast-bn",
        title="TAST-BN",
        paper="Jang et al., Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR 2023",
        needs=("head",),
        unfit="its memory is filled by the one class that an image has",
        passes="1 forward; 1 forward and backward of the batch with up to 150 kept images",
        lost="its memory of images, which answers in place of the head",
        memory="150 images",
        images=True,
        works="Mixed batches, also small ones from two images on: the kept images lend them their statistics.",
        breaks="Single images, one class after another: what is kept is what the batch's own statistics are sure of.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("per_class", "neighbors", "capacity"):
            check_int(name, getattr(self, name), 1)

    def init(self, net: SplitModel) -> LowEntropyBuffer:
        """An empty memory."""
        return LowEntropyBuffer(min(self.capacity, self.per_class * net.classes), net.classes, next(net.parameters()))

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """What the network says of the batch alone decides which of its images are kept."""
        for memory in (
            [state] if isinstance(state, LowEntropyBuffer) else state
        ):  # a multi-label model has one for each label
            memory.suits(x)
        with torch.no_grad():
            return net(x, update=True)

    def observe(self, net: SplitModel, out: Output, state: LowEntropyBuffer) -> None:
        """The batch enters the memory before it looks for neighbours there."""
        state.add(out.x, out.scores.argmax(dim=1), entropy(out.scores.to(state.entropy.dtype)))

    def loss(self, net: SplitModel, out: Output, state: LowEntropyBuffer) -> Tensor:
        """The mean over images and classes."""
        logits, near = self._look(net, out, state)
        votes = F.one_hot(near.argmax(dim=2), logits.shape[1]).to(logits).mean(dim=1)
        return F.kl_div(F.log_softmax(logits, dim=1), votes, reduction="sum") / logits.numel()

    def predict(self, net: SplitModel, out: Output, state: LowEntropyBuffer) -> Tensor:
        """Log-probabilities: the neighbours' mean; while nothing is kept those of the network."""
        # Differs: with several steps published code answers from before the last of them, here from before the first.
        if "near" not in out.memo and not bool((state.labels >= 0).any()):
            return F.log_softmax(out.logits, dim=1)
        return F.softmax(self._look(net, out, state)[1], dim=2).mean(dim=1).log()

    def _look(self, net: SplitModel, out: Output, state: LowEntropyBuffer) -> tuple[Tensor, Tensor]:
        """Logits of the batch (N, C) and of each image's nearest kept ones (N, k, C), all from one pass."""
        if "near" not in out.memo:
            together = torch.cat((out.x, state.read())).to(next(net.parameters()).dtype)
            z, supports = net(together).features.tensor_split([len(out.x)])
            # The sum over a class has the direction of the mean.
            sums = F.one_hot(state.labels[state.labels >= 0], state.classes).to(supports).T @ supports
            nearest = cosine(z, supports).topk(min(self.neighbors, state.per_class, len(supports)), dim=1).indices
            out.memo["logits"], out.memo["near"] = 10 * cosine(z, sums), 10 * cosine(supports, sums).detach()[nearest]
        return out.memo["logits"], out.memo["near"]
