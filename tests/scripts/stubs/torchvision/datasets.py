"""Noise with labels, as many rows as leave a smaller last batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class MNIST(Dataset):
    """Rows of 28 x 28 bytes in ``data``, labels in ``targets``."""

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Any = None) -> None:
        count = 150 if train else 70
        self.targets = torch.arange(count) % 10
        self.data = torch.randint(
            0, 256, (count, 28, 28), generator=torch.Generator().manual_seed(5), dtype=torch.uint8
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.data[index][None].float() / 255, int(self.targets[index])


class FakeData(Dataset):
    """Images of one size between -1 and 1."""

    def __init__(self, size: int = 20, image_size: tuple[int, ...] = (3, 64, 64), transform: Any = None) -> None:
        self.images = torch.rand(size, *image_size, generator=torch.Generator().manual_seed(7)) * 2 - 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index % 10


class CIFAR10(FakeData):
    """Of 32 x 32, which a script resizes to what it wants."""

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Any = None) -> None:
        super().__init__(image_size=(3, 32, 32))
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = super().__getitem__(index)
        return image if self.transform is None else self.transform(image.clone()), label


class CIFAR100(CIFAR10):
    """The same."""


class ImageFolder(FakeData):
    """Of 48 x 48 between 0 and 1, one fewer than divides by four."""

    def __init__(self, root: str, transform: Any = None) -> None:
        super().__init__(size=11, image_size=(3, 48, 48))
        self.images, self.transform = (self.images + 1) / 2, transform

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), 0
