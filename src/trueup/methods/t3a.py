"""T3A: classify by prototypes of confident test features; nothing is trained."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from trueup.core.method import Info, Method
from trueup.core.registry import register
from trueup.losses import entropy
from trueup.memory.bank import Bank
from trueup.model.split_model import Output, SplitModel
from trueup.validate import check_int


@register
@dataclass(frozen=True, kw_only=True)
class T3a(Method):
    """logits_k = z · c_k, with c_k the direction of the mean of the class's unit features in the bank."""

    per_class: int | None = 100
    """How many features of lowest entropy each class keeps; None keeps all."""

    features_only = True
    info = Info(
        name="t3a",
        title="T3A",
        paper="Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain "
        "Generalization, NeurIPS 2021",
        needs=("head",),
        unfit="the entropy of pixels is 0 over most of an image, so a bank of the lowest stays with the first image",
        passes="1 forward",
        lost="its prototypes, which classify in place of the head",
        memory="per_class features of each class",
        features=True,
        works="No gradient and no change of the network; small gains that are safe, also on models without BatchNorm.",
        breaks="Shifts that move all features: the bank is made of what the shifted model says.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("per_class", self.per_class, 1, none=True)

    def init(self, net: SplitModel) -> Bank:
        """A bank that starts with the classifier's weights."""
        half = net.runner.low_memory
        bank = Bank(net.classes, net.weight.shape[1], self.per_class, net.weight, unit=True, half=half)
        remember(bank, net.weight.detach(), net.classify(net.weight).detach())
        return bank

    def observe(self, net: SplitModel, out: Output, state: Bank) -> None:
        """The batch enters before it is classified."""
        # Differs: without a filter published code drops the least certain entry of each class with every batch.
        remember(state, out.features, out.scores)

    def predict(self, net: SplitModel, out: Output, state: Bank) -> Tensor:
        """Similarity logits; a class with no entry gets 0."""
        return out.features.to(state.scale.dtype) @ F.normalize(state.prototypes(), p=2, dim=1).T


def remember(bank: Bank, features: Tensor, scores: Tensor) -> None:
    """Insert features under their predicted class."""
    scores = scores.detach().to(bank.scale.dtype)
    bank.insert(features.detach(), F.softmax(scores, dim=1), scores.argmax(dim=1), entropy(scores))
