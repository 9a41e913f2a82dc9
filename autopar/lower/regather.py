"""Copies that are freed after the forward and gathered again when the backward first needs them.

What autograd saves of a gathered copy is its storage. After the last reader the storage is emptied; a hook in front of
the backward of every reader gathers the copy again into the same storage, so whatever was saved of it, and views of it,
are whole again; and in front of the backward of the gather itself, which comes after all readers', the storage is
emptied for good. The piece is kept in between, as a saved tensor is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from autopar.lower import collectives
from autopar.lower.segments import current_mesh, on_mesh

Steps = tuple[tuple[str, tuple[Any, ...]], ...]


_FREED: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
"""Copies that may be freed now, by storage."""


class _Copy:
    """One gathered copy between its last reader in the forward and its first in the backward."""

    def __init__(self, whole: torch.Tensor, piece: torch.Tensor, steps: Steps) -> None:
        self.steps = steps
        self.values = [x.data for x in _parts(whole)]  # .data: filling it is no change that autograd looks for
        self.storages = [x.untyped_storage() for x in self.values]
        self.n_bytes = [storage.nbytes() for storage in self.storages]
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None or not any(x.untyped_storage().nbytes() for x in _parts(piece)):
            hooks = (lambda x: x, lambda x: x)  # a view of a copy that is freed itself is no memory to be packed
        pack, self.unpack = hooks
        self.piece = pack(piece)
        self.mesh = current_mesh()
        _FREED.update((storage._cdata, self) for storage in self.storages)

    def fill(self, *_: Any) -> None:
        """Gather again, unless the copy is there."""
        if any(storage.nbytes() for storage in self.storages):
            return
        with torch.no_grad(), on_mesh(self.mesh) if self.mesh is not None else contextlib.nullcontext():
            x = self.unpack(self.piece)
            for part in _parts(x):
                storage = part.untyped_storage()
                if not storage.nbytes() and storage._cdata in _FREED:  # a view of another copy, which is freed too
                    _FREED[storage._cdata].fill()
            for gather, args in self.steps:
                x = getattr(collectives, gather)(x, *args)
            for storage, n_bytes, values, again in zip(
                self.storages, self.n_bytes, self.values, _parts(x), strict=True
            ):
                storage.resize_(n_bytes)
                values.copy_(again)

    def free(self, *_: Any) -> None:
        """Let the memory go; what refers to the copy stays."""
        for storage in self.storages:
            storage.resize_(0)


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the values: those inside of one that only wraps others, as of many ranks in one process."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    names, _ = x.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(x, name))]


@torch.compiler.disable
def free_until_backward(whole: torch.Tensor, piece: torch.Tensor, steps: Steps, readers: Sequence[Any]) -> None:
    """Free a gathered copy until the backward of one of its readers, where it is gathered again.

    Args:
        whole: the copy; its last reader has run.
        piece: what it was gathered from.
        steps: the gathers, in order: their names in :mod:`autopar.lower.collectives` and arguments after the tensor.
        readers: results of the operators that read it.
    """
    if whole.grad_fn is None or spmd.is_type_checking():
        return
    copy = _Copy(whole, piece, steps)
    nodes = {x.grad_fn for x in tree_leaves(readers) if isinstance(x, torch.Tensor) and x.grad_fn is not None}
    for node in nodes:
        node.register_prehook(copy.fill)
    whole.grad_fn.register_prehook(copy.free)
    copy.free()


__all__ = ["free_until_backward"]
