"""Tiny trained models and what they are trained on: gratings of six orientations, or scenes with two kinds of discs."""

import copy
import math
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 6
SIZE = 16
SCENE = 32


def images(n: int, *, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return n images (n, 3, 16, 16) and labels; `shift` from 0 (as in training) to 1 fades, tints and stripes them."""
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
    return x + shift * _tint(column), y


def _tint(column: Tensor) -> Tensor:
    """Return a colour cast with stripes."""
    tint = torch.tensor([0.9, -0.6, 0.4]).view(1, 3, 1, 1)
    return tint + torch.sin(2.2 * column) * torch.tensor([0.4, 0.1, -0.3]).view(1, 3, 1, 1)


def scenes(n: int, *, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return images (n, 3, 32, 32) and masks: a bright disc (1) with a striped one (2) in it; `shift` as above."""
    g = torch.Generator().manual_seed(seed)
    row, column = torch.meshgrid(torch.arange(SCENE).float(), torch.arange(SCENE).float(), indexing="ij")
    middle = 12 + 8 * torch.rand(n, 2, 1, 1, generator=g)
    radius = 7 + 5 * torch.rand(n, 1, 1, generator=g)
    away = ((row - middle[:, 0]).square() + (column - middle[:, 1]).square()).sqrt()
    y = (away < radius).long() + (away < 0.6 * radius).long()
    bright = (y == 1).float() + (y == 2) * torch.sin(1.5 * row)
    colour = 0.4 + torch.rand(n, 3, 1, 1, generator=g)
    noise = torch.randn(n, 3, SCENE, SCENE, generator=g)
    x = (1 - 0.4 * shift) * bright.unsqueeze(1) * colour + (0.3 + 0.1 * shift) * noise
    return x + 0.6 * shift * _tint(column), y


def as_labels(y: Tensor) -> Tensor:
    """Masks as two labels (n, 2, 32, 32): the whole disc, and the one in it."""
    return torch.stack((y > 0, y > 1), dim=1)


def convnet(seed: int = 0) -> nn.Sequential:
    """Return a trained network with BatchNorm; its head is called "head"."""
    return copy.deepcopy(_trained("conv", seed))


def patchnet(seed: int = 0) -> nn.Sequential:
    """Return a trained network with LayerNorm and dropout, like a tiny transformer; its head is called "head"."""
    return copy.deepcopy(_trained("patch", seed))


def segnet(seed: int = 0, *, norm: str = "batch", multilabel: bool = False) -> nn.Sequential:
    """Return a trained segmenter with BatchNorm, or with GroupNorm and dropout ("groups"); its head is "head"."""
    return copy.deepcopy(_trained(f"{norm}-{'labels' if multilabel else 'classes'}", seed))


@cache
def _trained(kind: str, seed: int) -> nn.Sequential:
    with torch.random.fork_rng([]), torch.inference_mode(False), torch.enable_grad():  # of the CPU only
        torch.manual_seed(seed)
        model = MODELS[kind]()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for step in range(200):
            optimizer.zero_grad()
            _loss(model, kind, seed=1000 * (seed + 1) + step).backward()
            optimizer.step()
    return model.eval()


def _loss(model: nn.Module, kind: str, seed: int) -> Tensor:
    x, y = images(64, seed=seed) if kind in ("conv", "patch") else scenes(16, seed=seed)
    if kind.endswith("labels"):
        return F.binary_cross_entropy_with_logits(model(x), as_labels(y).float())
    return F.cross_entropy(model(x), y)


def _conv() -> nn.Sequential:
    model = _body()
    model.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    model.add_module("head", nn.Linear(24, CLASSES))
    return model


def _dense(channels: int) -> nn.Sequential:
    model = _body()
    model.add_module("head", nn.Conv2d(24, channels, 1))
    model.add_module("up", nn.Upsample(scale_factor=4, mode="bilinear"))
    return model


def _groups(channels: int) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("patch", nn.Conv2d(3, 32, 8, stride=4, padding=2))
    model.add_module("norm0", nn.GroupNorm(4, 32))
    model.add_module("relu", nn.ReLU())
    model.add_module("mix", nn.Conv2d(32, 32, 3, padding=1))
    model.add_module("norm1", nn.GroupNorm(4, 32))
    model.add_module("gelu", nn.GELU())
    model.add_module("dropout", nn.Dropout(0.1))
    model.add_module("head", nn.Conv2d(32, channels, 1))
    model.add_module("up", nn.Upsample(scale_factor=4, mode="bilinear"))
    return model


def _body() -> nn.Sequential:
    model = nn.Sequential()
    for i, (before, width) in enumerate(((3, 16), (16, 24))):
        model.add_module(f"conv{i}", nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False))
        model.add_module(f"bn{i}", nn.BatchNorm2d(width))
        model.add_module(f"relu{i}", nn.ReLU())
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


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "conv": _conv,
    "patch": _patch,
    "batch-classes": partial(_dense, 3),
    "batch-labels": partial(_dense, 2),
    "groups-classes": partial(_groups, 3),
    "groups-labels": partial(_groups, 2),
}
