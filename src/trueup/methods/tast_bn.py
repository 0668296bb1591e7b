"""TAST-BN: TAST without projections; the supports are stored images that run together with each batch."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.losses import cosine, entropy
from trueup.memory.image_buffer import LowEntropyBuffer
from trueup.methods.base import GradientMethod, Info, Output, Params, SplitModel, register
from trueup.validate import check_int


@register
@dataclass(frozen=True, kw_only=True)
class TastBn(GradientMethod):
    """L = KL(t || softmax(τ cos(z, centroids))), τ = 10; t is the mean vote of the nearest stored images."""

    lr: float = 1e-3
    params: Params = "norm"
    per_class: int = 20
    """M: images of lowest entropy that each class keeps. Paper: 1, 5 or 20."""
    neighbors: int = 4
    """k: nearest stored images that vote, at most as many as a class keeps. Paper: 1 to 8."""
    capacity: int = 150
    """Stored images in total; each class keeps an equal share of them if that is less than `per_class`."""

    info = Info(
        name="tast-bn",
        title="TAST-BN",
        paper="Jang et al., Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR 2023",
        needs=("head",),
        unfit="its memory is filled by the class of each image, and pixels have many",
        passes="1 forward; 1 forward and backward of the batch with up to 150 stored images",
        lost="its memory of images, which classifies in place of the head",
        memory="150 images",
        images=True,
        works="Mixed batches of two or more images: the stored images stabilise their statistics.",
        breaks="Single images and streams sorted by class: statistics of such batches choose what is stored.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("per_class", "neighbors", "capacity"):
            check_int(name, getattr(self, name), 1)

    def init(self, net: SplitModel) -> LowEntropyBuffer:
        """Return an empty memory."""
        return LowEntropyBuffer(min(self.capacity, self.per_class * net.classes), net.classes, next(net.parameters()))

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Run the batch alone; this prediction decides which images are stored."""
        # A multi-label model has a memory for each label.
        for memory in [state] if isinstance(state, LowEntropyBuffer) else state:
            memory.check_shape(x)
        with torch.no_grad():
            return net(x, update=True)

    def observe(self, net: SplitModel, out: Output, state: LowEntropyBuffer) -> None:
        """Offer the batch to the memory before it looks for neighbours there."""
        state.add(out.x, out.scores.argmax(dim=1), entropy(out.scores.to(state.entropy.dtype)))

    def loss(self, net: SplitModel, out: Output, state: LowEntropyBuffer) -> Tensor:
        """Return the mean over images and classes."""
        logits, near = self._run_memory(net, out, state)
        votes = F.one_hot(near.argmax(dim=2), logits.shape[1]).to(logits).mean(dim=1)
        return F.kl_div(F.log_softmax(logits, dim=1), votes, reduction="sum") / logits.numel()

    def predict(self, net: SplitModel, out: Output, state: LowEntropyBuffer) -> Tensor:
        """Return log-probabilities: the neighbours' mean; the network's while nothing is stored."""
        # Differs: with several steps published code predicts before the last step, here before the first.
        if "near" not in out.memo and not bool((state.labels >= 0).any()):
            return F.log_softmax(out.logits, dim=1)
        return F.softmax(self._run_memory(net, out, state)[1], dim=2).mean(dim=1).log()

    def _run_memory(self, net: SplitModel, out: Output, state: LowEntropyBuffer) -> tuple[Tensor, Tensor]:
        """Run batch and memory together: logits of the batch (N, C) and of its nearest stored images (N, k, C)."""
        if "near" not in out.memo:
            together = torch.cat((out.x, state.read())).to(next(net.parameters()).dtype)
            z, supports = net(together).features.tensor_split([len(out.x)])
            # Cosines need only directions, so sums serve as means.
            sums = F.one_hot(state.labels[state.labels >= 0], state.classes).to(supports).T @ supports
            nearest = cosine(z, supports).topk(min(self.neighbors, state.per_class, len(supports)), dim=1).indices
            out.memo["logits"], out.memo["near"] = 10 * cosine(z, sums), 10 * cosine(supports, sums).detach()[nearest]
        return out.memo["logits"], out.memo["near"]
