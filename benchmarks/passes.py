"""Cost of an image with each method: counted forward and backward passes, and time over a plain forward.

Passes are counted on a small trained network and a shifted stream, as methods skip images depending on what they see.
Every image that enters the network or a copy of it is a forward, every one whose gradient comes back to
its first layers a backward. Seconds are those of ResNet-18 at 64 pixels, batches of 32, means over the frozen model's,
in turns; its head is made so certain that no method skips images.

Run: python benchmarks/passes.py [--quick]
"""

import logging
import sys
from collections import Counter
from typing import Any

import torch
import torchvision
from measure import take_turns, write
from torch import Tensor, nn

import trueup
from trueup.testing import convnet, images

BATCH, PIXELS = 32, 64
COUNT: Counter[str] = Counter()  # shared by all copies of the network


class Counted(nn.Module):
    """A network whose passes are counted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        inner.get_submodule("conv1").register_forward_hook(_count)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        out: Tensor = self.inner(x)
        return out


def _count(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
    COUNT["forward"] += len(out)
    if args[0].requires_grad:
        args[0].register_hook(lambda grad: COUNT.update(backward=len(grad)))


def counted(name: str, batches: int) -> tuple[float, float]:
    """Return forward and backward passes per image of a stream."""
    stream = [images(BATCH, seed=i, shift=1.0)[0] for i in range(batches)]
    adapter = trueup.adapt(Counted(convnet()), name, example=stream[0])
    COUNT.clear()
    for x in stream:
        adapter(x)
    forwards, backwards = (round(COUNT[way] / (batches * BATCH), 2) for way in ("forward", "backward"))
    return forwards, backwards


def main() -> None:
    """Count, then time."""
    logging.getLogger("trueup").setLevel(logging.ERROR)
    quick = "--quick" in sys.argv
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None, num_classes=10)
    model.fc.weight.data.mul_(20)
    names = ["source", "tent", "deyo"] if quick else trueup.list_methods()
    example = torch.randn(2, 3, PIXELS, PIXELS)
    adapters = {name: trueup.adapt(model, name, example=example, mean=0.0, std=1.0) for name in names}
    few = ("memo", "cotta")  # slow, and every batch costs the same
    passes = {name: counted(name, 2 if quick or name in few else 32) for name in names}
    times = take_turns(dict(adapters), 1 if quick else 4, lambda: torch.randn(BATCH, 3, PIXELS, PIXELS))
    seconds = {name: sum(taken) / len(taken) for name, taken in times.items()}
    rows: list[dict[str, Any]] = []
    print(f"{'method':12} {'forwards':>8} {'backwards':>9} {'ms':>9} {'over source':>11}")
    for name in names:
        forwards, backwards = passes[name]
        over = round(seconds[name] / seconds["source"], 1)
        ms = round(1000 * seconds[name], 1)
        rows.append({"method": name, "forwards": forwards, "backwards": backwards, "ms": ms, "over_source": over})
        print(f"{name:12} {forwards:8} {backwards:9} {ms:9} {over:11}")
    if not quick:
        write("passes", rows)


if __name__ == "__main__":
    main()
