"""The tensors that a plan regathers, recomputes or gives up for the backward, and the source of each gather.

A tensor that is made in shards and wanted replicated is gathered by a step of its reshard path. Operators that read the
whole copy keep it for their backward, and others may keep the shard; where a plan decides it (``gather again``), only
the shard is kept, and the copy is regathered when the backward first needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.errors import PlanError
from autopar.plans.memory_decisions import Memory, MemoryDecision, about_tensors
from autopar.plans.plan import reshard_key
from autopar.rules.aliasing import may_alias
from autopar.rules.operator_call import call_of
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Ref
from autopar.words.meshes import Mesh
from autopar.words.placements import State, Step
from hardware_profiles.strict import Unreadable, parse_count

ReshardPath = Sequence[tuple[State, State]]


def is_gather(src: State, dst: State, mesh: Mesh) -> bool:
    """Return whether a step of one axis gathers shards."""
    axis = Step.between(src, dst).axis
    return src[axis].is_shard and dst[axis].is_replicated and mesh.size(axis) > 1


def is_same(src: State, dst: State) -> bool:
    """Return whether a step of one axis changes the type alone: its result is the same memory."""
    axis = Step.between(src, dst).axis
    return src[axis].is_replicated and dst[axis].is_replicated


def makes_memory(src: State, dst: State, mesh: Mesh) -> bool:
    """Return whether a step of one axis has a result of its own.

    All but those that change the type alone, ``I`` to ``R`` and back, and those on an axis of one rank.
    """
    return mesh.size(Step.between(src, dst).axis) > 1 and not is_same(src, dst)


def can_regather(graph: Graph, ref: Ref, segment_of: Mapping[int, int]) -> bool:
    """Return whether copies of a tensor may be freed between forward and backward.

    It has a gradient, it is no output, and no recomputed segment reads it, which would regather it anyway.

    It has a gradient, it is no output, and no recomputed segment reads it, which would gather it again anyway.
    """
    node = graph.nodes[ref.node]
    if not (node.needs_grad and graph.spec(ref).is_float) or node.kind == "param":
        return False
    if any(out == ref for out in graph.outputs) or ref in graph.updates.values():
        return False
    return not any(reader in segment_of for reader, _ in graph.consumers.get(ref, ()))


def segment_outputs(graph: Graph, keys: Collection[str], segment_of: Mapping[int, int]) -> list[Ref]:
    """Return the tensors of ``StagePlan.make_again``.

    Raises:
        PlanError: a key names no tensor that a recomputed segment makes, or one that the backward cannot ask for.
    """
    refs = []
    for key in keys:
        ref = ref_of(graph, key)
        if ref is None or not can_recompute_result(graph, ref, segment_of):
            raise PlanError(
                f"make_again: '{key}' is not made by what is recomputed, is an output, or has no gradient; remove the "
                "entry"
            )
        refs.append(ref)
    return refs


def may_wait(graph: Graph, ref: Ref, segment_of: Mapping[int, int]) -> bool:
    """Return whether the memory of a tensor may be given up between forward and backward.

    It is the one result of an operator and no view, it has a gradient, it is no output, and no recomputed segment makes
    or reads it.
    """
    node = graph.nodes[ref.node]
    if node.kind != "op" or len(node.outs) != 1 or not (node.needs_grad and node.out.is_float):
        return False
    if ref.node in segment_of or any(reader in segment_of for reader, _ in graph.consumers.get(ref, ())):
        return False
    if any(out == ref for out in graph.outputs) or ref in graph.updates.values():
        return False
    return not may_alias(call_of(node, graph.spec))


def waiting(graph: Graph, memory: Memory, segment_of: Mapping[int, int]) -> dict[Ref, MemoryDecision]:
    """Return the tensors whose memory is given up by a decision about tensors, and the decision.

    Raises:
        PlanError: a decision is made for what is no tensor, cannot wait, or waits by another decision already.
    """
    waits: dict[Ref, MemoryDecision] = {}
    for record in about_tensors():
        for key in memory.get(record.name, ()):
            ref = ref_of(graph, key)
            if ref is None or not may_wait(graph, ref, segment_of) or not record.may(graph, ref):
                raise PlanError(
                    f"memory: {record.name}: '{key}' is no result of an operator that may be given up: it is a "
                    "view, an output, has no gradient, or belongs to what is recomputed; remove the entry"
                )
            if ref in waits:
                raise PlanError(
                    f"memory: '{key}' has two decisions, {waits[ref].name} and {record.name}; remove it from one"
                )
            waits[ref] = record
    return waits


def ref_of(graph: Graph, key: str) -> Ref | None:
    """Return the tensor of a name in a plan (:func:`autopar.plans.plan.reshard_key`); None if there is none."""
    name, _, text = key.partition("#")
    try:
        number = parse_count(text or "0")
    except Unreadable:
        return None
    is_there = name in graph.index and number < len(graph.nodes[graph.index[name]].outs)
    return Ref(graph.index[name], number) if is_there else None


def can_recompute_result(graph: Graph, ref: Ref, segment_of: Mapping[int, int]) -> bool:
    """Return whether a tensor may be given up between forward and backward, to be recomputed with its segment.

    It has a gradient, and it is no output.
    """
    node = graph.nodes[ref.node]
    if ref.node not in segment_of or not (node.needs_grad and graph.spec(ref).is_float):
        return False
    return not any(out == ref for out in graph.outputs) and ref not in graph.updates.values()


def regathered(
    graph: Graph, mesh: Mesh, reshard_paths: Mapping[str, ReshardPath], keys: Collection[str],
    segment_of: Mapping[int, int], chosen: Mapping[int, Strategy],
) -> dict[tuple[Ref, State], tuple[State, tuple[tuple[State, State], ...]]]:  # fmt: skip
    """Return by tensor and state of the copy the state of the shard from which it is gathered, and the steps.

    A copy that is gathered over several axes comes from the shard before the first of them. ``keys`` are tensors, by
    :func:`~autopar.plans.plan.reshard_key`; a copy counts if an operator reads it under its strategy in ``chosen``.

    Raises:
        PlanError: a key names no tensor that is gathered, or one whose copies cannot be freed.
    """
    copies: dict[tuple[Ref, State], tuple[State, tuple[tuple[State, State], ...]]] = {}
    for key in keys:
        ref = ref_of(graph, key)
        before = {dst: src for src, dst in reshard_paths.get(key, ())}
        if ref is None or not any(is_gather(src, dst, mesh) for dst, src in before.items()):
            raise PlanError(f"gather_again: '{key}' is no tensor that the plan gathers; remove the entry")
        if not can_regather(graph, ref, segment_of):
            raise PlanError(
                f"gather_again: '{key}' is an output, has no gradient, or is read by what is recomputed; remove the "
                "entry"
            )
        read = {chosen[i].ins[position] for i, position in graph.consumers.get(ref, ())}
        for dst, src in reversed(before.items()):  # a change of type is a read of what it changes
            read.update({src} if dst in read and is_same(src, dst) else ())
        for dst in before:
            if dst not in read or not is_gather(before[dst], dst, mesh):
                continue
            state, steps = dst, []
            while state in before and (is_gather(before[state], state, mesh) or is_same(before[state], state)):
                if is_gather(before[state], state, mesh):
                    steps.append((before[state], state))
                state = before[state]
            copies[ref, dst] = state, tuple(reversed(steps))
    return copies


def gathers(
    graph: Graph, mesh: Mesh, reshard_paths: Mapping[str, ReshardPath], segment_of: Mapping[int, int]
) -> list[str]:  # fmt: skip
    """Return the keys of all tensors whose gathered copies could be regathered."""
    keys = []
    for i, node in enumerate(graph.nodes):
        for out, spec in enumerate(node.outs):
            ref = Ref(i, out)
            reshard_path = reshard_paths.get(reshard_key(graph, ref), ()) if spec is not None else ()
            if any(is_gather(a, b, mesh) for a, b in reshard_path) and can_regather(graph, ref, segment_of):
                keys.append(reshard_key(graph, ref))
    return keys
