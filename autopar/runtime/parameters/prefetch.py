"""The order of parameter gathers: ahead of their use in program order, in reverse order for the backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx

from autopar.lower.overlapped_reductions import with_overlap
from autopar.lower.program import Program
from autopar.lower.segments import with_segments
from autopar.rules.function import Callee
from autopar.runtime.parameters.gathering import Unit
from autopar.runtime.parameters.state import HeldParam
from autopar.runtime.ranks.streams import StepStream
from autopar.torch_private import current_backward

AHEAD = 2
"""Units under way ahead of the one in use."""


class GatherOrder:
    """The units of a program in order of first use.

    Args:
        stream: the stream on which the program runs, and all that is gathered for it.
    """

    def __init__(self, units: Sequence[Unit], stream: StepStream) -> None:
        self.units, self.stream = list(units), stream
        self.read: set[int] = set()  # by the programs that run here; nobody fetches the others, nor waits for them
        self.per_use = [i for i, unit in enumerate(self.units) if unit.per_use]
        self.number = {id(held_param): i for i, unit in enumerate(self.units) for held_param in unit.held_params}
        self.storages: dict[int, int] = {}
        self.hooks: Any = None
        self.left: dict[int, set[int]] = {}
        self.late: set[int] = set()

    def begin(self, same_step: bool) -> None:
        """Begin a forward: what was gathered in an earlier step expires, the first gathers start."""
        if not same_step:
            for unit in self.units:
                unit.expire()
        self._start(range(AHEAD + 1))
        self._start(i for i, unit in enumerate(self.units) if unit.comes_early)

    def _start(self, numbers: Iterable[int]) -> None:
        """Begin to gather the units in `numbers` that are read."""
        for i in numbers:
            if i in self.read:
                self.units[i].start()

    def begin_whole(self, same_step: bool) -> None:
        """Begin a compiled forward, which gathers what lives for one use itself: all else is gathered now."""
        for unit in self.units:
            if not same_step:
                unit.expire()
            if not unit.per_use:
                unit.start()
        for unit in self.units:
            if not unit.per_use:
                unit.fetch()

    def fetch(self, i: int, last: int | None = None) -> None:
        """Wait for unit ``i`` and start the next ones; in a segment that runs again, none after unit ``last``."""
        unit = self.units[i]
        self.stream.check("a gather of parameters")
        unit.fetch()
        if unit.per_use:
            for held_param in unit.held_params:
                self.storages[held_param.leaf.untyped_storage().data_ptr()] = i
        end = i + 1 + AHEAD
        if last is not None and current_backward() != -1:  # in a backward: those after it are done with
            end = min(end, last + 1)
        self._start(range(i + 1, end))

    def release(self, i: int) -> None:
        """Free the gathered parameters of unit ``i`` after its last use in the forward."""
        self._free(i)

    def _free(self, i: int) -> None:
        unit = self.units[i]
        if unit.per_use:
            for held_param in unit.held_params:
                self.storages.pop(held_param.leaf.untyped_storage().data_ptr(), None)
            unit.free()

    # -- saved tensors

    def pack(self, x: torch.Tensor) -> Any:
        """Return a handle for a saved tensor that is in a gathered copy, else the tensor."""
        i = self.storages.get(x.untyped_storage().data_ptr())
        return x if i is None else (i, x.detach())

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return the tensor of a handle, gathering its unit again if it was freed."""
        if isinstance(kept, torch.Tensor):
            return kept
        i, x = kept
        if not self.units[i].ready:
            self.stream.check("a gather of parameters in the backward")
            self.units[i].fetch()
            at = self.per_use.index(i)
            self._start(reversed(self.per_use[max(0, at - AHEAD) : at]))
        return x

    def guard(self) -> None:
        """Begin to turn saved tensors into handles."""
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()

    def unguard(self) -> None:
        """Stop turning saved tensors into handles."""
        hooks, self.hooks = self.hooks, None
        hooks.__exit__(None, None, None)

    # -- backward

    def done(self, held_param: HeldParam) -> None:
        """Note that a parameter has its gradient; once its whole unit has, the copy is no longer needed."""
        i = self.number[id(held_param)]
        left = self.left.setdefault(i, {id(h) for h in self.units[i].held_params if h.leaf.requires_grad})
        left.discard(id(held_param))
        if not left:
            del self.left[i]
            if i not in self.late:
                self._free(i)

    def end(self) -> None:
        """End a backward: what was gathered for one use is freed."""
        self.left = {}
        for i in self.per_use:
            self._free(i)

    def drop(self) -> None:
        """Forget a forward or backward that failed: its pending gathers, and what they gathered."""
        if self.hooks is not None:
            self.unguard()
        for unit in self.units:
            unit.drop()
        self.storages = {}
        self.end()


def fetch(schedule: GatherOrder, i: int, last: int | None = None) -> None:
    """Wait for unit ``i`` and start the next ones; ``last`` is the last unit of its segment, if it is in one."""
    schedule.fetch(i, last)


def release(schedule: GatherOrder, i: int) -> None:
    """Free unit ``i`` if it lives for one use."""
    schedule.release(i)


def guard(schedule: GatherOrder) -> None:
    """Turn saved tensors in gathered copies into handles from here on."""
    schedule.guard()


def unguard(schedule: GatherOrder) -> None:
    """End of :func:`guard`."""
    schedule.unguard()


def order_of_use(program: Program) -> list[int]:
    """Return the numbers of the parameter slots, by first use in the program."""
    position = {node: i for i, node in enumerate(program.module.graph.nodes)}
    placeholders = [n for n in program.module.graph.nodes if n.op == "placeholder"]
    last = len(position)

    def first(i: int) -> int:
        return min((position[user] for user in placeholders[i].users), default=last)

    numbers = [i for i, slot in enumerate(program.slots) if slot.kind == "param"]
    return sorted(numbers, key=lambda i: (first(i), i))


def with_gathers(program: Program, schedule: GatherOrder) -> torch.fx.GraphModule:  # noqa: C901  (one pass over nodes)
    """Return the program as it runs, with fetches, releases and guards; its first input is the schedule."""
    if not schedule.units:
        return _to_run(_copy_of(program.module.graph))
    graph = torch.fx.Graph()
    remap: dict[torch.fx.Node, torch.fx.Node] = {}
    with graph.inserting_before(None):
        handle = graph.placeholder("_gather_schedule")
    output = graph.graph_copy(program.module.graph, remap)
    nodes = [n for n in graph.nodes]
    position = {n: i for i, n in enumerate(nodes)}
    originals = [n for n in program.module.graph.nodes if n.op == "placeholder"]
    slot_of = {slot.name: remap[n] for slot, n in zip(program.slots, originals, strict=True) if slot.kind == "param"}
    ends: dict[int, torch.fx.Node] = {n.meta["segment"]: n for n in nodes if "segment" in n.meta}
    fetched: list[tuple[int, torch.fx.Node]] = []
    guarded: set[torch.fx.Node] = set()
    for i, unit in enumerate(schedule.units):
        readers: set[torch.fx.Node] = set()
        for held_param in unit.held_params:
            readers |= _readers(slot_of[held_param.name])
        readers = {n for n in readers if n.op == "call_function"}
        if not readers:
            continue
        schedule.read.add(i)
        ordered = sorted(readers, key=lambda n: position[n])
        by_segment: dict[int | None, torch.fx.Node] = {None: ordered[0]}
        for node in ordered:
            if "segment" in node.meta:
                by_segment.setdefault(node.meta["segment"], node)
        fetched.extend((i, node) for node in dict.fromkeys(by_segment.values()))
        trained = all(held_param.leaf.requires_grad for held_param in unit.held_params)
        if unit.per_use and len(by_segment) > 1 and not trained:
            schedule.late.add(i)  # nobody says when the backward of a segment is done with a frozen parameter
        if unit.per_use:
            guarded |= {n for n in readers if "segment" not in n.meta}
            last = ordered[-1]
            with graph.inserting_after(ends[last.meta["segment"]] if "segment" in last.meta else last):
                graph.call_function(release, (handle, i))
    last_of: dict[int, int] = {}
    for i, node in fetched:
        if "segment" in node.meta:
            last_of[node.meta["segment"]] = max(i, last_of.get(node.meta["segment"], i))
    for i, node in fetched:
        segment = node.meta.get("segment")
        with graph.inserting_before(node):
            new = graph.call_function(fetch, (handle, i) if segment is None else (handle, i, last_of[segment]))
        if segment is not None:
            new.meta["segment"] = segment
    for node in guarded:
        with graph.inserting_before(node):
            graph.call_function(guard, (handle,))
        with graph.inserting_after(node):
            graph.call_function(unguard, (handle,))
    for unit in schedule.units:
        for held_param in unit.held_params if unit.per_use else ():
            _copy_for_functions(graph, slot_of[held_param.name])
    graph.output(output)
    return _to_run(graph)


def _copy_of(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _to_run(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Copy a program as it runs: reductions of gradients overlap, and segments are recomputed."""
    with_overlap(graph)
    return with_segments(torch.fx.GraphModule(torch.nn.Module(), graph, class_name="ProgramThatRuns"))


def _copy_for_functions(graph: torch.fx.Graph, parameter: torch.fx.Node) -> None:
    """Give a user's own code copies of a parameter that is freed after its use, and of views of it.

    No guard sees what such code keeps for its backward outside of ``ctx.save_for_backward``.
    """
    faces = {parameter} | {n for n in _readers(parameter) if n.users}
    for node in _readers(parameter):
        if not isinstance(node.target, Callee):
            continue
        for face in faces.intersection(node.all_input_nodes):
            with graph.inserting_before(node):
                copy = graph.call_function(torch.clone, (face,))
            if "segment" in node.meta:
                copy.meta["segment"] = node.meta["segment"]
            node.replace_input_with(face, copy)


def _readers(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the operators that read a tensor or a view of it."""
    readers: set[torch.fx.Node] = set()
    for user in node.users:
        readers.add(user)
        if user.meta.get("autopar", {}).get("alias", True):  # what nothing is known of may be a view
            readers |= _readers(user)
    return readers
