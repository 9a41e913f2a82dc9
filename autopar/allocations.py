"""How many bytes live: a dispatch mode that notes the storage of every tensor that an operator makes."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.torch_private import TorchDispatchMode, is_traceable_wrapper_subclass, pytree

_ELSEWHERE: contextvars.ContextVar[bool] = contextvars.ContextVar("elsewhere", default=False)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """What operators make in here lies in other memory than that which is counted, such as the host's."""
    token = _ELSEWHERE.set(True)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operators make, and of those given to :meth:`note`, while they live.

    Args:
        is_empty: whether a storage, by its address, has given up its memory for now, and does not count.

    Attributes:
        peak_bytes: the most that lived at once.
        at: phase of the step and operator where that was.
    """

    def __init__(self, is_empty: Callable[[int], bool] | None = None) -> None:
        super().__init__()
        self.is_empty = is_empty
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.ignored: set[int] = set()
        self.noted_bytes = 0  # of all those, the dead that were not looked for since among them
        self.phase, self.at, self.peak_bytes = "", "", 0

    def ignore(self, x: torch.Tensor) -> None:
        """Count the storage of a tensor no longer; it has to outlive this mode."""
        key = x.untyped_storage()._cdata
        self.ignored.add(key)
        noted = self.living.pop(key, None)
        self.noted_bytes -= noted[1] if noted is not None else 0

    def note(self, x: torch.Tensor) -> None:
        """Count the storage of a tensor; of one that only wraps others (a collective under way), theirs."""
        if is_traceable_wrapper_subclass(x):
            for name in x.__tensor_flatten__()[0]:
                inner = getattr(x, name)
                if isinstance(inner, torch.Tensor):  # of a DTensor its mesh stands there, too
                    self.note(inner)
            return
        storage = x.untyped_storage()
        noted = self.living.get(storage._cdata)
        if (noted is None or noted[0].expired()) and storage._cdata not in self.ignored:
            self.living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.noted_bytes += storage.nbytes()

    @property
    def live_bytes(self) -> int:
        """Bytes that live now."""
        self.living = {key: entry for key, entry in self.living.items() if not entry[0].expired()}
        is_empty = self.is_empty
        self.noted_bytes = sum(
            n_bytes for key, (_, n_bytes) in self.living.items() if is_empty is None or not is_empty(key)
        )  # fmt: skip
        return self.noted_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result) if not _ELSEWHERE.get() else ():
            if isinstance(x, torch.Tensor):
                self.note(x)
        # what was empty comes back without an operator that makes it
        if (self.is_empty is not None or self.noted_bytes > self.peak_bytes) and self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at = self.noted_bytes, f"{self.phase}: {func}"
        return result


__all__ = ["Allocations"]
