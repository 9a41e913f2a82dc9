"""The layout of ResNet-18 with fewer channels behind its first convolution, and of VGG-16 with fewer channels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class _Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.downsample(x))


class _ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = _Block(64, 32, 1), _Block(32, 64, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(self.maxpool(self.relu(self.bn1(self.conv1(x))))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(weights: Any = None) -> nn.Module:
    """Two of its eight blocks."""
    return _ResNet()


VGG16_Weights = SimpleNamespace(IMAGENET1K_V1=None)


class _VGG(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width in widths:
            if width:
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
                before = width
            else:
                layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)


def vgg16(weights: Any = None) -> nn.Module:
    """Its first ten convolutions, eight to sixteen channels wide; 0 is where a pool halves the image."""
    return _VGG((8, 8, 0, 8, 8, 0, 16, 16, 16, 0, 16, 16, 16))
