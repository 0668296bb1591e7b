"""TSD for segmenters: a pixel takes the place of an image.

The paper says neither which pixels enter the bank nor how many; what is decided here, and why: docs/segmentation.md.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.core.method import GradientMethod
from trueup.core.registry import register
from trueup.losses import entropy, soft_cross_entropy
from trueup.memory.pixel_bank import PixelBank, draw_pixels
from trueup.methods.tsd import Tsd
from trueup.model.split_model import Output, SplitModel
from trueup.validate import check_bool, check_float, check_int

SEED_WEIGHT = 1e-6  # what the head's rows count as neighbours: they stand for no pixel


@register
@dataclass(frozen=True, kw_only=True)
class PixelTsd(GradientMethod):
    """L = L_tsd + λ L_mslc, at the resolution of the head: L_tsd over all pixels, L_mslc over some drawn at random."""

    per_class: int | str | None = "half"
    """Which entries of a class make its prototype: "half" (those of lower entropy), None (all), or a number M: then the
    bank keeps the M of lowest entropy for ever, as the paper does with images, instead of the newest."""
    neighbors: int = 64
    """K: neighbours in the bank that a prediction is aligned with."""
    alignment: float = 0.1
    """λ: weight of the alignment with neighbours."""
    consistency: bool = True
    """Learn only from pixels whose nearest prototype agrees with the prediction."""
    balanced: bool = True
    """Let all predicted classes count alike in L_tsd, however many pixels they have."""
    samples: int = 32
    """Pixels of each image and predicted class that enter the bank, drawn at random."""
    capacity: int | None = None
    """Entries of each class in the bank; 1,024, or M."""
    queries: int = 1024
    """Pixels of each batch that are aligned with their neighbours, drawn at random."""

    info = replace(Tsd.info, title="TSD on pixels", tasks=("segmentation",), memory="1,024 pixels of each class")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_class != "half":
            check_int("per_class", self.per_class, 1, none=True)
        for name in ("neighbors", "samples", "queries", "capacity"):
            check_int(name, getattr(self, name), 1, none=name == "capacity")
        check_float("alignment", self.alignment, 0)
        for name in ("consistency", "balanced"):
            check_bool(name, getattr(self, name))
        keeps = self.per_class if isinstance(self.per_class, int) else self.capacity
        if self.capacity not in (None, keeps):
            raise ValueError(f"capacity={self.capacity}: with per_class={keeps} the bank keeps {keeps} of each class")
        object.__setattr__(self, "capacity", keeps or 1024)

    def init(self, net: SplitModel) -> PixelBank:
        """A bank that starts with the head's rows w_k, each in its own class."""
        weight, capacity = net.weight.detach(), self.capacity or 1024
        ring = PixelBank(net.classes, weight.shape[1], capacity, weight, lowest=isinstance(self.per_class, int))
        scores, labels = net.classify(weight), torch.arange(net.classes, device=weight.device)
        small = torch.full_like(labels, SEED_WEIGHT, dtype=scores.dtype)
        ring.insert(weight, F.softmax(scores, dim=1), labels, entropy(scores), small)
        return ring

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """One pass; the pixels to align are drawn here, so that the loss has nothing random, and labels share them."""
        out = net(x, update=True)
        out.memo["length"] = out.features.flatten(2).square().sum(dim=1)
        out.memo["queries"] = torch.randperm(out.scores[:, 0].numel(), device=x.device)[: self.queries]
        return out

    def observe(self, net: SplitModel, out: Output, state: PixelBank) -> None:
        """Some pixels of each image and class enter; an entry weighs as many pixels as it stands for."""
        z, p = out.features.flatten(2), out.scores.flatten(2)
        image, pixel, share = draw_pixels(_labels(out), self.samples)
        scores, label = p[image, :, pixel], _labels(out)[image, pixel]
        state.insert(z[image, :, pixel], F.softmax(scores, dim=1), label, entropy(scores), share)

    def loss(self, net: SplitModel, out: Output, state: PixelBank) -> Tensor | None:
        """The two terms of the paper over pixels."""
        z, p = (t.flatten(2).to(state.features.dtype) for t in (out.features, out.scores))
        s = F.softmax(p, dim=1)
        distillation = self._distillation(z, out.memo["length"], s.detach(), _labels(out), state)
        if self.alignment == 0:
            return distillation
        image, pixel = out.memo["queries"] // z.shape[2], out.memo["queries"] % z.shape[2]
        similarity, q, weight = state.neighbors(z.detach()[image, :, pixel], self.neighbors)
        weight /= weight.mean(dim=1, keepdim=True)
        distance = (s[image, :, pixel].unsqueeze(1) - q).square().sum(dim=2)
        aligned = self.alignment * (similarity * weight * distance).mean()
        return aligned if distillation is None else distillation + aligned

    def _distillation(self, z: Tensor, length: Tensor, target: Tensor, label: Tensor, bank: PixelBank) -> Tensor | None:
        prototypes = F.normalize(bank.prototypes(0.5 if self.per_class == "half" else 1.0), p=2, dim=1, eps=1e-12)
        u = (prototypes @ z) / length.unsqueeze(1).clamp(min=1e-12).sqrt()
        weight = (length > 1e-12).to(u.dtype)  # a feature of no length has no direction to learn
        if self.balanced:
            weight /= label.flatten().bincount(minlength=len(prototypes))[label]
        if self.consistency:
            weight *= u.gather(1, label.unsqueeze(1)).squeeze(1) == u.amax(dim=1)
        total = weight.sum()
        return (weight * soft_cross_entropy(target, u)).sum() / total if bool(total > 0) else None


def _labels(out: Output) -> Tensor:
    """The predicted class of each pixel (N, P); worked out once, for it takes its time."""
    if "label" not in out.memo:
        out.memo["label"] = out.scores.detach().flatten(2).max(dim=1).indices
    return torch.as_tensor(out.memo["label"])
