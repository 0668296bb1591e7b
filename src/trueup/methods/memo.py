"""MEMO: one step on many views of a single image, so that they agree, and back again."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.core.method import GradientMethod, Info, Named, fusable
from trueup.core.registry import register
from trueup.model.split_model import Output, SplitModel
from trueup.validate import check_int
from trueup.views import augmix_view


@register
@dataclass(frozen=True, kw_only=True)
class Memo(GradientMethod):
    """L = H(mean of softmax(p_v)) over the views v of one image; answered after the step, with the image itself."""

    norm: str = "mix:0.0588235"  # 16 parts of the source's statistics and one of the image's, as published
    lr: float = 0.005
    views: int = 32
    """Views of each image; the paper has 32 for small images and 64 for large ones."""

    many_views = True
    info = Info(
        name="memo",
        title="MEMO",
        paper="Zhang et al., MEMO: Test Time Robustness via Adaptation and Augmentation, NeurIPS 2022",
        unfit="views that are turned and moved do not agree pixel by pixel",
        passes="views + 1 forwards, views backwards",
        lost="its step for each image and the image's part of the statistics; the model is the source",
        settings="ImageNet: lr=2.5e-4; AdamW with lr=1e-5 and a weight decay of 0.01 for RVT and ResNeXt-101 "
        "(zhangmarvin/memo), where this is SGD.",
        works="Single images, in any order: an answer depends on its image alone, and nothing is ever forgotten.",
        breaks="It is slow, and it helps only where the views leave the class as it is and the model tells them apart.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("views", self.views, 1)

    def rows(self, state: nn.Module, n: int) -> int:
        """One image at a time."""
        return 1

    def forward(self, net: SplitModel, x: Tensor, state: nn.Module) -> Output:
        """The views, in one batch. Nothing of the statistics is kept: the next image starts at the source."""
        # Differs: statistics are mixed with the biased variance of the views; the released code mixes in the unbiased.
        # Differs: the random stream starts afresh, too, so that the views of all images are drawn alike.
        # Differs: the released code crops and mirrors images before AugMix, and mixes milder changes.
        out = net(augmix_view(x.repeat_interleave(self.views, dim=0), net.normalization))
        out.memo["image"] = x.to(next(net.parameters(), x).dtype)
        return out

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """The entropy of the mean prediction."""
        log_mean = F.log_softmax(out.logits, dim=1).logsumexp(dim=0) - math.log(len(out.logits))
        return -(log_mean.exp() * log_mean).sum()

    def after(self, net: SplitModel, out: Output, state: Any) -> Literal["reset"]:
        """Back to the source, once the image is answered."""
        return "reset"

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """What the model says of the image now."""
        return net(out.memo["image"]).logits

    def optimizer(self, named: Named) -> torch.optim.Optimizer:
        """SGD."""
        parameters = [p for _, p in named]
        return torch.optim.SGD(parameters, lr=self.lr, fused=fusable(parameters))
