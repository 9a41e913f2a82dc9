"""When parameters are gathered: ahead of their use, in program order; for the backward in reverse order.

The runtime's copy of a program has three more kinds of calls: ``fetch`` right before the first use of a unit,
``release`` right after its last one, and a ``guard`` around every op that reads a parameter of lifetime ``use``. Inside
a guard, autograd's saved tensors that lie in a gathered copy are kept as handles, so the copy can be freed after the
forward; asking for one in the backward gathers it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from autopar.lower.emit import Program
from autopar.runtime.state import Held, Unit

AHEAD = 2
"""Units under way ahead of the one in use."""


class Schedule:
    """The units of a program in order of first use."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.per_use = [i for i, unit in enumerate(self.units) if unit.per_use]
        self.number = {id(held): i for i, unit in enumerate(self.units) for held in unit.helds}
        self.storages: dict[int, int] = {}
        self.hooks: Any = None
        self.left: dict[int, set[int]] = {}

    def begin(self, same_step: bool) -> None:
        """Before a forward: what was gathered in an earlier step expires, the first gathers start."""
        if not same_step:
            for unit in self.units:
                unit.expire()
        for unit in self.units[: AHEAD + 1]:
            unit.start()

    def fetch(self, i: int) -> None:
        unit = self.units[i]
        unit.fetch()
        if unit.per_use:
            for held in unit.helds:
                self.storages[held.leaf.untyped_storage().data_ptr()] = i
        for ahead in self.units[i + 1 : i + 1 + AHEAD]:
            ahead.start()

    def release(self, i: int) -> None:
        self._free(i)

    def _free(self, i: int) -> None:
        unit = self.units[i]
        if unit.per_use:
            for held in unit.helds:
                self.storages.pop(held.leaf.untyped_storage().data_ptr(), None)
            unit.free()

    # -- saved tensors

    def pack(self, x: torch.Tensor) -> Any:
        i = self.storages.get(x.untyped_storage().data_ptr())
        return x if i is None else (i, x.detach())

    def unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        i, x = kept
        if not self.units[i].ready:
            self.units[i].fetch()
            at = self.per_use.index(i)
            for before in reversed(self.per_use[max(0, at - AHEAD) : at]):
                self.units[before].start()
        return x

    def guard(self) -> None:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()

    def unguard(self) -> None:
        hooks, self.hooks = self.hooks, None
        hooks.__exit__(None, None, None)

    # -- backward

    def done(self, held: Held) -> None:
        """A parameter has its gradient: when all of its unit have, the copy is no longer needed."""
        i = self.number[id(held)]
        left = self.left.setdefault(i, {id(h) for h in self.units[i].helds if h.leaf.requires_grad})
        left.discard(id(held))
        if not left:
            del self.left[i]
            self._free(i)

    def end(self) -> None:
        """After a backward: nothing gathered per use stays."""
        self.left = {}
        for i in self.per_use:
            self._free(i)


def fetch(schedule: Schedule, i: int) -> None:
    """Wait for unit ``i`` and start the next ones."""
    schedule.fetch(i)


def release(schedule: Schedule, i: int) -> None:
    """Free unit ``i`` if it lives for one use."""
    schedule.release(i)


def guard(schedule: Schedule) -> None:
    """From here on, saved tensors in gathered copies become handles."""
    schedule.guard()


def unguard(schedule: Schedule) -> None:
    """End of :func:`guard`."""
    schedule.unguard()


def order_of_use(program: Program) -> list[int]:
    """Numbers of the parameter slots, by first use in the program."""
    position = {node: i for i, node in enumerate(program.module.graph.nodes)}
    placeholders = [n for n in program.module.graph.nodes if n.op == "placeholder"]
    last = len(position)

    def first(i: int) -> int:
        return min((position[user] for user in placeholders[i].users), default=last)

    numbers = [i for i, slot in enumerate(program.slots) if slot.kind == "param"]
    return sorted(numbers, key=lambda i: (first(i), i))


def with_gathers(program: Program, helds: Mapping[str, Held], schedule: Schedule) -> torch.fx.GraphModule:
    """The program with fetches, releases and guards; its first input is the schedule."""
    if not schedule.units:
        return program.module
    graph = torch.fx.Graph()
    remap: dict[torch.fx.Node, torch.fx.Node] = {}
    with graph.inserting_before(None):
        handle = graph.placeholder("_gather_schedule")
    output = graph.graph_copy(program.module.graph, remap)
    nodes = [n for n in graph.nodes]
    position = {n: i for i, n in enumerate(nodes)}
    originals = [n for n in program.module.graph.nodes if n.op == "placeholder"]
    slot_of = {slot.name: remap[n] for slot, n in zip(program.slots, originals, strict=True) if slot.kind == "param"}
    guarded: set[torch.fx.Node] = set()
    for i, unit in enumerate(schedule.units):
        readers: set[torch.fx.Node] = set()
        for held in unit.helds:
            readers |= _readers(slot_of[held.name])
        readers = {n for n in readers if n.op == "call_function"}
        if not readers:
            continue
        first = min(readers, key=lambda n: position[n])
        last = max(readers, key=lambda n: position[n])
        with graph.inserting_before(first):
            graph.call_function(fetch, (handle, i))
        if unit.per_use:
            guarded |= readers
            with graph.inserting_after(last):
                graph.call_function(release, (handle, i))
    for node in guarded:
        with graph.inserting_before(node):
            graph.call_function(guard, (handle,))
        with graph.inserting_after(node):
            graph.call_function(unguard, (handle,))
    graph.output(output)
    return torch.fx.GraphModule(torch.nn.Module(), graph, class_name="ProgramWithGathers")


_VIEWS = (
    "permute", "view", "reshape", "transpose", "expand", "slice", "select", "alias", "detach", "unsqueeze",
    "squeeze", "split", "chunk", "unbind", "getitem", "narrow", "shard", "convert", "aten.t.", "unsafe",
)  # fmt: skip


def _readers(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Ops that read a tensor or a view of it."""
    found: set[torch.fx.Node] = set()
    for user in node.users:
        found.add(user)
        name = str(user.target) if not callable(user.target) else f"{getattr(user.target, '__name__', '')}{user.target}"
        if any(word in name for word in _VIEWS):
            found |= _readers(user)
    return found
