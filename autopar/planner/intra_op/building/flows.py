"""Tensors between producers and readers: the states in which each may be, and the cost of every step between them.

The program decides one flow for all tensors of a class with the same readers. A copy that is regathered in the backward
is a state of its own, next to the same state kept, and steps to it cost both gathers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.integer_program import OnlyWith, Tensor
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.reshard import Edge, axis_sets, state_graph
from autopar.plans.regather import is_gather, is_same
from autopar.words.graph import Graph, Ref
from autopar.words.meshes import Mesh
from autopar.words.placements import INVARIANT, REPLICATED, Placement, State, changed_axis, step_collectives


@dataclass
class ReadAlike:
    """Tensors of one class with the same readers."""

    ref: Ref
    count: int = 0
    again: int = 0  # of these, whose first reader belongs to a segment that is recomputed
    readers: tuple[tuple[int, int], ...] = ()
    outputs: tuple[int, ...] = ()
    updates: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()  # the classes of stored buffers whose new value it is


def read_alike(
    graph: Graph, fold: Fold, again: Collection[int], stored: Mapping[str, int] | None = None
) -> dict[int, list[ReadAlike]]:
    """Return hot tensors by the representative of their producer, those with the same readers together.

    ``again`` are the operators of recomputed segments, ``stored`` the buffers whose placement is decided.
    """
    rep = fold.representative
    by_node: dict[int, dict[object, ReadAlike]] = {}
    out_of: dict[Ref, list[int]] = {}
    for number, out in enumerate(graph.outputs):
        if isinstance(out, Ref):
            out_of.setdefault(out, []).append(number)
    update_of: dict[Ref, list[str]] = {}
    kept_of: dict[Ref, list[int]] = {}
    decided = stored or {}
    for name, ref in graph.updates.items():
        if name in decided:
            kept_of.setdefault(ref, []).append(rep[decided[name]])
        else:
            update_of.setdefault(ref, []).append(name)
    for i, node in enumerate(graph.nodes):
        if not node.hot or (node.kind == "buffer" and node.target not in decided):
            continue  # a frozen parameter that the forward writes lies whole
        for k, spec in enumerate(node.outs):
            if spec is None:
                continue
            ref = Ref(i, k)
            read = graph.consumers.get(ref, ())
            if len(read) == 1:
                ((c, p),) = read
                readers: tuple[tuple[int, int], ...] = ((rep[c], p),)
            else:
                readers = tuple(sorted({(rep[c], p) for c, p in read}))
            outs, updates = tuple(out_of.get(ref, ())), tuple(update_of.get(ref, ()))
            kept = tuple(kept_of.get(ref, ()))
            of_node = by_node.setdefault(rep[i], {})
            key = (k, readers, outs, updates, kept)
            if key not in of_node:
                of_node[key] = ReadAlike(Ref(rep[i], k), 0, 0, readers, outs, updates, kept)
            of_node[key].count += 1
            of_node[key].again += 1 if read and read[0][0] in again else 0
    return {i: list(g.values()) for i, g in by_node.items()}


def flow(
    graph: Graph, pricer: Pricer, microbatches: int, group: ReadAlike, producer: int, made_as: Sequence[State],
    readers: Sequence[tuple[int, Sequence[State], Sequence[bool]]],
) -> Tensor:  # fmt: skip
    """Return the flow of a tensor to its readers.

    ``producer`` is the item that makes it in the states ``made_as``, one a strategy; ``readers`` are items with their
    states, and whether each strategy regathers its copy (empty if none does).
    """
    spec = graph.spec(group.ref)
    grad = graph.nodes[group.ref.node].needs_grad and spec.is_float
    mesh = pricer.mesh
    n = len(mesh)
    whole = (INVARIANT, REPLICATED) if grad else (REPLICATED,)
    goals = axis_sets([s for _, states, _ in readers for s in states], n)
    sources = axis_sets(list(made_as), n)
    goals = tuple(
        tuple(dict.fromkeys((*g, *(p for p in s if p in whole)))) for g, s in zip(goals, sources, strict=True)
    )
    # gathering a parameter is the business of its stored placement and lifetime, not of a reshard
    only_free = graph.nodes[group.ref.node].kind == "param" and len(readers) == 1
    number, edges, ends = _network(spec.shape, mesh, sources, goals, only_free)
    for s in (*made_as, *(s for _, all_, _ in readers for s in all_)):
        if s not in number:
            raise AssertionError(f"{graph.nodes[group.ref.node].where}: state {s} of {spec} is not legal")
    price, parts = pricer.step, pricer.step_parts
    times, again = group.count * microbatches, group.again * microbatches
    seconds = [times * s for s in pricer.steps(spec, grad, edges)]
    if again:
        seconds = [s + again * parts(spec, grad, a, b)[0] for s, (a, b) in zip(seconds, edges, strict=True)]
    steps = tuple((a, b, s) for (a, b), s in zip(ends, seconds, strict=True))
    twice = {s for _, states, flags in readers for s, flag in zip(states, flags, strict=False) if flag}
    copies, more = _gathered_twice(twice, edges, mesh, len(number))
    steps += tuple(
        (copies[a] if from_copy else number[a], copies[b],
         times * (price(spec, grad, a, b) + (is_gather(a, b, mesh) and parts(spec, grad, a, b)[0])))
        for a, b, from_copy in more
    )  # fmt: skip
    consumers = tuple(
        (item, tuple((copies if k < len(flags) and flags[k] else number)[s] for k, s in enumerate(states)))
        for item, states, flags in readers
    )
    return Tensor(
        graph.nodes[group.ref.node].name, producer, tuple(number[s] for s in made_as), consumers, steps
    )


@lru_cache(maxsize=20_000)
def _network(
    shape: tuple[int, ...], mesh: Mesh, sources: tuple[tuple[Placement, ...], ...],
    goals: tuple[tuple[Placement, ...], ...], only_free: bool,
) -> tuple[dict[State, int], tuple[Edge, ...], tuple[tuple[int, int], ...]]:  # fmt: skip
    """Return numbers of states, the steps between them and the numbers of each step's ends.

    ``only_free``: no collectives.
    """
    states, edges = state_graph(shape, mesh, sources, goals)
    if only_free:
        edges = tuple((a, b) for a, b in edges if _is_free(a, b))
    number = {s: k for k, s in enumerate(states)}
    return number, edges, tuple((number[a], number[b]) for a, b in edges)


def pieces_for_copies(
    mesh: Mesh, producer: int, made_as: Sequence[State], reader: int, wanted: Sequence[State], flags: Sequence[bool]
) -> list[OnlyWith]:
    """Return the conditions under which a copy is regathered: only along axes along which its tensor is made in shards.

    By this flow a replicated tensor could be cut, kept in shards and gathered; no program does that: it reads and keeps
    the whole tensor.
    """
    conditions = []
    for axis in (a for a, (_, size) in enumerate(mesh) if size > 1 and any(state[a].is_shard for state in made_as)):
        copies = tuple(r for r, flag in enumerate(flags) if flag and wanted[r][axis].is_replicated)
        pieces = tuple(r for r, state in enumerate(made_as) if not state[axis].is_replicated)
        if copies and len(pieces) < len(made_as):
            conditions.append(OnlyWith(reader, copies, producer, pieces))
    return conditions


def _gathered_twice(
    wanted: Collection[State], edges: Sequence[tuple[State, State]], mesh: Mesh, first: int
) -> tuple[dict[State, int], list[tuple[State, State, bool]]]:
    """Return the numbers of regathered copies, counted from ``first``, and the steps to them and between them."""
    into: dict[State, list[State]] = {}
    for a, b in edges if wanted else ():
        if is_gather(a, b, mesh) or is_same(a, b):
            into.setdefault(b, []).append(a)
    numbers = {state: first + k for k, state in enumerate(sorted(wanted))}
    steps: list[tuple[State, State, bool]] = []
    waiting = list(numbers)
    for b in waiting:
        for a in into.get(b, ()):
            if is_gather(a, b, mesh):
                steps.append((a, b, False))
            if any(is_gather(c, a, mesh) for c in into.get(a, ())):  # a is gathered itself
                if a not in numbers:
                    numbers[a] = first + len(numbers)
                    waiting.append(a)
                steps.append((a, b, True))
    return numbers, steps


def _is_free(src: State, dst: State) -> bool:
    """Return whether a step makes no collective, forward or backward."""
    axis = changed_axis(src, dst)
    return step_collectives(src[axis], dst[axis]) == (None, None)
