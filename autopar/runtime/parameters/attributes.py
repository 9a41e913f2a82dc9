"""Attributes that a model's code sets on its parameters, such as ``weight._no_weight_decay = True``."""

from __future__ import annotations

import torch

OF_TORCH = frozenset({"_is_param"})
"""What torch itself writes into a parameter's ``__dict__``: it tells that a tensor of a subclass is a parameter."""


def with_attributes(param: torch.nn.Parameter, original: torch.Tensor) -> torch.nn.Parameter:
    """Copy onto the parameter the attributes that only ``original`` has; the same objects, not copies."""
    for name, value in vars(original).items():
        if name not in OF_TORCH and name not in vars(param):
            setattr(param, name, value)
    return param
