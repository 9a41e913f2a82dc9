"""Memory that is freed after its last reader in the forward and refilled when the backward first needs it.

Autograd saves a tensor by its storage. After the last reader the storage is emptied; a hook in front of the backward of
every reader refills it, which restores whatever was saved of the tensor, and views of it; in front of the backward of
its maker, which comes after all readers', the storage is emptied for good. Operators need no change. Subclasses refill:
a copy is regathered (:mod:`.regather`), a segment recomputed (:mod:`.segments`), and decisions about tensors have
classes of their own (:mod:`autopar.plans.memory_decisions`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import spmd_types as spmd
import torch
from torch.autograd.graph import Node

from autopar.allocations import elsewhere
from autopar.plans.memory_decisions import DECISIONS
from autopar.torch_private import current_backward, is_traceable_wrapper_subclass, keeps_graph, pytree
from autopar.words.trees import PyTree

_FREED: weakref.WeakValueDictionary[int, Freed] = weakref.WeakValueDictionary()
"""Tensors that may be freed now, by storage."""
EMPTIED: set[int] = set()
"""Addresses (``_cdata``) of the storages that are freed now."""


class Freed:
    """A tensor between its last reader in the forward and its first in the backward.

    Attributes:
        empty: its memory is freed now. (Storages of tensors without values grow again when they are looked at, so
            their size does not say it.)
        waiting: numbers of the readers whose backward may still need it.
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
        """Compute the values again and :meth:`put` them; subclasses implement it."""
        raise NotImplementedError

    def fill(self, *_: object) -> None:
        """Compute the values again, if they were freed."""
        if self.empty:
            self.again()

    def put(self, values: torch.Tensor) -> None:
        """Restore the values."""
        self.empty = False
        EMPTIED.difference_update(self.addresses)
        with torch.no_grad():
            for storage, n_bytes, mine, again in zip(
                self.storages, self.n_bytes, self.values, parts(values), strict=True
            ):
                storage.resize_(n_bytes)
                mine.copy_(again)

    def free(self, *_: object) -> None:
        """Free the memory; references to the tensor stay valid."""
        self.empty = True
        EMPTIED.update(self.addresses)
        for storage in self.storages:
            storage.resize_(0)

    def until_backward(self, maker: Node, readers: Sequence[Backwards]) -> None:
        """Free now, refill before the backward of any reader, and free for good before that of the maker.

        Where the maker is one of the readers, as its backward needs its own result, free after its backward.
        """
        self.hold(maker, readers)
        self.leave()

    def leave(self) -> None:
        """Give up the memory, or begin to."""
        self.free()

    def gone(self) -> None:
        """Free the memory of what has begun to leave."""

    def come(self, *_: object) -> None:
        """Begin to fill the memory, where that takes a while."""

    def hold(self, maker: Node, readers: Sequence[Backwards]) -> None:
        """Register the hooks of :meth:`until_backward`."""
        nodes = {node for reader in readers for node in reader.nodes}
        self.waiting.update(range(len(nodes)))
        for number, node in enumerate(nodes):
            node.register_prehook(partial(self._asked, number))
        (maker.register_hook if maker in nodes else maker.register_prehook)(self._is_over)

    def _asked(self, number: int, *_: object) -> None:
        """Refill before the backward of a reader.

        Unless it keeps its graph it needs the values once: autograd drops what the reader has saved.
        """
        if number not in self.waiting:
            return
        self.fill()
        if not keeps_graph():
            self.waiting.remove(number)
            if not self.waiting:
                self.let_go()

    def _is_over(self, *_: object) -> None:
        """Free at the backward of the maker, whose hook lives as long as the graph, and with it what is kept here.

        Where no reader needed the values, because only other copies were gathered from them, those are done by now.
        """
        self.free()
        if not self.waiting and not keeps_graph():
            self.let_go()

    def follow(self, before: Freed | None) -> None:
        """Note the tensor that was given up so long before that its copy must be done by now; if any is under way."""

    def let_go(self) -> None:
        """Drop what is kept to compute the values from; no reader needs them any more."""


class Backwards:
    """The autograd nodes of an operator's results, which may be freed before the operator's inputs are."""

    def __init__(self, results: PyTree) -> None:
        tensors = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
        self.nodes = [x.grad_fn for x in tensors if x.grad_fn is not None]


@torch.compiler.disable
def backwards_of(results: PyTree) -> Backwards:
    """Return the autograd nodes of a reader for :meth:`Freed.until_backward`."""
    return Backwards(results)


@torch.compiler.disable
def give_up(
    whole: torch.Tensor, readers: Sequence[Backwards], decision: str, before: Freed | None = None
) -> Freed | None:
    """Free a tensor until the backward of one of its readers, as a decision about memory says.

    Args:
        whole: its last reader has run.
        readers: the backwards of the operators that read it, and of the one that makes it, if its own backward asks for
            it.
        decision: name of the record that says how it is filled again.
        before: the tensor that was given up :attr:`~autopar.plans.memory_decisions.MemoryDecision.ahead` tensors
            earlier, by a decision with copies beside compute.

    Returns:
        What is given up; None if there is no backward.
    """
    maker = whole.grad_fn
    if maker is None or not will_be_asked_for(whole):
        return None
    fills = DECISIONS[decision].freed
    assert fills is not None
    freed: Freed = fills(whole)
    freed.until_backward(maker, readers)
    freed.follow(before)
    return freed


def will_be_asked_for(x: torch.Tensor) -> bool:
    """Return whether hooks of a tensor's graph will fill its memory again, so that it may be freed until then.

    They will not if there is no graph, nor inside of a backward: ``torch.utils.checkpoint`` runs the forward again
    there, takes what the second graph saves, and runs the backward of the first.
    """
    return x.grad_fn is not None and not spmd.is_type_checking() and current_backward() < 0


def on_host(x: torch.Tensor) -> torch.Tensor:
    """Return a copy in the memory of the host."""
    with elsewhere():
        return x.detach().to("cpu", copy=True)


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the values: those inside a wrapper, as of many ranks in one process."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    names, _ = x.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(x, name))]


def is_empty(x: torch.Tensor) -> bool:
    """Return whether a tensor's memory is freed now."""
    memories = [_FREED.get(part.untyped_storage()._cdata) for part in parts(x)]
    return any(freed is not None and freed.empty for freed in memories)


def fill_all(values: Iterable[object]) -> None:
    """Refill tensors whose memory was freed, before others are computed from them."""
    for x in values:
        for part in parts(x) if isinstance(x, torch.Tensor) else ():
            freed = _FREED.get(part.untyped_storage()._cdata)
            if freed is not None:
                freed.fill()
