"""CoTTA: a student follows the mean of a slow teacher's answers to many views; a few weights go back at random."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.core.method import GradientMethod, Info
from trueup.core.registry import register
from trueup.losses import soft_cross_entropy
from trueup.model.split_model import Output, SplitModel
from trueup.norm.policy import POLICIES, parse_norm
from trueup.validate import check_float, check_int
from trueup.views import check_images, cotta_view


@register
@dataclass(frozen=True, kw_only=True)
class Cotta(GradientMethod):
    """L = mean_i CE(t_i, p_i), with t the teacher's answers, over views where the source is unsure of the batch."""

    lr: float = 1e-3
    views: int = 32
    """Views of each image whose logits are averaged."""
    confidence: float = 0.92
    """The mean greatest probability of the source below which views are looked at; the paper has 0.92 for CIFAR-10,
    0.72 for CIFAR-100, 0.1 for ImageNet."""
    momentum: float = 0.999
    """How much of the teacher stays with each update; the rest is the student's."""
    restore: float = 0.01
    """The chance of each value to go back to the source's after an update; the paper has 0.001 for ImageNet."""
    chunk: int = 256
    """The most images in one forward of views, if the batch is no larger: a bound of memory."""

    info = Info(
        name="cotta",
        title="CoTTA",
        paper="Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022",
        needs=("one class",),
        unfit="views that are turned and moved do not agree pixel by pixel",
        passes="3 forwards, 1 backward; 34 forwards where the source is unsure",
        lost="the mean over views where the source is unsure; its teacher answers without them",
        memory="two copies of the model",
        settings="CIFAR-100-C: confidence=0.72. ImageNet-C: SGD with lr=0.01, confidence=0.1, restore=0.001, batches "
        "of 64, where this is Adam (mariodoebler/test-time-adaptation).",
        works="Long streams that change from one kind of shift to another.",
        breaks="It is slow; images whose class changes when they are mirrored or turned are answered worse.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("views", "chunk"):
            check_int(name, getattr(self, name), 1)
        for name in ("confidence", "momentum", "restore"):
            check_float(name, getattr(self, name), 0, 1)

    def init(self, net: SplitModel) -> nn.Module:
        """The teacher, and the source."""
        state = nn.Module()
        state.teacher, state.anchor = net.clone(), net.clone()
        return state

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """The student's pass, with the teacher's target in `memo`; estimates of both move to the images themselves."""
        check_images(x, net.normalization)
        with torch.no_grad(), state.teacher.frozen_statistics() if net.policy.frozen else nullcontext():
            sure = F.softmax(state.anchor(x).logits, dim=1).amax(dim=1).mean()
            target = self._target(state.teacher, x, unsure=float(sure) < self.confidence)
        out = net(x, update=True)
        out.memo["target"] = target
        return out

    def _target(self, teacher: SplitModel, x: Tensor, *, unsure: bool) -> Tensor:
        """The teacher's answer, from views where the source is unsure; its estimates move once."""
        if self._remembers or not unsure:
            target = teacher(x, update=True).logits
        if unsure:
            target = self._averaged(teacher, x)
        teacher.update_estimates()
        return target

    @property
    def _remembers(self) -> bool:
        """Whether the policy of normalisation keeps estimates, which views must not move."""
        return POLICIES[parse_norm(self.norm)[0]].remembers

    def _averaged(self, teacher: SplitModel, x: Tensor) -> Tensor:
        """The mean logits of the views; each forward has whole views of the batch."""
        # Differs: published code has one view of the batch in a forward; so batch statistics are those of several here.
        each = max(1, self.chunk // len(x))
        parts = [min(each, self.views - done) for done in range(0, self.views, each)]
        sums = []
        for n in parts:
            views = cotta_view(x.repeat(n, 1, 1, 1), teacher.normalization)
            answers = teacher(views, update=not self._remembers).logits  # a record for unwrap(), no more
            sums.append(answers.reshape(n, len(x), -1).sum(dim=0))
        return torch.stack(sums).sum(dim=0) / self.views

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """The cross-entropy with the teacher's answer."""
        return soft_cross_entropy(F.softmax(out.memo["target"], dim=1), out.logits).mean()

    def after(self, net: SplitModel, out: Output, state: Any) -> None:
        """The teacher moves a little to the student; then some of the student's values go back to the source's."""
        for name, p in net.selected.items():
            state.teacher.selected[name].lerp_(p, 1 - self.momentum)
            back = torch.rand(p.shape, device=p.device) < self.restore
            p.copy_(torch.where(back, state.anchor.selected[name], p))

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """The teacher's answer, as it was before the update."""
        target: Tensor = out.memo["target"]
        return target
