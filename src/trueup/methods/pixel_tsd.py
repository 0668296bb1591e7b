"""TSD for segmentation models: each pixel is a sample.

The paper does not say which pixels enter the bank, nor how many; docs/segmentation.md explains the choices made here.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.losses import entropy, soft_cross_entropy
from trueup.memory.pixel_bank import PixelBank, draw_pixels
from trueup.methods.base import GradientMethod, Output, SplitModel, register
from trueup.methods.tsd import Tsd
from trueup.validate import check_bool, check_float, check_int

SEED_WEIGHT = 1e-6  # weight of the head's rows as neighbours: they represent no pixels


@register
@dataclass(frozen=True, kw_only=True)
class PixelTsd(GradientMethod):
    """L = L_tsd + λ L_mslc at the head's resolution: L_tsd over all pixels, L_mslc over a random sample."""

    per_class: int | str | None = "half"
    """Entries of a class that make its prototype: "half" (those of lower entropy), None (all), or a number M: then the
    bank keeps the M entries of lowest entropy instead of the newest, as the paper does with images."""
    neighbors: int = 64
    """K: neighbours in the bank that a prediction is aligned with."""
    alignment: float = 0.1
    """λ: weight of the alignment with neighbours."""
    consistency: bool = True
    """Learn only from pixels whose nearest prototype agrees with the prediction."""
    balanced: bool = True
    """Give all predicted classes the same weight in L_tsd, whatever their number of pixels."""
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
        capacity = self.per_class if isinstance(self.per_class, int) else self.capacity
        if self.capacity not in (None, capacity):
            raise ValueError(f"capacity={self.capacity}: per_class={capacity} keeps {capacity} of each class")
        object.__setattr__(self, "capacity", capacity or 1024)

    def init(self, net: SplitModel) -> PixelBank:
        """Return a bank that starts with the head's rows w_k, each in its own class."""
        weight, capacity = net.weight.detach(), self.capacity or 1024
        bank = PixelBank(net.classes, weight.shape[1], capacity, weight, keep_lowest=isinstance(self.per_class, int))
        scores, labels = net.classify(weight), torch.arange(net.classes, device=weight.device)
        small = torch.full_like(labels, SEED_WEIGHT, dtype=scores.dtype)
        bank.insert(weight, F.softmax(scores, dim=1), labels, entropy(scores), small)
        return bank

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Run the images, and draw the pixels to align: so the loss is deterministic, and labels share the pixels."""
        out = net(x, update=True)
        out.memo["length"] = out.features.flatten(2).square().sum(dim=1)
        out.memo["queries"] = torch.randperm(out.scores[:, 0].numel(), device=x.device)[: self.queries]
        return out

    def observe(self, net: SplitModel, out: Output, state: PixelBank) -> None:
        """Insert pixels drawn from each image and class, weighted by the number of pixels each represents."""
        z, p = out.features.flatten(2), out.scores.flatten(2)
        image, pixel, weight = draw_pixels(_labels(out), self.samples)
        scores, label = p[image, :, pixel], _labels(out)[image, pixel]
        state.insert(z[image, :, pixel], F.softmax(scores, dim=1), label, entropy(scores), weight)

    def loss(self, net: SplitModel, out: Output, state: PixelBank) -> Tensor | None:
        """Return the paper's two terms over pixels."""
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
        weight = (length > 1e-12).to(u.dtype)  # a zero feature has no direction
        if self.balanced:
            weight /= label.flatten().bincount(minlength=len(prototypes))[label]
        if self.consistency:
            weight *= u.gather(1, label.unsqueeze(1)).squeeze(1) == u.amax(dim=1)
        total = weight.sum()
        return (weight * soft_cross_entropy(target, u)).sum() / total if bool(total > 0) else None


def _labels(out: Output) -> Tensor:
    """Return the predicted class of each pixel (N, P), computed once per batch."""
    if "label" not in out.memo:
        out.memo["label"] = out.scores.detach().flatten(2).max(dim=1).indices
    return torch.as_tensor(out.memo["label"])
