"""Memory that is given up after its last reader in the forward and filled again when the backward first needs it.

What autograd saves of a tensor is its storage. After the last reader the storage is emptied; a hook in front of the
backward of every reader fills it again, so whatever was saved of the tensor, and views of it, are whole again; and in
front of the backward of what made it, which comes after all readers', the storage is emptied for good. No operator
knows of it. How it is filled is for those who give it up: a copy is gathered again (:mod:`.regather`), the result of a
recomputed segment is made again (:mod:`.segments`), and a decision about tensors
(:mod:`autopar.plans.memory_decisions`) says it by a class of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import spmd_types as spmd
import torch

from autopar.allocations import elsewhere
from autopar.plans.memory_decisions import DECISIONS
from autopar.torch_private import is_traceable_wrapper_subclass, keeps_graph, pytree

_FREED: weakref.WeakValueDictionary[int, Freed] = weakref.WeakValueDictionary()
"""Tensors that may be empty now, by storage."""
EMPTIED: set[int] = set()
"""Addresses (``_cdata``) of the storages that are given up now."""


class Freed:
    """One tensor between its last reader in the forward and its first in the backward.

    Attributes:
        empty: its memory is given up now. (Storages of tensors without values grow again when they are looked at, so
            their size does not say it.)
        waiting: numbers of the readers whose backward may still ask for it.
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self.empty = False
        self.waiting: set[int] = set()
        self.values = [x.data for x in parts(whole)]  # .data: filling it is no change that autograd looks for
        self.storages = [x.untyped_storage() for x in self.values]
        self.n_bytes = [storage.nbytes() for storage in self.storages]
        self.addresses = [storage._cdata for storage in self.storages]
        _FREED.update(dict.fromkeys(self.addresses, self))
        weakref.finalize(self, EMPTIED.difference_update, self.addresses).atexit = False

    def again(self) -> None:
        """Make the values again and :meth:`put` them; for those who inherit."""
        raise NotImplementedError

    def fill(self, *_: Any) -> None:
        """Make the values again, unless they are there."""
        if self.empty:
            self.again()

    def put(self, values: torch.Tensor) -> None:
        """These are the values."""
        self.empty = False
        EMPTIED.difference_update(self.addresses)
        with torch.no_grad():
            for storage, n_bytes, mine, again in zip(
                self.storages, self.n_bytes, self.values, parts(values), strict=True
            ):
                storage.resize_(n_bytes)
                mine.copy_(again)

    def free(self, *_: Any) -> None:
        """Let the memory go; what refers to it stays."""
        self.empty = True
        EMPTIED.update(self.addresses)
        for storage in self.storages:
            storage.resize_(0)

    def until_backward(self, maker: Any, readers: Sequence[Backwards]) -> None:
        """Free now, fill before the backward of any of the readers, and free for good before that of the maker; behind
        it, if the maker is one of the readers, as its backward asks for its own result."""
        nodes = {node for reader in readers for node in reader.nodes}
        self.waiting.update(range(len(nodes)))
        for number, node in enumerate(nodes):
            node.register_prehook(partial(self._asked, number))
        (maker.register_hook if maker in nodes else maker.register_prehook)(self._is_over)
        self.free()

    def _asked(self, number: int, *_: Any) -> None:
        """The backward of a reader begins: unless it keeps its graph, it asks only once, as autograd lets go of what
        the reader has saved."""
        if number not in self.waiting:
            return
        self.fill()
        if not keeps_graph():
            self.waiting.remove(number)
            if not self.waiting:
                self.let_go()

    def _is_over(self, *_: Any) -> None:
        """The backward of the maker begins. The hook lives as long as the graph, and with it what is held here. Where
        no reader asks, because only other copies were gathered from this one, those are through by now."""
        self.free()
        if not self.waiting and not keeps_graph():
            self.let_go()

    def let_go(self) -> None:
        """No reader asks for the values any more; for those who hold something to make them from."""


class Backwards:
    """The autograd nodes of an operator's results, which need not live until what the operator reads is given up."""

    def __init__(self, results: Any) -> None:
        tensors = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
        self.nodes = [x.grad_fn for x in tensors if x.grad_fn is not None]


@torch.compiler.disable
def backwards_of(results: Any) -> Backwards:
    """What :meth:`Freed.until_backward` has to know of a reader."""
    return Backwards(results)


@torch.compiler.disable
def give_up(whole: torch.Tensor, readers: Sequence[Backwards], decision: str) -> None:
    """Give a tensor up until the backward of one of its readers, as a decision about memory says.

    Args:
        whole: its last reader has run.
        readers: of the operators that read it; of that which makes it, too, if its own backward asks for it.
        decision: name of the record that says how it is filled again.
    """
    if whole.grad_fn is None or spmd.is_type_checking():
        return
    fills = DECISIONS[decision].freed
    assert fills is not None
    fills(whole).until_backward(whole.grad_fn, readers)


def on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in the memory of the host, which counts as none of the device's, whichever that is."""
    with elsewhere():
        return x.detach().to("cpu", copy=True)


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the values: those inside of one that only wraps others, as of many ranks in one process."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    names, _ = x.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(x, name))]


def is_empty(x: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that is given up now."""
    memories = [_FREED.get(part.untyped_storage()._cdata) for part in parts(x)]
    return any(freed is not None and freed.empty for freed in memories)


def fill_all(values: Iterable[Any]) -> None:
    """Fill what lies in memory that was given up: something else is about to be made from it."""
    for x in values:
        for part in parts(x) if isinstance(x, torch.Tensor) else ():
            freed = _FREED.get(part.untyped_storage()._cdata)
            if freed is not None:
                freed.fill()


__all__ = [
    "EMPTIED", "Backwards", "Freed", "backwards_of", "fill_all", "give_up", "is_empty", "on_host", "parts",
]  # fmt: skip
