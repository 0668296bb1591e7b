"""NOTE: instance-aware normalisation, trained on a memory of images that is balanced by class."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.memory.image_buffer import PbrsBuffer
from trueup.methods.base import GradientMethod, Info, Output, Params, SplitModel, register
from trueup.validate import check_int


@register
@dataclass(frozen=True, kw_only=True)
class Note(GradientMethod):
    """L = mean of -s log s over the memory's images and the classes, every `every` images."""

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
        unfit="its memory is balanced by the class of each image, and pixels have many",
        passes="1 forward; 1 forward and backward of 64 stored images for every 64",
        memory="64 images",
        images=True,
        works="Streams with many images of one class in a row; single images.",
        breaks="Source models trained without instance-aware normalisation gain less, or lose.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("capacity", self.capacity, 2)
        check_int("every", self.every, 1)

    def init(self, net: SplitModel) -> PbrsBuffer:
        """Return an empty memory."""
        return PbrsBuffer(self.capacity, net.classes, next(net.parameters(), torch.empty(0)))

    def rows(self, state: PbrsBuffer, n: int) -> int:
        """Take rows up to the next update; robust statistics need whole batches."""
        return n if self.norm == "robust" else min(n, state.until_update(self.every))

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Predict without gradient: only the memory is learnt from."""
        state.check_shape(x)
        with torch.no_grad():
            return net(x, update=not self._learns_statistics)

    def observe(self, net: SplitModel, out: Output, state: PbrsBuffer) -> None:
        """Offer the images to the memory; if an update is due, update statistics from the memory."""
        state.add(out.x, out.logits.argmax(dim=1))
        if state.count_images(len(out.x), self.every):
            with torch.enable_grad(), net.centred():
                out.memo["logits"] = net(state.read(net), update=self._learns_statistics).logits

    def loss(self, net: SplitModel, out: Output, state: PbrsBuffer) -> Tensor | None:
        """Return the entropy of the memory's images, averaged over classes too; None between updates."""
        if int(state.waiting) < self.every:
            return None
        if "logits" not in out.memo:  # second and later steps
            with net.centred():
                out.memo["logits"] = net(state.read(net)).logits
        s = F.softmax(out.memo["logits"], dim=1)
        return -(s * (s + 1e-6).log()).mean()

    @property
    def _learns_statistics(self) -> bool:
        """True if statistics are learnt from the memory; other policies update them from the batch."""
        return self.norm.startswith("instance")
