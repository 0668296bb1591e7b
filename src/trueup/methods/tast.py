"""TAST: an ensemble of small projections, trained on the votes of an image's nearest neighbours."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.memory.bank import Bank
from trueup.methods.base import GradientMethod, Info, Output, Params, SplitModel, register
from trueup.validate import check_int


class Projectors(nn.Module):
    """Linear maps from D to D/4, one per member: a shared weight, with scales and a bias of each member's own."""

    def __init__(self, members: int, dim: int, like: Tensor) -> None:
        super().__init__()
        dtype, narrow = torch.promote_types(like.dtype, torch.float32), max(1, dim // 4)

        def random(rows: int, columns: int) -> nn.Parameter:  # the same numbers in every precision, on every device
            numbers = nn.init.kaiming_normal_(torch.empty(rows, columns, dtype=torch.float32, device="cpu"))
            return nn.Parameter(numbers.to(like.device, dtype))

        self.weight, self.enter, self.leave = random(narrow, dim), random(members, dim), random(members, narrow)
        self.bias = nn.Parameter(torch.zeros_like(self.leave))

    def forward(self, z: Tensor) -> Tensor:
        """Project features (N, D) with each of E members: (E, N, D/4)."""
        return (z * self.enter.unsqueeze(1)) @ self.weight.T * self.leave.unsqueeze(1) + self.bias.unsqueeze(1)

    def centroids(self, bank: Bank) -> Tensor:
        """Return the means (E, C, D/4) of each class's projected supports; zero for a class without any."""
        return self.forward(bank.prototypes()) * (bank.counts > 0).unsqueeze(1)

    def logits(self, z: Tensor, centroids: Tensor) -> Tensor:
        """Return τ cos(g(z), centroid) for each member g, (E, N, C), with τ = 10."""
        return 10 * F.normalize(self(z), p=2, dim=2) @ F.normalize(centroids, p=2, dim=2).mT


@register
@dataclass(frozen=True, kw_only=True)
class Tast(GradientMethod):
    """L = Σ_g KL(t || softmax(τ cos(g(z), centroids))) over members g; t is the mean vote of the nearest supports."""

    norm: str = "source"
    lr: float = 1e-3
    params: Params = "none"
    steps: int = 1
    """Gradient steps per batch; predictions use the projections from before the last step. Paper: 1 or 3."""
    per_class: int | None = 100
    """M: supports of lowest entropy that each class keeps; None keeps all. Paper: 1 to 100, or all."""
    neighbors: int = 4
    """k: nearest supports of an image that vote, at most `per_class`. Paper: 1 to 8."""
    members: int = 10
    """Projections in the ensemble. Paper: 1 to 20."""

    info = Info(
        name="tast",
        title="TAST",
        paper="Jang et al., Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR 2023",
        needs=("head",),
        unfit="the entropy of pixels is 0 over most of an image, so the first image would fill the bank for good",
        passes="1 forward, 1 backward of the projections",
        lost="its projections and bank, which classify in place of the head",
        memory="per_class features of each class; the projections, twice", features=True,
        works="The network does not change: models without BatchNorm, batches of any size, single images.",
        breaks="Shifts that move all features: the supports are what the shifted model is certain of.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("per_class", "neighbors", "members"):
            check_int(name, getattr(self, name), 1, none=name == "per_class")

    def init(self, net: SplitModel) -> nn.Module:
        """Return T3A's bank, which starts with the classifier's weights, and random projections."""
        weight, state = net.weight.detach(), nn.Module()
        state.bank = Bank(net.classes, weight.shape[1], self.per_class, weight)
        state.bank.insert_predicted(weight, net.classify(weight))
        state.projectors = Projectors(self.members, weight.shape[1], weight)
        state.before = copy.deepcopy(state.projectors).requires_grad_(False)
        return state

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        """Insert the batch into the bank before it looks for neighbours there."""
        state.bank.insert_predicted(out.features, out.scores)

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return the sum over members of the mean over images and classes."""
        g, centroids = state.projectors, state.projectors.centroids(state.bank)
        out.memo["before"] = [p.detach().clone() for p in g.parameters()]
        log_s = F.log_softmax(g.logits(out.features.to(state.bank.features.dtype), centroids), dim=2)
        votes = F.one_hot(self._near(out, state.bank, g, centroids).argmax(dim=3), log_s.shape[2])
        return F.kl_div(log_s, votes.to(log_s).mean(dim=2), reduction="sum") / log_s[0].numel()

    def after(self, net: SplitModel, out: Output, state: Any) -> None:
        """Keep the projections from before the step."""
        for old, value in zip(state.before.parameters(), out.memo["before"], strict=True):
            old.copy_(value)

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return log-probabilities: the mean over members of the neighbours' mean prediction."""
        near = self._near(out, state.bank, state.before, state.before.centroids(state.bank))
        return F.softmax(near, dim=3).mean(dim=(0, 2)).log()

    @torch.no_grad()
    def _near(self, out: Output, bank: Bank, g: Projectors, centroids: Tensor) -> Tensor:
        """Return logits (E, N, k, C) of the supports with the largest cos(z, support)."""
        z, size = F.normalize(out.features.to(bank.features.dtype), p=2, dim=1), bank.size
        # Differs: with per_class=None published code limits k to the number of supports divided by that of classes.
        k = min(self.neighbors, self.per_class or self.neighbors, size)
        rows, at = (z @ bank.features[:size].T * bank.scale[:size]).topk(k, dim=1).indices.unique(return_inverse=True)
        return g.logits(bank.features[rows], centroids)[:, at]
