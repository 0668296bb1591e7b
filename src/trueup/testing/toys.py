"""Tiny trained models and the images they are trained on: gratings of six orientations, clean or shifted."""

import copy
import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 6
SIZE = 16


def images(n: int, *, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """n images (n, 3, 16, 16) and labels; `shift` from 0 (as in training) to 1 fades, tints and stripes them."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    angle = (y + 0.7 * torch.rand(n, generator=g) - 0.35) * (math.pi / CLASSES)
    frequency, phase = 0.7 + 0.7 * torch.rand(n, generator=g), 2 * math.pi * torch.rand(n, generator=g)
    row, column = torch.meshgrid(torch.arange(SIZE) - SIZE / 2, torch.arange(SIZE) - SIZE / 2, indexing="ij")
    along = angle.cos()[:, None, None] * column + angle.sin()[:, None, None] * row
    wave = torch.sin(frequency[:, None, None] * along + phase[:, None, None])
    colour = 0.3 + torch.rand(n, 3, 1, 1, generator=g)
    noise = torch.randn(n, 3, SIZE, SIZE, generator=g)
    x = (1 - 0.5 * shift) * wave.unsqueeze(1) * colour + (0.8 - 0.3 * shift) * noise
    tint = torch.tensor([0.9, -0.6, 0.4]).view(1, 3, 1, 1)
    stripes = torch.sin(2.2 * column) * torch.tensor([0.4, 0.1, -0.3]).view(1, 3, 1, 1)
    return x + shift * (tint + stripes), y


def convnet(seed: int = 0) -> nn.Sequential:
    """A trained network with BatchNorm; its head is called "head"."""
    return copy.deepcopy(_trained("conv", seed))


def patchnet(seed: int = 0) -> nn.Sequential:
    """A trained network with LayerNorm and dropout, like a tiny vision transformer; its head is called "head"."""
    return copy.deepcopy(_trained("patch", seed))


@cache
def _trained(kind: str, seed: int) -> nn.Sequential:
    devices: list[int] = []  # fork the CPU's generator only
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        model = _conv() if kind == "conv" else _patch()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for step in range(200):
            x, y = images(64, seed=1000 * (seed + 1) + step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def _conv() -> nn.Sequential:
    model = nn.Sequential()
    for i, (before, width) in enumerate(((3, 16), (16, 24))):
        model.add_module(f"conv{i}", nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False))
        model.add_module(f"bn{i}", nn.BatchNorm2d(width))
        model.add_module(f"relu{i}", nn.ReLU())
    model.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    model.add_module("head", nn.Linear(24, CLASSES))
    return model


def _patch() -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("patch", nn.Conv2d(3, 32, 8, stride=4))
    model.add_module("tokens", nn.Flatten(2))
    model.add_module("norm0", nn.LayerNorm(9))
    model.add_module("gelu", nn.GELU())
    model.add_module("flat", nn.Flatten())
    model.add_module("mix", nn.Linear(32 * 9, 48))
    model.add_module("norm1", nn.LayerNorm(48))
    model.add_module("relu", nn.ReLU())
    model.add_module("dropout", nn.Dropout(0.2))
    model.add_module("head", nn.Linear(48, CLASSES))
    return model
