"""CUDA graphs, emulated: the operators that a function runs are recorded, and run again on the same memory.

A replay runs no Python of the model, and numbers from the host are those of the recording, as in a CUDA graph. Each
operator reads where it read and writes where it wrote. Reading from the device within a recording is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.distributed import Work
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.equal.default", "aten.nonzero.default"}


class RecordedKernels(TorchDispatchMode):
    """A recorder of :class:`autopar.GraphedStep` for processors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(not issubclass(t, torch.Tensor) or t.__name__ == "DTensor" for t in types):
            return NotImplemented  # what it consists of comes here
        if str(func) in READS:
            raise AssertionError(f"the host reads from the device in a recording: {func}")
        out = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.set_:  # a name for memory that stays where it is
            self.calls = [call for call in self.calls if call[3] is not args[0]]
            return out
        self.calls.append((func, args, kwargs, out))
        return out

    def record(self, run: Callable[[], Any], warm: int) -> Any:
        for _ in range(warm):
            run()
        grow = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, n_bytes: int) -> Any:
            """Memory that is given up in a recording stays where it is for the replays."""
            return grow(storage, n_bytes) if n_bytes > storage.nbytes() else storage

        with mock.patch.object(torch.UntypedStorage, "resize_", resize), self:
            return run()

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, before in self.calls:
            now = func(*args, **kwargs)
            for x in pytree.tree_leaves(now):  # collectives in order, each until it is done
                if isinstance(x, torch.ScriptObject) and "Work" in str(x._type()):
                    Work.unbox(x).wait()
                elif isinstance(x, torch.Tensor) and func.namespace == "_c10d_functional":
                    torch.ops._c10d_functional.wait_tensor(x)
            for old, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(now), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.detach().copy_(new)
