"""RoTTA: a slow teacher predicts; the student learns from a memory of balanced, recent, certain images."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.losses import soft_cross_entropy
from trueup.memory.image_buffer import CstuBuffer
from trueup.methods.base import GradientMethod, Info, Output, Params, SplitModel, register
from trueup.validate import check_float, check_int
from trueup.views import check_images, cotta_view


@register
@dataclass(frozen=True, kw_only=True)
class Rotta(GradientMethod):
    """L = mean over the memory of E(age) CE(teacher(x), student(view of x)), E = 1/(1 + exp(age / capacity))."""

    norm: str = "ema:0.05"
    lr: float = 1e-3
    params: Params = "norm"
    capacity: int = 64
    """Images in the memory."""
    every: int = 64
    """Images between two updates."""
    momentum: float = 0.999
    """Share of the teacher that is kept at each update; the rest is the student's."""

    info = Info(
        name="rotta",
        title="RoTTA",
        paper="Yuan et al., Robust Test-Time Adaptation in Dynamic Scenarios, CVPR 2023",
        needs=("one class",),
        unfit="its memory is balanced by the class of each image, and pixels have many",
        passes="1 forward; 2 forwards and 1 backward of 64 stored images for every 64",
        memory="64 images and a copy of the model",
        images=True,
        works="Streams that change slowly, with many images of one class in a row; single images.",
        breaks="Slow to follow a sudden change: statistics and teacher are updated once in 64 images.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("capacity", self.capacity, 2)
        check_int("every", self.every, 1)
        check_float("momentum", self.momentum, 0, 1)

    def init(self, net: SplitModel) -> nn.Module:
        """Return the teacher and an empty memory."""
        state = nn.Module()
        state.teacher = net.clone()
        state.memory = CstuBuffer(self.capacity, net.classes, next(net.parameters(), torch.empty(0)))
        return state

    def rows(self, state: Any, n: int) -> int:
        """Take rows up to the next update; robust statistics need whole batches."""
        # Differs: published code predicts a whole batch before the updates that fall into it.
        return n if self.norm == "robust" else min(n, state.memory.until_update(self.every))

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Predict with the teacher and its estimates, without gradient: only the memory is learnt from."""
        check_images(x)
        state.memory.check_shape(x)
        with torch.no_grad():
            out: Output = state.teacher(x)
        return out

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        """Offer the images to the memory; if an update is due, update both networks' statistics from the memory."""
        s = F.softmax(out.logits, dim=1)
        state.memory.add(out.x, s.argmax(dim=1), -(s * (s + 1e-6).log()).sum(dim=1))
        if state.memory.count_images(len(out.x), self.every):
            self._run_memory(net, out, state, update=True)
            state.teacher.update_estimates()

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """Return the cross-entropy with the teacher on the memory, weighted by age; None between updates."""
        memory = state.memory
        if int(memory.waiting) < self.every:
            return None
        if "logits" not in out.memo:  # second and later steps
            self._run_memory(net, out, state, update=False)
        weight = torch.sigmoid(-memory.age[memory.labels >= 0].to(out.memo["logits"]) / self.capacity)
        return (weight * soft_cross_entropy(out.memo["target"], out.memo["logits"])).mean()

    def after(self, net: SplitModel, out: Output, state: Any) -> None:
        """Move the teacher towards the student after an update; it keeps its own statistics."""
        if int(state.memory.waiting) >= self.every:
            for name, p in net.selected.items():
                state.teacher.selected[name].lerp_(p, 1 - self.momentum)

    def _run_memory(self, net: SplitModel, out: Output, state: Any, *, update: bool) -> None:
        """Run the teacher on the stored images and the student on strong views of them."""
        images = state.memory.read(net)
        with torch.no_grad():
            out.memo["target"] = F.softmax(state.teacher(images, update=update).logits, dim=1)
        # Differs: no gradient flows through the statistics, not even through the batch's 5 % of them.
        with torch.enable_grad():
            out.memo["logits"] = net(cotta_view(images, net.normalization), update=update).logits
