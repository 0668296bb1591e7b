"""NOTE: what a stream shows is kept balanced by class; statistics and affine parameters learn from that."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.core.method import GradientMethod, Info
from trueup.core.registry import register
from trueup.memory.image_buffer import PbrsBuffer
from trueup.model.params import Params
from trueup.model.split_model import Output, SplitModel
from trueup.validate import check_int


@register
@dataclass(frozen=True, kw_only=True)
class Note(GradientMethod):
    """L = mean over the memory's images and the classes of -s log s, once every so many images."""

    norm: str = "instance:4"
    params: Params = "norm"
    capacity: int = 64
    """Images in the memory."""
    every: int = 64
    """Images between two updates."""

    info = Info(
        name="note",
        title="NOTE",
        paper="Gong et al., NOTE: Robust Continual Test-time Adaptation Against Temporal Correlation, NeurIPS 2022",
        needs=("one class",),
        unfit="its memory is balanced by the one class that an image has",
        passes="1 forward; 1 forward and backward of 64 kept images for every 64",
        memory="64 images",
        images=True,
        works="Streams in which a class comes many times in a row; single images.",
        breaks="A source model that was trained without instance-aware normalisation gains less, or loses.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("capacity", self.capacity, 2)
        check_int("every", self.every, 1)

    def init(self, net: SplitModel) -> PbrsBuffer:
        """An empty memory."""
        return PbrsBuffer(self.capacity, net.classes, next(net.parameters(), torch.empty(0)))

    def rows(self, state: PbrsBuffer, n: int) -> int:
        """Up to the next update; robust statistics want whole batches to learn from."""
        return n if self.norm == "robust" else min(n, state.due(self.every))

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Each image by itself, with what was learnt so far; the gradient is the memory's alone."""
        state.suits(x)
        with torch.no_grad():
            return net(x, update=not self._remembers)

    def observe(self, net: SplitModel, out: Output, state: PbrsBuffer) -> None:
        """Offer the images to the memory; when an update is due, statistics move to the memory's."""
        state.add(out.x, out.logits.argmax(dim=1))
        if state.wait(len(out.x), self.every):
            with torch.enable_grad(), net.centred():
                out.memo["logits"] = net(_images(net, state), update=self._remembers).logits

    def loss(self, net: SplitModel, out: Output, state: PbrsBuffer) -> Tensor | None:
        """Entropy of the memory's images, also averaged over classes; None between updates."""
        if int(state.waiting) < self.every:
            return None
        if "logits" not in out.memo:  # a further step
            with net.centred():
                out.memo["logits"] = net(_images(net, state)).logits
        s = F.softmax(out.memo["logits"], dim=1)
        return -(s * (s + 1e-6).log()).mean()

    @property
    def _remembers(self) -> bool:
        """Whether statistics are learnt from the memory; those of another policy are as that says."""
        return self.norm.startswith("instance")


def _images(net: SplitModel, state: PbrsBuffer) -> Tensor:
    return state.read(next((p.dtype for p in net.parameters()), None))
