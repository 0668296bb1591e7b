"""MEMO: one gradient step on many views of a single image, then a reset."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.methods.base import GradientMethod, Info, Named, Output, SplitModel, fusable, register
from trueup.validate import check_int
from trueup.views import augmix_view


@register
@dataclass(frozen=True, kw_only=True)
class Memo(GradientMethod):
    """L = H(mean_v softmax(p_v)) over the views v of one image; the prediction follows the step."""

    norm: str = "mix:0.0588235"  # 16 parts source statistics to one part of the image's, as published
    lr: float = 0.005
    views: int = 32
    """Views of each image; the paper uses 32 for small images and 64 for large ones."""

    many_views = True
    info = Info(
        name="memo",
        title="MEMO",
        paper="Zhang et al., MEMO: Test Time Robustness via Adaptation and Augmentation, NeurIPS 2022",
        unfit="rotated and shifted views do not match pixel by pixel",
        passes="views + 1 forwards, views backwards",
        lost="its step on each image and the image's share of the statistics; the model is the source",
        settings="ImageNet: lr=2.5e-4; AdamW with lr=1e-5 and a weight decay of 0.01 for RVT and ResNeXt-101 "
        "(zhangmarvin/memo), where this is SGD.",
        works="Single images in any order: a prediction depends on its image alone.",
        breaks="Slow; helps only if the views keep the class and the model's predictions for them differ.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("views", self.views, 1)

    def rows(self, state: nn.Module, n: int) -> int:
        """Take one image at a time."""
        return 1

    def forward(self, net: SplitModel, x: Tensor, state: nn.Module) -> Output:
        """Run all views in one batch, without updating statistics."""
        # Differs: the views' variance is biased; the released code uses the unbiased one.
        # Differs: the reset also restarts the random stream, so every image gets the same random numbers.
        # Differs: the released code crops and flips images before AugMix, and its changes are milder.
        out = net(augmix_view(x.repeat_interleave(self.views, dim=0), net.normalization))
        out.memo["image"] = x.to(next(net.parameters(), x).dtype)
        return out

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return the entropy of the mean prediction."""
        log_mean = F.log_softmax(out.logits, dim=1).logsumexp(dim=0) - math.log(len(out.logits))
        return -(log_mean.exp() * log_mean).sum()

    def after(self, net: SplitModel, out: Output, state: Any) -> Literal["reset"]:
        """Reset to the source after the prediction."""
        return "reset"

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Run the updated model on the image."""
        return net(out.memo["image"]).logits

    def optimizer(self, named: Named) -> torch.optim.Optimizer:
        """Return SGD without momentum."""
        parameters = [p for _, p in named]
        return torch.optim.SGD(parameters, lr=self.lr, fused=fusable(parameters))
