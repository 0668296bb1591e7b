"""TAST-BN: TAST without projections; the supports are images, which the network sees anew beside each batch."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.album import Images
from trueup.core.method import GradientMethod, Info, whole
from trueup.core.params import Params
from trueup.core.registry import register
from trueup.core.split import Output, SplitModel
from trueup.losses import cosine, entropy


class Certain(Images):
    """Of each predicted class the images of lowest entropy, as it was when they came."""

    entropy: Tensor

    def __init__(self, capacity: int, classes: int, like: Tensor) -> None:
        super().__init__(capacity, classes, like)
        # Differs: with more classes than places published code keeps nothing; here the most certain of a class.
        self.per_class = max(1, capacity // classes)
        self.register_buffer("entropy", self.labels.to(torch.promote_types(like.dtype, torch.float32)))

    def verify(self) -> None:
        """Refuse contents that no images can have left."""
        super().verify()
        if self.entropy.shape != self.labels.shape or not bool(self.entropy.isfinite().all()):
            raise ValueError("the memory's entropies are none")

    def add(self, x: Tensor, labels: Tensor, entropy: Tensor) -> None:
        """Offer images, all at once; of equals the one that is kept stays."""
        n, labels, entropy = len(self.labels), torch.cat((self.labels, labels)), torch.cat((self.entropy, entropy))
        order = entropy.argsort(stable=True)
        order = order[labels[order].argsort(stable=True)]
        group = labels[order]  # an image is one too many if so many places before it there is one of its class
        order = order[group != F.pad(group, (self.per_class, 0), value=-1)[: len(group)]]
        stays = torch.zeros_like(labels, dtype=torch.bool)
        stays[order[entropy[order].argsort(stable=True)][:n]] = True
        new = stays[n:].nonzero().flatten()
        free = (~stays[:n]).nonzero().flatten()[: len(new)]  # of those who leave first: empty places come last
        self.labels[free], self.entropy[free] = labels[n + new], entropy[n + new]
        self.write(x, dict(zip(free.tolist(), new.tolist(), strict=True)))


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
            whole(name, getattr(self, name), 1)

    def init(self, net: SplitModel) -> Certain:
        """An empty memory."""
        return Certain(min(self.capacity, self.per_class * net.classes), net.classes, next(net.parameters()))

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """What the network says of the batch alone decides which of its images are kept."""
        for memory in [state] if isinstance(state, Certain) else state:  # a multi-label model has one for each label
            memory.suits(x)
        with torch.no_grad():
            return net(x, update=True)

    def observe(self, net: SplitModel, out: Output, state: Certain) -> None:
        """The batch enters the memory before it looks for neighbours there."""
        state.add(out.x, out.scores.argmax(dim=1), entropy(out.scores.to(state.entropy.dtype)))

    def loss(self, net: SplitModel, out: Output, state: Certain) -> Tensor:
        """The mean over images and classes."""
        logits, near = self._look(net, out, state)
        votes = F.one_hot(near.argmax(dim=2), logits.shape[1]).to(logits).mean(dim=1)
        return F.kl_div(F.log_softmax(logits, dim=1), votes, reduction="sum") / logits.numel()

    def predict(self, net: SplitModel, out: Output, state: Certain) -> Tensor:
        """Log-probabilities: the neighbours' mean; while nothing is kept those of the network."""
        # Differs: with several steps published code answers from before the last of them, here from before the first.
        if "near" not in out.memo and not bool((state.labels >= 0).any()):
            return F.log_softmax(out.logits, dim=1)
        return F.softmax(self._look(net, out, state)[1], dim=2).mean(dim=1).log()

    def _look(self, net: SplitModel, out: Output, state: Certain) -> tuple[Tensor, Tensor]:
        """Logits of the batch (N, C) and of each image's nearest kept ones (N, k, C), all from one pass."""
        if "near" not in out.memo:
            together = torch.cat((out.x, state.read())).to(next(net.parameters()).dtype)
            z, supports = net(together).features.tensor_split([len(out.x)])
            # The sum over a class has the direction of the mean.
            sums = F.one_hot(state.labels[state.labels >= 0], state.classes).to(supports).T @ supports
            nearest = cosine(z, supports).topk(min(self.neighbors, state.per_class, len(supports)), dim=1).indices
            out.memo["logits"], out.memo["near"] = 10 * cosine(z, sums), 10 * cosine(supports, sums).detach()[nearest]
        return out.memo["logits"], out.memo["near"]
