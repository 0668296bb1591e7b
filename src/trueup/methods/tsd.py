"""TSD: test-time self-distillation and memorised spatial local clustering.

The variants "paper" and "released" (the authors' repository) are compared in docs/tsd-paper-and-released.md.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.losses import cosine, kl_divergence, soft_cross_entropy
from trueup.memory.bank import Bank
from trueup.methods.base import GradientMethod, Info, Output, SplitModel, register
from trueup.validate import check_bool, check_choice, check_float, check_int


@register
@dataclass(frozen=True, kw_only=True)
class Tsd(GradientMethod):
    """L = L_tsd + λ L_mslc: features move to their class's prototype, predictions to those of their neighbours.

    L_tsd = mean CE(s_i, softmax(u_i)), with u_ik = cos(z_i, c_k) and c_k the prototype of class k, over samples with
    argmax u_i = argmax s_i. L_mslc = mean cos(z_i, z_j) |s_i - s_j|² over the K nearest entries j of the bank.
    """

    per_class: int | None = 100
    """M: entries of lowest entropy that each class keeps in the bank; None keeps all."""
    neighbors: int = 3
    """K: neighbours in the bank that a prediction is aligned with."""
    alignment: float | None = None
    """λ: weight of the alignment with neighbours; 0.1, and 0 in the released variant."""
    consistency: bool | None = None
    """Learn only from samples whose nearest prototype agrees with the prediction; not in the released variant."""
    variant: str = "paper"
    """"paper" or "released"."""
    search: str = "exact"
    """Search for neighbours: "exact", or "sketch", which compares 200 candidates exactly: faster in large banks."""

    info = Info(
        name="tsd",
        title="TSD",
        paper="Wang et al., Feature Alignment and Uniformity for Test Time Adaptation, CVPR 2023",
        needs=("head",),
        passes="1 forward, 1 backward",
        memory="per_class features and predictions of each class",
        features=True,
        works="Shifts with mixed batches of 16 or more: among the best on the embedded digits.",
        breaks='Streams sorted by class and single images, except with preset="safe"; classes of several clusters.',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("variant", self.variant, ("paper", "released"))
        check_choice("search", self.search, ("exact", "sketch"))
        paper = self.variant == "paper"
        if self.alignment is None:
            object.__setattr__(self, "alignment", 0.1 if paper else 0.0)
        if self.consistency is None:
            object.__setattr__(self, "consistency", paper)
        check_int("per_class", self.per_class, 1, none=True)
        check_int("neighbors", self.neighbors, 1)
        check_float("alignment", self.alignment, 0)
        check_bool("consistency", self.consistency)
        if self.consistency and not paper:
            raise ValueError('consistency=True: variant="released" has no consistency filter; use variant="paper"')

    def init(self, net: SplitModel) -> Bank:
        """Return a bank that starts with the classifier's weights w_k, also the prototypes of empty classes."""
        weight, released = net.weight.detach().clone(), self.variant == "released"
        bank = Bank(
            net.classes, weight.shape[1], self.per_class, weight, unit=released, order=1 if released else 2,
            half=net.runner.low_memory, sketch=self.search == "sketch" and self.alignment != 0,
        )  # fmt: skip
        bank.register_buffer("start", weight.to(bank.scale.dtype))
        bank.insert_predicted(weight, net.classify(weight).detach())
        return bank

    def observe(self, net: SplitModel, out: Output, state: Bank) -> None:
        """Insert the batch into the bank before prototypes are computed."""
        state.insert_predicted(out.features, out.scores)

    def loss(self, net: SplitModel, out: Output, state: Bank) -> Tensor | None:
        """Return the loss of the chosen variant."""
        assert self.alignment is not None
        z, p = out.features.to(state.scale.dtype), out.scores.to(state.scale.dtype)
        return self._paper(z, p, state, self.alignment) if self.variant == "paper" else self._released(z, p, state)

    def _paper(self, z: Tensor, p: Tensor, bank: Bank, alignment: float) -> Tensor | None:
        s = F.softmax(p, dim=1)
        # Differs: in the paper the prototype of a class without entries, and the mean over no survivors, are 0/0.
        prototypes = torch.where((bank.counts > 0).unsqueeze(1), bank.prototypes(), bank.get_buffer("start"))
        u = cosine(z, prototypes)
        each = soft_cross_entropy(s.detach(), u)
        if self.consistency:
            agrees = p.argmax(dim=1) == u.argmax(dim=1)
            survivors = agrees.sum()
            if alignment == 0 and not bool(survivors > 0):
                return None  # a zero gradient would still move the weights, by Adam's momentum
            distillation = (agrees * each).sum() / survivors.clamp(min=1)
        else:
            distillation = each.mean()
        if alignment == 0:
            return distillation
        similarity, q = bank.neighbors(z.detach(), self.neighbors)
        distance = (s.unsqueeze(1) - q).square().sum(dim=2)
        return distillation + alignment * (similarity * distance).mean()

    def _released(self, z: Tensor, p: Tensor, bank: Bank) -> Tensor:
        # Differs: dropout and stochastic depth are off here, and per_class=None filters nothing.
        # The released code sums unit features; their means have the same direction.
        u = F.normalize(z, p=1, dim=1) @ F.normalize(bank.prototypes(), p=1, dim=1).T
        loss = kl_divergence(u, F.softmax(p.detach(), dim=1)).mean()
        if not self.alignment:
            return loss
        similarity, q = bank.neighbors(z.detach(), self.neighbors)
        return loss - self.alignment * (similarity * (p.unsqueeze(1) - q).square().sum(dim=2)).mean()
