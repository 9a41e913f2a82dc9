"""What a program keeps for its backward, counted from outside: it runs on tensors without values, and torch is watched.

Every tensor that autograd saves is noted by its storage; a storage counts once however many operators save it, or views
of it, and only while the autograd node that saved it lives. Parameters, buffers and the model's inputs are there anyway
and count apart. A segment that runs again in the backward shows here what it keeps from the forward (its inputs), and
in :attr:`Watched.again` what it saves the second time.

Nothing here knows rules, strategies or the planner's ledger: that is what this recount is compared with.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch.autograd.graph import saved_tensors_hooks

from autopar.lower.freed_tensors import is_empty
from autopar.lower.program import Program
from autopar.lower.segments import again_in_backward, make_again
from autopar.torch_private import pytree, top_saved_tensors_hooks


class _Held:
    """What an autograd node holds in place of a tensor that it saves; it dies with the node."""

    def __init__(self, tensor: torch.Tensor, packed: Any) -> None:
        self.tensor, self.packed = tensor, packed


class SavedTensors:
    """Notes what autograd saves while :meth:`on` is entered."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.now = ""
        self.maker: dict[int, str] = {}
        self.saved: list[tuple[weakref.ref[_Held], str]] = []
        self.made_so_far: list[torch.Tensor] = list(given)  # so that no address is used twice
        self.given = {_storage(x) for x in given}

    def made(self, name: str, value: Any) -> None:
        """A node's result."""
        for x in pytree.tree_leaves(value):
            if isinstance(x, torch.Tensor):
                self.made_so_far.append(x.detach())  # its storage lives, its autograd node need not
                self.maker.setdefault(_storage(x), name)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Everything saved in here is noted, and then given to the hooks that were there before."""
        outer = top_saved_tensors_hooks(True)
        pack, unpack = outer if outer is not None else (torch.Tensor.detach, lambda x: x)

        def note(x: torch.Tensor) -> _Held:
            kept = _Held(x.detach(), pack(x))  # detached: an output in its own node's hand would keep both alive
            self.saved.append((weakref.ref(kept), self.now))
            return kept

        with saved_tensors_hooks(note, lambda kept: unpack(kept.packed)):
            yield

    def kept(self, given: bool = False) -> dict[tuple[str, str], int]:
        """Bytes that are still held, by ``(saved by, made by)``: of what was not given, or of what was."""
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
    """Runs a program and tells a :class:`SavedTensors` which node is running.

    Attributes:
        second: whether this is the second run of a segment.
        again: bytes as :meth:`SavedTensors.kept` has them, by the name of a segment, for its second run.
        given_up: results that a segment makes again for those who read them outside, and bytes of their storages.
        again_bytes: the most of both that segments had at once which had run again and were not through with their
            backward.
    """

    def __init__(self, program: Program, watch: SavedTensors) -> None:
        super().__init__(program.runnable)
        self.watch, self.second = watch, False
        self.again: dict[str, dict[tuple[str, str], int]] = {}
        self.watch_of: dict[str, SavedTensors] = {}
        self.given_up: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self.again_bytes = 0

    def ran_again(self, name: str, watch: SavedTensors) -> None:
        """A segment has run again."""
        self.again[name], self.watch_of[name] = watch.kept(), watch
        total = 0
        for segment, saved in self.again.items():
            given_up = self.given_up.get(segment, [])
            if segment == name or self.watch_of[segment].kept() or not all(is_empty(x) for x, _ in given_up):
                total += sum(saved.values()) + sum(n_bytes for _, n_bytes in given_up)
        self.again_bytes = max(self.again_bytes, total)

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target is make_again:
            output: Any = n.args[0]
            value = self.env[output].detach()
            self.given_up.setdefault(output.args[0].target, []).append((value, value.untyped_storage().nbytes()))
        before, self.watch.now = self.watch.now, n.name
        result = super().run_node(n)
        self.watch.now = before
        self.watch.made(n.name, result)
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A segment, as the program runs it: what it saves the second time counts apart."""
        segment: Any = self.submodules[target]
        runs = 0

        def run(*values: Any) -> Any:
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

        return again_in_backward(run, args, segment.changing, segment.renewed, segment.gives_up)


def watch_of(program: Program, values: Sequence[torch.Tensor], arriving: Collection[str] = ()) -> SavedTensors:
    """The watch over a program that runs on these values, one for each of its inputs.

    Args:
        arriving: names of inputs that come from earlier stages of a pipeline: those are kept by this one.
    """
    return SavedTensors([x for slot, x in zip(program.slots, values, strict=True) if slot.name not in arriving])


__all__ = ["SavedTensors", "Watched", "watch_of"]
