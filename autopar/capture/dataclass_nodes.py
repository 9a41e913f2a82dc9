"""Dataclasses of the user's in inputs and outputs are taken apart into their fields, as tuples and dicts are.

``torch.export`` knows those alone that were registered with it, as transformers does with its outputs. One whose fields
are not all given to its ``__init__`` cannot be made again from them, and stays unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from autopar.torch_private import pytree


def know_dataclasses(value: object) -> None:
    """Register the dataclasses in nested containers, for the process, if ``torch`` does not know them yet."""
    stack, seen = [value], set[int]()
    while stack:
        value = stack.pop()
        if id(value) in seen:  # what holds itself
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            stack.extend(value.values())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            kind, fields = type(value), dataclasses.fields(value)
            if kind not in pytree.SUPPORTED_NODES and all(field.init for field in fields):
                torch.export.register_dataclass(kind)
            stack.extend(getattr(value, field.name, None) for field in fields)
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
