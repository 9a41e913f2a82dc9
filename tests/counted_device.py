"""A device that is not there beside its host, both in this process's memory: what is on which is followed by operators.

What operators make of tensors on the host is on the host, as are tensors made under ``elsewhere()``; all else is on the
device, whose live bytes are counted. An operator that reads from both, but for a copy, would be an error on a GPU.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch

from autopar.allocations import _ELSEWHERE, Allocations
from autopar.lower.freed_tensors import EMPTIED
from autopar.torch_private import is_traceable_wrapper_subclass, pytree

COPIES = ("aten::copy_", "aten::_to_copy")


class CountedDevice(Allocations):
    """A mode in which the memory of the device is counted.

    Attributes:
        on_host: addresses of the storages of the host.
        mixed: operators that read from both memories.
        most_bytes: the most bytes of the device that lived at once.
    """

    def __init__(self) -> None:
        super().__init__(EMPTIED)
        self.on_host: dict[int, torch.UntypedStorage] = {}
        self.mixed: list[str] = []
        self.resized: list[torch.UntypedStorage] = []
        self.most_bytes = 0

    def follow(self, x: torch.Tensor) -> None:
        """Count the memory of a tensor of the device that is given back and taken again."""
        self.ignore(x)
        self.resized.append(x.untyped_storage())

    def note_on_host(self, x: torch.Tensor) -> None:
        """Take a tensor as one of the host."""
        for local in _locals(x):
            storage = local.untyped_storage()
            self.on_host[storage._cdata] = storage  # kept, so that no other has its address
            self.ignore(local)

    def is_on_host(self, x: torch.Tensor) -> bool:
        """Check whether a tensor is on the host."""
        return all(local.untyped_storage()._cdata in self.on_host for local in _locals(x))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        hosts = [self.is_on_host(x) for x in given if x.ndim]
        copies = any(func.name().startswith(name) for name in COPIES)
        if any(hosts) and not all(hosts) and not copies:
            stack = [frame.name for frame in traceback.extract_stack(limit=8)]
            if "fingerprint" not in stack:  # what it makes is where its tensor is, which is not told apart here
                self.mixed.append(f"{func} in {stack}")
        if _ELSEWHERE.get() or (hosts and all(hosts) and not copies):
            result = func(*args, **(kwargs or {}))
            for x in pytree.tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    self.note_on_host(x)
            return result
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most_bytes = max(self.most_bytes, self.live_bytes + sum(storage.nbytes() for storage in self.resized))
        return result


def _locals(x: torch.Tensor) -> list[torch.Tensor]:
    if not is_traceable_wrapper_subclass(x):
        return [x]
    inner = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    return [local for each in inner if isinstance(each, torch.Tensor) for local in _locals(each)]
