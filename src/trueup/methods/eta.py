"""ETA: entropy minimisation on samples that are reliable and not redundant."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.losses import entropy
from trueup.methods.base import GradientMethod, Info, Named, Output, Params, SplitModel, fusable, register
from trueup.validate import check_float


@register
@dataclass(frozen=True, kw_only=True)
class Eta(GradientMethod):
    """L = mean of exp(E0 - H_i) H_i over samples with H_i < E0 whose prediction differs from the running mean m."""

    lr: float = 2.5e-4
    params: Params = "norm"
    margin: float = 0.4
    """E0 as a factor of ln C: samples of lower entropy are reliable."""
    redundancy: float | str = "auto"
    """ε: samples whose cosine with m is at least this are redundant. "auto" is max(0.05, 1.25/√C): the published 0.05
    rejects nearly all samples of a task with fewer than 400 classes, as even a one-hot prediction has cosine 1/√C."""
    momentum: float = 0.9
    """Momentum of SGD."""

    info = Info(
        name="eta",
        title="ETA",
        paper="Niu et al., Efficient Test-Time Model Adaptation without Forgetting, ICML 2022",
        tasks=("classification", "segmentation"),
        passes="1 forward, 1 backward",
        memory="the mean prediction",
        settings="CIFAR-10-C: Adam with lr=1e-3, redundancy=0.4, batches of 200 (mariodoebler/test-time-adaptation), "
        'where this is SGD. ImageNet-C: redundancy=0.05, which is what "auto" gives for 1,000 classes '
        "(mr-eggplant/EATA).",
        works="Streams with many uncertain or redundant images, which it skips.",
        breaks="Few classes with the published redundancy of 0.05: nearly every image is skipped.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("margin", self.margin, 0)
        check_float("momentum", self.momentum, 0, 1)
        if self.redundancy != "auto":
            check_float("redundancy", self.redundancy, 0)

    def init(self, net: SplitModel) -> nn.Module:
        """Return the running mean m of selected predictions; zero before the first."""
        return running_mean(net, [0.0] * net.classes)

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """Return the weighted entropy of the selected samples; None if there are none."""
        classes = out.logits.shape[1]
        # Differs: "auto" is not in the published code, which uses 0.05 for 1,000 classes.
        epsilon = max(0.05, 1.25 / math.sqrt(classes)) if self.redundancy == "auto" else float(self.redundancy)
        h = entropy(out.logits)
        probs = F.softmax(out.logits.detach(), dim=1).movedim(1, -1)
        # m is 0 before any sample was selected; then nothing is redundant.
        similarity = F.cosine_similarity(state.mean.to(probs), probs, dim=-1).abs()
        threshold = self.margin * math.log(classes)
        chosen = (h.detach() < threshold) & ((similarity < epsilon) | ~state.mean.any())
        out.memo["chosen"] = probs[chosen]
        if not bool(chosen.any()):
            return None
        h = h[chosen]
        return (torch.exp(threshold - h.detach()) * h).mean()

    def after(self, net: SplitModel, out: Output, state: Any) -> Literal["reset"] | None:
        """Move m a tenth of the way to the mean of the selected predictions."""
        chosen = out.memo.get("chosen")
        if chosen is not None and len(chosen):
            mean = chosen.mean(dim=0).to(state.mean)
            state.mean.copy_(torch.where(state.mean.any(), 0.9 * state.mean + 0.1 * mean, mean))
        return None

    def optimizer(self, named: Named) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        parameters = [p for _, p in named]
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, fused=fusable(parameters))


def running_mean(net: SplitModel, start: list[float]) -> nn.Module:
    """Return a state with one buffer, `mean`, in the network's precision but at least float32."""
    state, like = nn.Module(), next(net.parameters(), torch.empty(0))
    dtype = torch.promote_types(like.dtype, torch.float32)
    state.register_buffer("mean", torch.tensor(start, dtype=dtype, device=like.device))
    return state
