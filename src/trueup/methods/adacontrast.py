"""AdaContrast: contrastive learning with pseudo-labels that neighbours in feature space vote for."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.losses import cosine, negative_diversity
from trueup.methods.base import GradientMethod, Info, Named, Output, SplitModel, fusable, register
from trueup.validate import check_float, check_int
from trueup.views import moco_view, weak_view


@register
@dataclass(frozen=True, kw_only=True)
class AdaContrast(GradientMethod):
    """L = CE(p, y) + InfoNCE(z, k) + Σ p̄ log p̄ of strong views; y is the vote of the weak view's neighbours."""

    # Differs: the original labels all data first and decays lr to 0 over the run; neither is possible online.
    lr: float = 2e-4
    neighbors: int = 10
    """Nearest entries of the bank whose mean probabilities give the pseudo-label."""
    warmup: int = 1024
    """Images that get their own prediction as pseudo-label before neighbours vote."""
    capacity: int = 16384
    """Entries in the bank, and keys in the queue."""
    temperature: float = 0.07
    """Temperature of the contrastive loss."""
    momentum: float = 0.999
    """Share of the momentum encoder that is kept at each update; the rest is the student's."""
    crop: float = 0.2
    """Smallest area of a strong view's crop; the online version uses 1 (no crop) for CIFAR and ImageNet-C."""

    info = Info(
        name="adacontrast", title="AdaContrast, online",
        paper="Chen et al., Contrastive Test-Time Adaptation, CVPR 2022",
        needs=("head", "one class"),
        unfit="cropped and flipped views do not match pixel by pixel",
        memory="capacity features with predictions, as many keys with labels, and a copy of the model",
        passes="5 forwards, 1 backward", features=True,
        works="Long streams of photographs with mixed classes.",
        breaks="Images whose class changes when they are flipped or cropped; streams sorted by class.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("neighbors", 1), ("warmup", 0), ("capacity", 1)):
            check_int(name, getattr(self, name), low)
        for name, least in (("temperature", 0.001), ("momentum", 0), ("crop", 0.01)):
            check_float(name, getattr(self, name), least, 1)

    def init(self, net: SplitModel) -> nn.Module:
        """Return the momentum encoder, an empty bank (features, probs), and random keys with random labels."""
        state, (classes, dim), n = nn.Module(), net.weight.shape, self.capacity
        state.slow, dtype = net.clone(), torch.promote_types(net.weight.dtype, torch.float32)
        keys = F.normalize(torch.randn(n, dim, device=net.weight.device).to(dtype), p=2, dim=1)
        labels = torch.randint(classes, (n,), device=keys.device)
        bank = {"features": torch.zeros_like(keys), "probs": keys.new_zeros(n, classes), "seen": labels.new_zeros(1)}
        for name, value in (bank | {"keys": keys, "labels": labels}).items():  # parameters: no file can resize them
            state.register_parameter(name, nn.Parameter(value, requires_grad=False))
        return state

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """Run the student on one strong view; label the weak view, and make the key of the other strong view."""
        x = x.to(next(net.parameters(), x).dtype)  # `predict` runs on it again, without autocast
        weak, strong = weak_view(x), moco_view(x.repeat(2, 1, 1, 1), net.normalization, crop=self.crop)
        # Differs: in published code strong views also update running statistics; here only weak views do.
        with torch.no_grad():
            weak_out, key = net(weak, update=True), state.slow(strong[len(x) :]).features
        label = weak_out.logits.argmax(dim=1)
        if int(state.seen) >= max(1, self.warmup):
            near = cosine(weak_out.features.to(state.features.dtype), state.features[: int(state.seen)])
            label = state.probs[near.topk(min(self.neighbors, near.shape[1]), dim=1).indices].mean(dim=1).argmax(dim=1)
        out = net(strong[: len(x)])
        head = [(p, p.detach().clone()) for p in net.layer.parameters() if p.requires_grad]
        out.memo.update(image=x, weak=weak, key=key, label=label, head=head)
        return out

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        """Run the momentum encoder on the weak views, and update its statistics with them."""
        out.memo["slow"] = state.slow(out.memo["weak"], update=True)
        state.slow.update_estimates()

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Contrast an image's own key with the keys of other classes."""
        z, key, label = out.features.to(state.keys.dtype), out.memo["key"].to(state.keys.dtype), out.memo["label"]
        # Differs: published code masks the oldest keys by the labels of the new ones that replace them.
        negatives = cosine(z, state.keys).masked_fill(label.unsqueeze(1) == state.labels, -torch.inf)
        positive = F.cosine_similarity(z, key, dim=1, eps=1e-12).unsqueeze(1)
        contrast = F.cross_entropy(torch.cat([positive, negatives], dim=1) / self.temperature, torch.zeros_like(label))
        return F.cross_entropy(out.logits, label) + contrast + negative_diversity(out.logits, eps=1e-8)

    def after(self, net: SplitModel, out: Output, state: Any) -> None:
        """Lengthen the head's step tenfold, update the momentum encoder, and store the batch."""
        # Differs: the original also trains its bottleneck at 10 lr; the online version uses lr except on DomainNet.
        for p, old in out.memo["head"]:
            p.copy_(old.lerp(p, 10.0))
        for name, p in net.selected.items():
            state.slow.selected[name].lerp_(p, 1 - self.momentum)
        if "slow" in out.memo:  # first step of the batch only
            slow, row = out.memo["slow"], torch.arange(len(out.x), device=out.x.device)[-self.capacity :]
            new = slow.features, F.softmax(slow.logits, dim=1), out.memo["key"], out.memo["label"]
            # Differs: a full bank drops its oldest entries; the online version drops the newest batch first.
            for stored, values in zip((state.features, state.probs, state.keys, state.labels), new, strict=True):
                stored[(state.seen + row) % self.capacity] = values[row].to(stored.dtype)
            state.seen += len(out.x)

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Run the updated student on the original images."""
        # Differs: published code learns with batch statistics and predicts with running ones; here both use `norm`.
        return net(out.memo["image"]).logits

    def optimizer(self, named: Named) -> torch.optim.Optimizer:
        """Return SGD with Nesterov momentum."""
        params, lr = [p for _, p in named], self.lr
        return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=fusable(params))
