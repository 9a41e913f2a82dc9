"""Stands for torchvision where it is not installed: small sets of noise in its formats, and the ResNet-18 layout."""

from . import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
