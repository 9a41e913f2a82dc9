"""Live bytes: a dispatch mode that tracks the storage of every tensor that an operator makes."""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch

from autopar.torch_private import TorchDispatchMode, is_traceable_wrapper_subclass, pytree

_ELSEWHERE: contextvars.ContextVar[bool] = contextvars.ContextVar("elsewhere", default=False)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Exclude tensors made in this scope from the count: they are in other memory, such as the host's."""
    token = _ELSEWHERE.set(True)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


class Allocations(TorchDispatchMode):
    """Counter of the live bytes of storages that operators make, and of those given to :meth:`note`.

    Weak references report the end of a storage, so counting takes as long for a step of any length.

    Args:
        emptied: addresses of storages that have given up their memory for now and do not count; always the same object.

    Attributes:
        peak_bytes: the most that lived at once.
        at: phase of the step and operator of that peak.
    """

    def __init__(self, emptied: Collection[int] = ()) -> None:
        super().__init__()
        self.emptied = emptied
        self.living: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.ignored: set[int] = set()
        self.noted_bytes = 0
        """The bytes of all tensors that live, emptied ones included."""
        self.phase, self.at, self.peak_bytes = "", "", 0

    def ignore(self, x: torch.Tensor) -> None:
        """Stop counting the storage of a tensor, which must outlive this mode."""
        address = x.untyped_storage()._cdata
        self.ignored.add(address)
        self._forget(address)

    def note(self, x: torch.Tensor) -> None:
        """Count the storage of a tensor; of a wrapper of others (a pending collective), theirs."""
        if is_traceable_wrapper_subclass(x):
            for name in x.__tensor_flatten__()[0]:
                inner = getattr(x, name)
                if isinstance(inner, torch.Tensor):  # a DTensor also lists its mesh
                    self.note(inner)
            return
        storage = x.untyped_storage()
        address = storage._cdata
        if address not in self.living and address not in self.ignored:
            # a storage keeps its Python object, and so its weak references, as long as any tensor has it
            ends = weakref.ref(storage, lambda _: self._forget(address))
            self.living[address] = ends, storage.nbytes()
            self.noted_bytes += storage.nbytes()

    def _forget(self, address: int) -> None:
        noted = self.living.pop(address, None)
        if noted is not None:
            self.noted_bytes -= noted[1]

    @property
    def live_bytes(self) -> int:
        """Bytes that live now."""
        return self.noted_bytes - sum(self.living[x][1] for x in self.emptied if x in self.living)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result) if not _ELSEWHERE.get() else ():
            if isinstance(x, torch.Tensor):
                self.note(x)
        # also if nothing is new: an emptied storage gets its memory back without an operator that makes it
        if self.noted_bytes > self.peak_bytes and (live_bytes := self.live_bytes) > self.peak_bytes:
            self.peak_bytes, self.at = live_bytes, f"{self.phase}: {func}"
        return result
