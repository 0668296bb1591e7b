"""Adapt a segmenter: train a small U-Net on one camera, then adapt it to another without masks.

Run: python examples/adapt_segmenter.py
"""

import numpy as np
import torch
import torch.nn.functional as F

import trueup
from trueup.bench.mask_metrics import dice_coefficient
from trueup.data.datasets import open_dataset
from trueup.data.slices import SliceDomain
from trueup.source.networks import build_network

SIZE, STEPS, BATCH = 48, 60, 8


def batch(domain: SliceDomain, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images in [-1, 1] and their masks: 0 background, 1 rim, 2 cup."""
    x = np.stack([domain.image(i, SIZE) for i in indices])
    y = np.stack([domain.mask(i, SIZE) for i in indices])
    return torch.from_numpy(x).permute(0, 3, 1, 2).float() / 127.5 - 1, torch.from_numpy(y).long()


def main() -> None:
    torch.manual_seed(0)
    dataset = open_dataset("fundus-sim")  # simulated photographs of the eye
    clinic, screening = (dataset.domain(name) for name in ("clinic", "screening"))
    assert isinstance(clinic, SliceDomain)
    assert isinstance(screening, SliceDomain)

    model = build_network("small-unet", classes=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        x, y = batch(clinic, torch.randint(len(clinic.labels), (BATCH,)).tolist())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for method in ("source", "bn", "tent", "tsd"):
        adapter = trueup.adapt(model, method)
        found = []
        for start in range(0, 48, BATCH):
            x, y = batch(screening, list(range(start, start + BATCH)))
            mask = adapter(x).argmax(dim=1)  # predicted before the update
            found += [dice_coefficient(a.numpy(), b.numpy()) for a, b in zip(mask > 0, y > 0, strict=True)]
        print(f"{method:7} Dice of the optic disc {100 * np.nanmean(found):.1f} %")


if __name__ == "__main__":
    main()
