"""AdaContrast: strong views learn what neighbours say of the weak one, and stand apart from other classes."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.core.method import GradientMethod, Info, Named, fusable
from trueup.core.registry import register
from trueup.losses import cosine, negative_diversity
from trueup.model.split_model import Output, SplitModel
from trueup.validate import check_float, check_int
from trueup.views import moco_view, weak_view


@register
@dataclass(frozen=True, kw_only=True)
class AdaContrast(GradientMethod):
    """L = CE(p, y) + InfoNCE(z, k) + Σ p̄ log p̄ of strong views; y is what neighbours of the weak view vote for."""

    # Differs: the original labels all its data first, and its lr falls to 0 over the run; neither is possible online.
    lr: float = 2e-4
    neighbors: int = 10
    """Entries of the bank that vote, by their probabilities."""
    warmup: int = 1024
    """Images that are labelled by their own prediction, before neighbours vote."""
    capacity: int = 16384
    """Entries in the bank, and keys in the queue."""
    temperature: float = 0.07
    """What similarities are divided by in the contrast."""
    momentum: float = 0.999
    """How much of the slow encoder stays with each update; the rest is the student's."""
    crop: float = 0.2
    """The least part of an image in a strong view; the online form has 1, the whole, for CIFAR and ImageNet-C."""

    info = Info(
        name="adacontrast", title="AdaContrast, online",
        paper="Chen et al., Contrastive Test-Time Adaptation, CVPR 2022",
        needs=("head", "one class"),
        unfit="views that are cropped and mirrored do not agree pixel by pixel",
        memory="capacity features with predictions, as many keys with labels, and a copy of the model",
        passes="5 forwards, 1 backward", features=True,
        works="Long streams of photographs with their classes mixed.",
        breaks="Images whose class changes when they are mirrored or cropped; one class after another.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("neighbors", 1), ("warmup", 0), ("capacity", 1)):
            check_int(name, getattr(self, name), low)
        for name, least in (("temperature", 0.001), ("momentum", 0), ("crop", 0.01)):
            check_float(name, getattr(self, name), least, 1)

    def init(self, net: SplitModel) -> nn.Module:
        """The slow encoder, an empty bank (features, probs), and a queue of random keys with random labels."""
        state, (classes, dim), n = nn.Module(), net.weight.shape, self.capacity
        state.slow, wide = net.clone(), torch.promote_types(net.weight.dtype, torch.float32)
        keys = F.normalize(torch.randn(n, dim, device=net.weight.device).to(wide), p=2, dim=1)
        labels = torch.randint(classes, (n,), device=keys.device)
        parts = {"features": torch.zeros_like(keys), "probs": keys.new_zeros(n, classes), "seen": labels.new_zeros(1)}
        for name, part in (parts | {"keys": keys, "labels": labels}).items():  # as parameters no file can resize them
            state.register_parameter(name, nn.Parameter(part, requires_grad=False))
        return state

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        """The student's pass over strong views; what it is to learn comes from two others, one kind of view in each."""
        x = x.to(next(net.parameters(), x).dtype)  # what is seen again later is seen without autocast
        weak, strong = weak_view(x), moco_view(x.repeat(2, 1, 1, 1), net.normalization, crop=self.crop)
        # Differs: in published code strong views move running statistics, too; here the weak ones alone.
        with torch.no_grad():
            seen, key = net(weak, update=True), state.slow(strong[len(x) :]).features
        label = seen.logits.argmax(dim=1)
        if int(state.seen) >= max(1, self.warmup):
            near = cosine(seen.features.to(state.features.dtype), state.features[: int(state.seen)])
            label = state.probs[near.topk(min(self.neighbors, near.shape[1]), dim=1).indices].mean(dim=1).argmax(dim=1)
        out = net(strong[: len(x)])
        head = [(p, p.detach().clone()) for p in net.layer.parameters() if p.requires_grad]
        out.memo.update(image=x, weak=weak, key=key, label=label, head=head)
        return out

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        """The slow encoder sees the weak views, too, and its statistics move with them."""
        out.memo["slow"] = state.slow(out.memo["weak"], update=True)
        state.slow.update_estimates()

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """The contrast is of an image's own key with those of other classes."""
        z, key, label = out.features.to(state.keys.dtype), out.memo["key"].to(state.keys.dtype), out.memo["label"]
        # Differs: published code masks a key that is about to leave by the label of the one that takes its place.
        others = cosine(z, state.keys).masked_fill(label.unsqueeze(1) == state.labels, -torch.inf)
        among = torch.cat([F.cosine_similarity(z, key, dim=1, eps=1e-12).unsqueeze(1), others], dim=1)
        contrast = F.cross_entropy(among / self.temperature, torch.zeros_like(label))
        return F.cross_entropy(out.logits, label) + contrast + negative_diversity(out.logits, eps=1e-8)

    def after(self, net: SplitModel, out: Output, state: Any) -> None:
        """The head's step becomes ten times as long, the slow encoder follows, the batch is remembered."""
        # Differs: the original has its bottleneck at ten times lr, too; the online form has lr for all but DomainNet.
        for p, old in out.memo["head"]:
            p.copy_(old.lerp(p, 10.0))
        for name, p in net.selected.items():
            state.slow.selected[name].lerp_(p, 1 - self.momentum)
        if "slow" in out.memo:  # not with a further step
            slow, row = out.memo["slow"], torch.arange(len(out.x), device=out.x.device)[-self.capacity :]
            new = slow.features, F.softmax(slow.logits, dim=1), out.memo["key"], out.memo["label"]
            # Differs: a full bank loses its oldest entries; in the online form the newest batch goes first.
            for kept, values in zip((state.features, state.probs, state.keys, state.labels), new, strict=True):
                kept[(state.seen + row) % self.capacity] = values[row].to(kept.dtype)
            state.seen += len(out.x)

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """What the student says of the images themselves after the step."""
        # Differs: published code answers with running statistics, after learning with the batch's; here `norm` says.
        return net(out.memo["image"]).logits

    def optimizer(self, named: Named) -> torch.optim.Optimizer:
        """SGD with Nesterov's momentum."""
        some = [p for _, p in named]
        return torch.optim.SGD(some, lr=self.lr, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=fusable(some))
