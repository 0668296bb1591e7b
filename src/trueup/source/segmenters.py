"""Segmentation networks: those of segmentation_models_pytorch as "smp:architecture/encoder", and a small U-Net."""

from __future__ import annotations

import difflib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ENCODER = "mobilenet_v2"  # the paper's, and small


class SmallUNet(nn.Module):
    """A U-Net of three levels with BatchNorm, for images from 8×8 pixels."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.enter = _double(channels, 16)
        self.down = nn.ModuleList([_double(16, 32), _double(32, 64)])
        self.up = nn.ModuleList([_double(64 + 32, 32), _double(32 + 16, 16)])
        self.head = nn.Conv2d(16, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each pixel."""
        x = self.enter(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
            x = up(torch.cat((x, skip), dim=1))
        logits: Tensor = self.head(x)
        return logits


def _double(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


def check_smp(name: str) -> tuple[str, str]:
    """Return architecture and encoder of "smp:deeplabv3plus/mobilenet_v2"; the encoder is optional."""
    smp = _library()
    short, _, encoder = name.removeprefix("smp:").partition("/")
    base = smp.base.SegmentationModel
    known = {n.lower() for n, kind in vars(smp).items() if isinstance(kind, type) and issubclass(kind, base)}
    _among(short.lower(), known, "architecture", name)
    if not encoder.startswith("tu-"):  # timm's encoders, which smp does not list
        _among(encoder or ENCODER, set(smp.encoders.get_encoder_names()), "encoder", name)
    return short.lower(), encoder or ENCODER


def make_smp(name: str, channels: int, **options: Any) -> nn.Module:
    """Build a network of segmentation_models_pytorch, without weights unless options give some."""
    arch, encoder = check_smp(name)
    model: nn.Module = _library().create_model(arch, encoder, classes=channels, **{"encoder_weights": None, **options})
    return model


def _among(word: str, known: set[str], kind: str, name: str) -> None:
    if word not in known:
        near = difflib.get_close_matches(word, sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{name!r}: segmentation_models_pytorch has no {kind} {word!r}{hint}")


def _library() -> Any:
    try:
        import segmentation_models_pytorch as smp
    except ImportError as error:
        raise ImportError("segmentation_models_pytorch is not installed: pip install 'trueup[seg]'") from error
    return smp
