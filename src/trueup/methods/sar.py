"""SAR: sharpness-aware entropy minimisation on reliable samples, with a reset after collapse."""

import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from trueup.losses import entropy
from trueup.methods.base import GradientMethod, Info, Named, Output, Params, SplitModel, fusable, register
from trueup.methods.eta import running_mean
from trueup.validate import check_float

log = logging.getLogger("trueup")


@register
@dataclass(frozen=True, kw_only=True)
class Sar(GradientMethod):
    """L = max over |ε| ≤ ρ of the mean H_i(θ + ε) over samples with H_i < E0, with ρ = 0.05.

    Samples are filtered again at θ + ε. If the running mean of the loss there falls too low, the model is reset.
    """

    lr: float = 2.5e-4
    params: Params = "norm"
    margin: float = 0.4
    """E0 as a factor of ln C: samples of lower entropy are reliable."""
    spared: float = 0.25
    """Share of normalisation layers, counted from the end of the model, that `params="norm"` skips; rounded up."""
    recovery: float = 0.2 / math.log(1000)
    """Reset the model if the running mean of the loss falls below this factor of ln C."""
    momentum: float = 0.9
    """Momentum of SGD."""

    # Differs: the paper's recovery at 0.2 is for 1,000 classes; for ten it would be 9 % of the maximum entropy.
    radius: ClassVar[float] = 0.05
    info = Info(
        name="sar",
        title="SAR",
        paper="Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023",
        tasks=("classification", "segmentation"),
        passes="2 forward, 2 backward",
        memory="the mean loss",
        settings="CIFAR-10-C: lr=1e-3, batches of 200 (mariodoebler/test-time-adaptation). ImageNet-C: lr=1e-3 for a "
        "ViT with batches of 64; lr=2.5e-4 * 2n / 64 for a ResNet-50 with batches of n < 32 (mr-eggplant/SAR).",
        works="Small, mixed or imbalanced batches, best with models that use GroupNorm or LayerNorm.",
        breaks="A model that is rightly confident looks collapsed, and is reset again and again.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("margin", self.margin, 0)
        for name in ("spared", "recovery", "momentum"):
            check_float(name, getattr(self, name), 0, 1)

    def init(self, net: SplitModel) -> nn.Module:
        """Return the running mean of the loss; negative before the first."""
        return running_mean(net, [-1.0])

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        """Return the mean entropy of samples that are reliable, in the second pass still reliable; None without any."""
        h, first = entropy(out.logits), out.memo.get("first")
        reliable = h.detach() < self.margin * math.log(out.logits.shape[1])
        if first is not None:
            reliable &= first["reliable"]
        out.memo["reliable"] = reliable
        if not bool(reliable.any()):  # Differs: published code still steps, along SGD's momentum
            return None
        loss = h[reliable].mean()
        if first is not None:
            first["loss"] = loss.detach()
        return loss

    def after(self, net: SplitModel, out: Output, state: Any) -> Literal["reset"] | None:
        """Move the running mean a tenth of the way to the second pass's loss; ask for a reset if it is too low."""
        net.zero_grad()  # gradients of parameters that the optimiser skips would accumulate
        loss = out.memo.get("loss")
        if loss is None or not bool(loss.isfinite()):
            return None
        # Differs: published code keeps SGD's momentum over a reset; here the optimiser is reset, too.
        # Differs: published code keeps the low mean over a reset, so it may reset again at once.
        old, bound = float(state.mean), self.recovery * math.log(out.logits.shape[1])
        state.mean.copy_(torch.where(state.mean < 0, loss, 0.9 * state.mean + 0.1 * loss))
        if float(state.mean) >= bound:
            return None
        if not 0 <= old < bound:  # log once for several steps on a batch
            log.info("sar: reset, because the mean loss fell to %.3g, below %.3g", float(state.mean), bound)
        return "reset"

    def optimizer(self, named: Named) -> torch.optim.Optimizer:
        """Return SGD with momentum for all but the last normalisation layers."""
        return sgd_without_last(self, named)


def sgd_without_last(method: Any, named: Named) -> torch.optim.Optimizer:
    """Return SGD for all but the last layers in the model's order: `spared` of them, rounded up, but never all."""
    # Differs: published code finds the last stage by names such as "layer4", which other models do not have. A quarter
    # is layer4 of a ResNet-18; of the 53 layers of a ResNet-50 it is 14: the 10 of layer4, and the end of layer3.
    named = list(named)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in named))
    part = method.spared if method.params == "norm" else 0.0
    kept = layers[: max(1, len(layers) - math.ceil(part * len(layers)))]
    parameters = [p for name, p in named if name.rpartition(".")[0] in kept]
    return torch.optim.SGD(parameters, lr=method.lr, momentum=method.momentum, fused=fusable(parameters))
