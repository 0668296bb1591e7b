"""ROID: certainty and diversity weighting, consistency with a view, and weight ensembling with the source."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.losses import entropy, soft_cross_entropy
from trueup.methods.base import GradientMethod, Info, Output, Params, SplitModel, register
from trueup.methods.eta import running_mean
from trueup.validate import check_choice, check_float
from trueup.views import roid_view


@register
@dataclass(frozen=True, kw_only=True)
class Roid(GradientMethod):
    """L = mean of w_i (SLR_i + SCE_i): a soft likelihood ratio, and symmetric cross-entropy with a view of the image.

    SLR = -Σ_k q_k log(q_k / (1 - q_k)) with q = min(s, 0.99). w = exp(d c / T), with d the distance of s_i from the
    running mean m and c the certainty -H_i, both scaled to [0, 1] over the batch; w = 0 if d is below its mean.
    """

    lr: float = 1e-3
    params: Params = "norm"
    temperature: float = 1 / 3
    """T: the lower, the larger the weight of the most certain and diverse samples."""
    keep: float = 0.99
    """Share of the weights that is kept after each step; the rest is the source's."""
    prior: str = "logits"
    """Values that are multiplied by the batch's class prior: "logits", as in the authors' code behind the paper's
    results; "probabilities", as in Bayes' rule; "none", for no correction."""

    info = Info(
        name="roid",
        title="ROID",
        paper="Marsden et al., Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and "
        "Prior Correction, WACV 2024",
        unfit="views move pixels, and the prior of a batch counts images",
        passes="2 forward, 2 backward",
        lost="the correction by the prior of each batch, which prior='none' turns off",
        memory="the mean prediction and the source values of updated parameters",
        settings="ImageNet-C: SGD with lr=2.5e-4 and momentum 0.9, batches of 64 (mariodoebler/test-time-adaptation), "
        "where this is Adam.",
        works="Long streams that change, with classes in any proportion, also sorted by class.",
        breaks="Each step is pulled back to the source, so it never fully adapts to a strong, lasting shift.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("temperature", self.temperature, 1e-3)
        check_float("keep", self.keep, 0, 1)
        check_choice("prior", self.prior, ("logits", "probabilities", "none"))

    def init(self, net: SplitModel) -> nn.Module:
        """Return the running mean m, uniform at first, and the source values of the selected parameters."""
        state = running_mean(net, [1 / net.classes] * net.classes)
        state.source = nn.Module()
        # Labels share the parameters: the first label's state moves them back for all.
        for i, p in enumerate(net.selected.values() if not net.label else ()):
            state.source.register_buffer(str(i), p.detach().clone())
        return state

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Run the images, and a view of them without updating statistics."""
        other = roid_view(x, net.normalization)
        out = net(x, update=True)
        # Differs: published code makes views only of samples with w > 0, so their batch statistics are a subset's.
        out.memo["view"] = net(other)
        return out

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return the weighted loss; the weights take no gradient, both sides of the cross-entropy do."""
        other = out.memo["view"] if net.label is None else out.memo["view"].of_label(net.label)
        s = F.softmax(out.logits, dim=1)
        distance = _scaled(1 - F.cosine_similarity(state.mean.to(s), s.detach(), dim=1))
        certainty = _scaled(-entropy(out.logits.detach()))
        w = torch.exp(distance * certainty / self.temperature) * (distance >= distance.mean())
        q = s.clamp(max=0.99)
        ratio = -(q * (q / (1 - q) + 1e-5).log()).sum(dim=1)
        forth, back = soft_cross_entropy(s, other.logits), soft_cross_entropy(other.logits.softmax(dim=1), out.logits)
        # Differs: the mean is over the actual batch, not over the configured batch size.
        return (w * (ratio + (forth + back) / 2)).mean()

    def after(self, net: SplitModel, out: Output, state: Any) -> None:
        """Move m a tenth of the way to the batch's mean prediction, and weights a hundredth to the source."""
        state.mean.lerp_(F.softmax(out.logits, dim=1).mean(dim=0).to(state.mean), 0.1)
        for p, stored in zip(net.selected.values(), state.source.buffers(), strict=False):
            source = stored.to(p)  # the model may have been moved to lower precision
            p.lerp_(source, 1 - self.keep)

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Correct the logits by the batch's smoothed prior (p̄ + g) / (1 + g C)."""
        if self.prior == "none":
            return out.logits
        (n, classes), mean = out.logits.shape, F.softmax(out.logits, dim=1).mean(dim=0)
        g = max(1 / n, 1 / classes) / mean.max()
        prior = (mean + g) / (1 + g * classes)
        # Differs: published code only multiplies logits, although Bayes' rule multiplies probabilities.
        # Multiplying logits depends on their sign: it makes a frequent class with a negative logit less likely.
        return out.logits * prior if self.prior == "logits" else out.logits + prior.log()


def _scaled(values: Tensor) -> Tensor:
    """Scale values to [0, 1] over the batch; 0 if all are equal."""
    # Differs: published code divides 0 by 0 if all are equal.
    low, high = values.aminmax()
    return (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
