"""DeYO: entropy minimisation on samples whose prediction depends on the object's shape."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.losses import entropy
from trueup.methods.base import GradientMethod, Info, Named, Output, Params, SplitModel, register
from trueup.methods.sar import sgd_without_last
from trueup.validate import check_float, check_int


@register
@dataclass(frozen=True, kw_only=True)
class Deyo(GradientMethod):
    """L = mean of w_i H_i over samples with H_i < τ and D_i > δ.

    D_i is the drop of the predicted class's probability when the image's patches are shuffled; the weight
    w_i = exp(E0 - H_i) + exp(D_i) takes no gradient.
    """

    lr: float = 2.5e-4
    params: Params = "norm"
    margin: float = 0.5
    """τ as a factor of ln C: samples of higher entropy are left out."""
    weight_margin: float = 0.4
    """E0 as a factor of ln C, the reference entropy of the weights."""
    fall: float = 0.2
    """δ: by how much shuffling must lower the probability of the predicted class."""
    patches: int = 4
    """Patches along each side of an image."""
    spared: float = 0.25
    """Share of normalisation layers, counted from the end of the model, that `params="norm"` skips; rounded up."""
    momentum: float = 0.9
    """Momentum of SGD."""

    info = Info(
        name="deyo",
        title="DeYO",
        paper="Lee et al., Entropy is not Enough for Test-Time Adaptation: From the Perspective of Disentangled "
        "Factors, ICLR 2024",
        unfit="shuffling patches moves pixels, so there is no prediction to compare a pixel's with",
        passes="2 forward, 1 backward",
        settings="CIFAR-10-C: Adam with lr=1e-3, batches of 200 (mariodoebler/test-time-adaptation), where this is "
        "SGD. ImageNet-C: lr=1e-3 for a ViT with batches of 64 (Jhyun17/DeYO).",
        works="Shifts in colour, texture or background that make a model confident for the wrong reason.",
        breaks="Classes recognised by texture: shuffling does not affect them, so nothing is learnt from them.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("margin", self.margin, 0)
        check_float("weight_margin", self.weight_margin, 0)
        check_float("fall", self.fall, -1, 1)
        check_int("patches", self.patches, 1)
        check_float("spared", self.spared, 0, 1)
        check_float("momentum", self.momentum, 0, 1)

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Run the images, and the shuffled images without updating statistics."""
        shuffled = shuffle_patches(x, self.patches)
        out = net(x, update=True)
        # Differs: published code shuffles only samples of low entropy, so their batch statistics are a subset's.
        with torch.no_grad():
            out.memo["shuffled"] = net(shuffled)
        return out

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """Return the weighted entropy of the selected samples; None if there are none."""
        shuffled = out.memo["shuffled"] if net.label is None else out.memo["shuffled"].of_label(net.label)
        h, s, unit = entropy(out.logits), F.softmax(out.logits.detach(), dim=1), math.log(out.logits.shape[1])
        label = s.argmax(dim=1, keepdim=True)
        fall = (s - F.softmax(shuffled.logits, dim=1)).gather(1, label).squeeze(1)
        chosen = (h.detach() < self.margin * unit) & (fall > self.fall)
        if not bool(chosen.any()):
            return None
        weight = torch.exp(self.weight_margin * unit - h.detach()) + torch.exp(fall)
        return (weight * h)[chosen].mean()

    def after(self, net: SplitModel, out: Output, state: Any) -> None:
        """Clear gradients of skipped layers, which would accumulate."""
        net.zero_grad()

    def optimizer(self, named: Named) -> torch.optim.Optimizer:
        """Return SGD with momentum for all but the last normalisation layers."""
        return sgd_without_last(self, named)


def shuffle_patches(x: Tensor, patches: int) -> Tensor:
    """Cut each image of (N, C, H, W) into patches² pieces and shuffle them."""
    if x.ndim != 4:
        raise ValueError(f"DeYO shuffles patches of images (N, C, H, W), not of {tuple(x.shape)}: use eta or sar")
    (n, channels), size, k = x.shape[:2], x.shape[2:], patches
    height, width = (max(1, side // k) for side in size)
    if (height * k, width * k) != tuple(size):
        x = F.interpolate(x, size=(height * k, width * k), mode="bilinear", align_corners=False)
    pieces = x.reshape(n, channels, k, height, k, width).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = torch.rand(n, k * k, device=x.device).argsort(dim=1)
    pieces = pieces[torch.arange(n, device=x.device).unsqueeze(1), order].unflatten(1, (k, k))
    mixed = pieces.permute(0, 3, 1, 4, 2, 5).reshape(n, channels, height * k, width * k)
    return mixed if mixed.shape[2:] == size else F.interpolate(mixed, size=size, mode="bilinear", align_corners=False)
