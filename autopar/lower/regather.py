"""Copies that are freed after the forward and regathered when the backward first needs them.

The shard that a copy was gathered from is kept until the backward of the copy's last reader, as a saved tensor is
(:mod:`.freed_tensors`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from autopar.errors import RunError
from autopar.lower import collectives
from autopar.lower.freed_tensors import Backwards, Freed, fill_all, is_empty, will_be_asked_for
from autopar.lower.segments import current_mesh, on_mesh
from autopar.torch_private import top_saved_tensors_hooks
from autopar.words.trees import PyTree

Steps = tuple[tuple[str, tuple[PyTree, ...]], ...]


class _Copy(Freed):
    """A gathered copy."""

    def __init__(self, whole: torch.Tensor, piece: torch.Tensor, steps: Steps) -> None:
        super().__init__(whole)
        self.steps = steps
        hooks: PyTree = top_saved_tensors_hooks(False)
        if hooks is None or is_empty(piece):
            hooks = (lambda x: x, lambda x: x)  # what was given up itself is no memory to be packed
        pack, self.unpack = hooks
        self.piece = pack(piece)
        self.mesh = current_mesh()

    def let_go(self) -> None:
        """Drop the shard."""
        self.piece = None

    def again(self) -> None:
        """Gather the copy again."""
        if self.piece is None:
            raise RunError(
                "a second backward asks for a copy that was gathered again for the first one; call the first one with "
                "retain_graph=True, or plan without gather_again"
            )
        with torch.no_grad(), on_mesh(self.mesh) if self.mesh is not None else contextlib.nullcontext():
            x = self.unpack(self.piece)
            fill_all([x])  # a view of another copy, or made by a segment that runs again
            for gather, args in self.steps:
                x = getattr(collectives, gather)(x, *args)
            self.put(x)


@torch.compiler.disable
def free_until_backward(whole: torch.Tensor, piece: torch.Tensor, steps: Steps, readers: Sequence[Backwards]) -> None:
    """Free a gathered copy until the backward of one of its readers, where it is gathered again.

    Args:
        whole: the copy; its last reader has run.
        piece: the shard that it was gathered from.
        steps: the gathers, in order: their names in :mod:`autopar.lower.collectives` and arguments after the tensor.
        readers: the backwards of the operators that read it.
    """
    maker = whole.grad_fn
    if maker is None or not will_be_asked_for(whole):
        return
    _Copy(whole, piece, steps).until_backward(maker, readers)
