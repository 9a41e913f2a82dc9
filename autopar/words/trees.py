"""Types of values that models take and return, and of what autograd Functions save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd.function import FunctionCtx

PyTree: TypeAlias = Any  # nested tuples, lists, dicts of values


class Context(FunctionCtx):
    """The context of an autograd Function, on which its forward saves what its backward reads."""

    if TYPE_CHECKING:
        needs_input_grad: tuple[bool, ...]
        saved_tensors: tuple[Any, ...]

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...  # noqa: D102

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...
