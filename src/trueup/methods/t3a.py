"""T3A: classification by prototypes of confident test features, without training."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from trueup.memory.bank import Bank
from trueup.methods.base import Info, Method, Output, SplitModel, register
from trueup.validate import check_int


@register
@dataclass(frozen=True, kw_only=True)
class T3a(Method):
    """logits_k = z · c_k, with c_k the normalised mean of the class's unit features in the bank."""

    per_class: int | None = 100
    """Features of lowest entropy that each class keeps; None keeps all."""

    features_only = True
    info = Info(
        name="t3a",
        title="T3A",
        paper="Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain "
        "Generalization, NeurIPS 2021",
        needs=("head",),
        unfit="the entropy of pixels is 0 over most of an image, so the first image would fill the bank for good",
        lost="its prototypes, which classify in place of the head",
        memory="per_class features of each class",
        features=True,
        works="Small but safe gains without gradients or changes to the network, also without BatchNorm.",
        breaks="Shifts that move all features: the bank holds what the shifted model predicts.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("per_class", self.per_class, 1, none=True)

    def init(self, net: SplitModel) -> Bank:
        """Return a bank that starts with the classifier's weights."""
        half = net.runner.low_memory
        bank = Bank(net.classes, net.weight.shape[1], self.per_class, net.weight, unit=True, half=half)
        bank.insert_predicted(net.weight.detach(), net.classify(net.weight).detach())
        return bank

    def observe(self, net: SplitModel, out: Output, state: Bank) -> None:
        """Insert the batch before it is classified."""
        # Differs: without a filter published code drops the least certain entry of each class with every batch.
        state.insert_predicted(out.features, out.scores)

    def predict(self, net: SplitModel, out: Output, state: Bank) -> Tensor:
        """Return similarity logits; 0 for a class without entries."""
        return out.features.to(state.scale.dtype) @ F.normalize(state.prototypes(), p=2, dim=1).T
