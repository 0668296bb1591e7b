"""Networks of this library: small ones with BatchNorm for digits and masks, and the ResNet of TTT for CIFAR."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResNet26(nn.Module):
    """The ResNet of TTT for CIFAR, depth 26 and width 1, with BatchNorm; parameter names are the authors'."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = _conv(channels, 16)
        self.layer1 = nn.Sequential(*[ResidualBlock(16, 16) for _ in range(4)])
        self.layer2 = nn.Sequential(ResidualBlock(16, 32), *[ResidualBlock(32, 32) for _ in range(3)])
        self.layer3 = nn.Sequential(ResidualBlock(32, 64), *[ResidualBlock(64, 64) for _ in range(3)])
        self.bn = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images of any size."""
        x = F.relu(self.bn(self.layer3(self.layer2(self.layer1(self.conv1(x))))))
        # Differs: the mean over the whole map, not over 8x8: equal for 32x32 images, and other sizes work too.
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions, each after BatchNorm and ReLU, with a shortcut without weights."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride = 1 if before == after else 2
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = _conv(before, after, self.stride)
        self.bn2 = nn.BatchNorm2d(after)
        self.conv2 = _conv(after, after)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both branches."""
        out: Tensor = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)  # odd sizes round up, as in the convolution
            x = F.pad(x, (0, 0, 0, 0, 0, out.shape[1] - x.shape[1]))
        return x + out


class DigitsNet(nn.Module):
    """A small network with BatchNorm for images of digits from 8x8 pixels."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((channels, 32, 2), (32, 64, 2), (64, 128, 2), (128, 128, 1)):
            layers += _block(before, after, stride)
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.head(self.body(x).mean(dim=(2, 3)))
        return logits


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
    return nn.Sequential(*_block(before, after), *_block(after, after))


def _block(before: int, after: int, stride: int = 1) -> list[nn.Module]:
    return [_conv(before, after, stride), nn.BatchNorm2d(after), nn.ReLU()]


def _conv(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)  # BatchNorm has the bias
