"""The memory that a program keeps for its backward, counted by watching torch run it on tensors without values.

Every tensor that autograd saves is noted by its storage; a storage counts once however many operators save it, or views
of it, and only while the autograd node that saved it lives. Parameters, buffers and the model's inputs exist anyway
and count apart. Of a recomputed segment, this counts what it keeps from the forward (its inputs), and
:attr:`Watched.again` what it saves the second time.

The recount is compared with the planner's ledger, so it uses neither rules nor strategies.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import Target

from autopar.lower.freed_tensors import is_empty
from autopar.lower.program import Program
from autopar.lower.segments import make_again, recompute_in_backward
from autopar.torch_private import pytree, top_saved_tensors_hooks
from autopar.words.trees import PyTree


class _Held:
    """The replacement of a tensor that an autograd node saves; it dies with the node."""

    def __init__(self, tensor: torch.Tensor, packed: object) -> None:
        self.tensor, self.packed = tensor, packed


class SavedTensors:
    """A record of the tensors that autograd saves in the scope :meth:`on`."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.now = ""
        self.maker: dict[int, str] = {}
        self.saved: list[tuple[weakref.ref[_Held], str]] = []
        self.made_so_far: list[torch.Tensor] = list(given)  # so that no address is used twice
        self.given = {_storage(x) for x in given}

    def made(self, name: str, value: PyTree) -> None:
        """Note the result of a node."""
        for x in pytree.tree_leaves(value):
            if isinstance(x, torch.Tensor):
                self.made_so_far.append(x.detach())  # its storage lives, its autograd node need not
                self.maker.setdefault(_storage(x), name)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Note everything that is saved in this scope, and pass it on to the hooks around it."""
        outer = top_saved_tensors_hooks(True)
        pack, unpack = outer if outer is not None else (torch.Tensor.detach, lambda x: x)

        def note(x: torch.Tensor) -> _Held:
            kept = _Held(x.detach(), pack(x))  # detached: an output in its own node's hand would keep both alive
            self.saved.append((weakref.ref(kept), self.now))
            return kept

        with saved_tensors_hooks(note, lambda kept: unpack(kept.packed)):
            yield

    def kept(self, given: bool = False) -> dict[tuple[str, str], int]:
        """Return the bytes that are still kept, by ``(saved by, made by)``, of given values or of all others."""
        kept: dict[tuple[str, str], int] = {}
        seen: set[int] = set()
        for ref, by in self.saved:
            packed = ref()
            if packed is None or _storage(packed.tensor) in seen or (_storage(packed.tensor) in self.given) != given:
                continue
            storage = _storage(packed.tensor)
            seen.add(storage)
            key = by, self.maker.get(storage, by)
            kept[key] = kept.get(key, 0) + packed.tensor.untyped_storage().nbytes()
        return kept


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


class Watched(torch.fx.Interpreter):
    """A run of a program that tells a :class:`SavedTensors` which node is running.

    Attributes:
        second: this is the second run of a segment.
        again: bytes as of :meth:`SavedTensors.kept`, by the name of a segment, for its second run.
        given_up: outputs that a segment recomputes for readers outside, and bytes of their storages.
        again_bytes: the most of both for segments that were recomputed and not through with their backward.
    """

    def __init__(self, program: Program, watch: SavedTensors) -> None:
        super().__init__(program.runnable)
        self.watch, self.second = watch, False
        self.again: dict[str, dict[tuple[str, str], int]] = {}
        self.watch_of: dict[str, SavedTensors] = {}
        self.given_up: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self.again_bytes = 0

    def ran_again(self, name: str, watch: SavedTensors) -> None:
        """Note that a segment was recomputed."""
        self.again[name], self.watch_of[name] = watch.kept(), watch
        total = 0
        for segment, saved in self.again.items():
            given_up = self.given_up.get(segment, [])
            if segment == name or self.watch_of[segment].kept() or not all(is_empty(x) for x, _ in given_up):
                total += sum(saved.values()) + sum(n_bytes for _, n_bytes in given_up)
        self.again_bytes = max(self.again_bytes, total)

    def run_node(self, n: torch.fx.Node) -> PyTree:
        """Run a node, and note its result."""
        if n.target is make_again:
            output: PyTree = n.args[0]
            value = self.env[output].detach()
            self.given_up.setdefault(output.args[0].target, []).append((value, value.untyped_storage().nbytes()))
        before, self.watch.now = self.watch.now, n.name
        result = super().run_node(n)
        self.watch.now = before
        self.watch.made(n.name, result)
        return result

    def call_module(self, target: Target, args: PyTree, _kwargs: PyTree) -> PyTree:
        """Run a segment as the program does; what it saves the second time counts apart."""
        segment: PyTree = self.submodules[target]
        runs = 0

        def run(*values: torch.Tensor) -> PyTree:
            nonlocal runs
            runs += 1
            inner = copy.copy(self)
            torch.fx.Interpreter.__init__(inner, segment.inner)
            inner.second = runs > 1
            if not inner.second:
                return inner.run(*values)
            inner.watch = SavedTensors(list(values))
            with inner.watch.on():
                result = inner.run(*values)
            self.ran_again(str(target), inner.watch)
            return result

        return recompute_in_backward(run, args, segment.changing, segment.renewed, segment.gives_up)


def watch_of(program: Program, values: Sequence[torch.Tensor], arriving: Collection[str] = ()) -> SavedTensors:
    """Return the watch over a program that runs on `values`, one for each of its inputs.

    Inputs in ``arriving`` come from earlier pipeline stages: those are kept by this one.
    """
    return SavedTensors([x for slot, x in zip(program.slots, values, strict=True) if slot.name not in arriving])
