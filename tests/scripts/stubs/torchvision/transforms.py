"""Cuts and sizes of images, which the stubs keep as tensors of channels, height and width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Transform = Callable[[Any], Any]


def Compose(steps: Sequence[Transform]) -> Transform:
    """One step after the other."""

    def apply(image: Any) -> Any:
        for step in steps:
            image = step(image)
        return image

    return apply


def ToTensor() -> Transform:
    """The tensor as it is, of whatever class."""
    return lambda image: image.as_subclass(torch.Tensor)


def Lambda(function: Transform) -> Transform:
    """What is given."""
    return function


def Normalize(mean: Any, std: Any) -> Transform:
    """The tensor as it is."""
    return lambda image: image


def RandomCrop(size: int | Sequence[int], padding: int = 0) -> Transform:
    """The image as it is."""
    return lambda image: image


def RandomResizedCrop(size: int) -> Transform:
    """The image as it is."""
    return lambda image: image


def RandomHorizontalFlip() -> Transform:
    """One image in two, by torch's random numbers."""
    return lambda image: image.flip(-1) if torch.rand(()) < 0.5 else image


def CenterCrop(size: int) -> Transform:
    """The first ``size`` rows and columns."""
    return lambda image: image[..., :size, :size]


def Resize(size: int | Sequence[int]) -> Transform:
    """By interpolation."""
    shape = (size, size) if isinstance(size, int) else tuple(size)
    return lambda image: torch.nn.functional.interpolate(image[None], shape)[0]
