"""CoTTA: a student learns from a slow teacher's mean over many views; random weights return to the source."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.losses import soft_cross_entropy
from trueup.methods.base import GradientMethod, Info, Output, SplitModel, register
from trueup.validate import check_float, check_int
from trueup.views import check_images, cotta_view


@register
@dataclass(frozen=True, kw_only=True)
class Cotta(GradientMethod):
    """L = mean_i CE(t_i, p_i), with t the teacher's prediction, averaged over views if the source is not confident."""

    lr: float = 1e-3
    views: int = 32
    """Views of each image whose logits are averaged."""
    confidence: float = 0.92
    """Views are used if the source's mean confidence in a batch is below this; the paper uses 0.92 for CIFAR-10, 0.72
    for CIFAR-100 and 0.1 for ImageNet."""
    momentum: float = 0.999
    """Share of the teacher that is kept at each update; the rest is the student's."""
    restore: float = 0.01
    """Probability that a weight returns to its source value after an update; the paper uses 0.001 for ImageNet."""
    chunk: int = 256
    """Maximum number of images in one forward pass of views, to limit memory; at least one view of the batch."""

    info = Info(
        name="cotta",
        title="CoTTA",
        paper="Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022",
        needs=("one class",),
        unfit="rotated and shifted views do not match pixel by pixel",
        passes="3 forwards, 1 backward; 34 forwards if the source is not confident",
        lost="the mean over views if the source is not confident; the teacher predicts without views",
        memory="two copies of the model",
        settings="CIFAR-100-C: confidence=0.72. ImageNet-C: SGD with lr=0.01, confidence=0.1, restore=0.001, batches "
        "of 64, where this is Adam (mariodoebler/test-time-adaptation).",
        works="Long streams that change from one kind of shift to another.",
        breaks="Slow; worse on images whose class changes when they are flipped or rotated.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("views", "chunk"):
            check_int(name, getattr(self, name), 1)
        for name in ("confidence", "momentum", "restore"):
            check_float(name, getattr(self, name), 0, 1)

    def init(self, net: SplitModel) -> nn.Module:
        """Return copies of the network: the teacher, and the source as anchor."""
        state = nn.Module()
        state.teacher, state.anchor = net.clone(), net.clone()
        return state

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Run the student, with the teacher's target in `memo`; only the images themselves update statistics."""
        check_images(x, net.normalization)
        with torch.no_grad(), state.teacher.frozen_statistics() if net.policy.frozen else nullcontext():
            confidence = F.softmax(state.anchor(x).logits, dim=1).amax(dim=1).mean()
            target = self._target(state.teacher, x, views=float(confidence) < self.confidence)
        out = net(x, update=True)
        out.memo["target"] = target
        return out

    def _target(self, teacher: SplitModel, x: Tensor, *, views: bool) -> Tensor:
        """Return the teacher's logits for the images or the mean over views; update its estimates once."""
        keeps_estimates = teacher.policy.remembers  # which views must not change
        if keeps_estimates or not views:
            target = teacher(x, update=True).logits
        if views:
            # Differs: published code runs one view of the batch at a time; here batch statistics cover several views.
            each, sums = max(1, self.chunk // len(x)), []
            for n in [min(each, self.views - done) for done in range(0, self.views, each)]:
                images = cotta_view(x.repeat(n, 1, 1, 1), teacher.normalization)
                logits = teacher(images, update=not keeps_estimates).logits  # records statistics for unwrap()
                sums.append(logits.reshape(n, len(x), -1).sum(dim=0))
            target = torch.stack(sums).sum(dim=0) / self.views
        teacher.update_estimates()
        return target

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return the cross-entropy with the teacher's prediction."""
        return soft_cross_entropy(F.softmax(out.memo["target"], dim=1), out.logits).mean()

    def after(self, net: SplitModel, out: Output, state: Any) -> None:
        """Move the teacher towards the student; then restore random weights of the student."""
        for name, p in net.selected.items():
            state.teacher.selected[name].lerp_(p, 1 - self.momentum)
            restored = torch.rand(p.shape, device=p.device) < self.restore
            p.copy_(torch.where(restored, state.anchor.selected[name], p))

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return the teacher's logits from before the update."""
        return torch.as_tensor(out.memo["target"])
