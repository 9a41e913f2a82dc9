"""Cutting a graph into pipeline stages: every stage becomes a graph of its own.

A stage is a run of operators in execution order, so tensors only ever flow to later stages, to the next one or past it
(skip connections, an encoder's output). Tensors that depend on no parameter (masks, positions) are recomputed in every
stage that wants them, since making them is cheaper than sending them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.errors import PlanError
from autopar.plans.plan import StageEdge, reshard_key
from autopar.words.graph import Graph, Node, Ref, map_refs


@dataclass(frozen=True)
class StageGraph:
    """One stage.

    Attributes:
        graph: what it computes. Tensors from earlier stages are inputs of kind ``input`` that are ``hot``; its first
            ``graph.sends`` outputs are tensors for later stages, the others outputs of the model.
        takes: the tensors from earlier stages, in the order of their input nodes.
        gives: the tensors for later stages, in the order of the outputs.
        outputs: positions in the model's outputs of the outputs that follow.
    """

    number: int
    graph: Graph
    takes: tuple[StageEdge, ...]
    gives: tuple[StageEdge, ...]
    outputs: tuple[int, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model's own inputs that this stage reads."""
        return tuple(n.target for _, n in self.graph.of_kind("input") if n.target not in self.graph.arriving)


def hot_ops(graph: Graph) -> list[int]:
    """Return the operators that stages are made of: those that depend on a parameter, in execution order."""
    return [i for i, node in enumerate(graph.nodes) if node.kind == "op" and node.hot]


def cut(graph: Graph, starts: Sequence[str]) -> tuple[StageGraph, ...]:
    """Return the stages of a graph.

    ``starts``: name of the first operator of every stage but the first, in execution order; none for the graph as
    it is.

    Raises:
        PlanError: an unknown operator, an order that is not that of execution, or a buffer that one stage changes and
            another reads.
    """
    if not starts:
        return (StageGraph(0, graph, (), (), tuple(range(len(graph.outputs)))),)
    ops = hot_ops(graph)
    position = {graph.nodes[i].name: p for p, i in enumerate(ops)}
    for name in starts:
        if name not in position:
            raise PlanError(
                f"stage begins at '{name}', which is no operator that a stage can begin with; see autopar show --code"
            )
    bounds = [0, *(position[name] for name in starts), len(ops)]
    for a, b in pairwise(bounds):
        if a >= b:
            raise PlanError(
                f"stages begin at operators number {bounds[1:-1]} of {len(ops)}; every stage needs at least one, in "
                "execution order"
            )
    stage_of = {i: s for s, (a, b) in enumerate(pairwise(bounds)) for i in ops[a:b]}
    wanted = [_closure(graph, stage_of, s) for s in range(len(bounds) - 1)]
    last = len(wanted) - 1
    made_at = {n: _update_stage(graph, ref, stage_of, last) for n, ref in graph.updates.items()}
    for name, ref in graph.updates.items():
        wanted[made_at[name]] |= _cold(graph, [ref])
    for out in graph.outputs:
        if isinstance(out, Ref) and out.node not in stage_of:
            wanted[last] |= _cold(graph, [out])
    users: dict[Ref, set[int]] = {}
    for i, s in stage_of.items():
        for ref in graph.nodes[i].refs:
            if stage_of.get(ref.node, s) != s:
                users.setdefault(ref, set()).add(s)
    _check_buffers(graph, wanted, made_at)
    stage_edges: dict[Ref, StageEdge] = {}
    leaving = [0] * (last + 1)
    for ref in sorted(users):
        node, source = graph.nodes[ref.node], stage_of[ref.node]
        stage_edges[ref] = StageEdge(
            reshard_key(graph, ref), graph.spec(ref), node.needs_grad and graph.spec(ref).is_float, source,
            leaving[source], tuple(sorted(users[ref])),
        )  # fmt: skip
        leaving[source] += 1
    return tuple(_stage(graph, s, stage_of, wanted[s], stage_edges, made_at, last) for s in range(last + 1))


def _cold(graph: Graph, refs: Sequence[Ref]) -> set[int]:
    """Return the nodes that must be computed once more for tensors that depend on no parameter."""
    nodes: set[int] = set()
    todo = [r.node for r in refs]
    while todo:
        i = todo.pop()
        node = graph.nodes[i]
        if i in nodes or (node.kind == "op" and node.hot):
            continue
        nodes.add(i)
        todo.extend(r.node for r in node.refs)
    return nodes


def _closure(graph: Graph, stage_of: dict[int, int], stage: int) -> set[int]:
    of_stage = {i for i, s in stage_of.items() if s == stage}
    return of_stage | _cold(graph, [ref for i in of_stage for ref in graph.nodes[i].refs])


def _update_stage(graph: Graph, ref: Ref, stage_of: dict[int, int], last: int) -> int:
    """Return the stage of a buffer's new value; a counter depends on nothing and goes with the module it counts for."""
    if ref.node in stage_of:
        return stage_of[ref.node]
    module = graph.nodes[ref.node].module
    return next((s for i, s in stage_of.items() if graph.nodes[i].module == module), last)


def spans_of_written_buffers(graph: Graph) -> list[tuple[int, int]]:
    """Return for each buffer that the forward changes the first and last position of its users among the hot operators.

    They must be in one stage, so none can begin after the first and up to the last.
    """
    ops = hot_ops(graph)
    position = {i: p for p, i in enumerate(ops)}
    changed = graph.updates.keys() | graph.statistics
    buffers = {i: node.target for i, node in graph.of_kind("buffer") if node.target in changed}
    if not buffers or not ops:
        return []
    of_module: dict[str, int] = {}
    for i, p in position.items():
        of_module.setdefault(graph.nodes[i].module, p)
    from_buffers: dict[int, frozenset[str]] = {i: frozenset([name]) for i, name in buffers.items()}
    places: dict[str, list[int]] = {name: [] for name in buffers.values()}
    for i, node in graph.of_kind("op"):
        read = frozenset().union(*(from_buffers.get(ref.node, frozenset()) for ref in node.refs))
        if i in position:
            for name in read:
                places[name].append(position[i])
        elif read:  # it is recomputed wherever it is wanted
            from_buffers[i] = read
    for name, at in places.items():
        if name not in graph.updates:  # norms write it where they read it
            continue
        maker = graph.updates[name].node
        at.append(position[maker] if maker in position else of_module.get(graph.nodes[maker].module, len(ops) - 1))
    return [(min(at), max(at)) for at in places.values() if at]


def _check_buffers(graph: Graph, wanted: Sequence[set[int]], made_at: dict[str, int]) -> None:
    for i, node in graph.of_kind("buffer"):
        readers = [s for s, nodes in enumerate(wanted) if i in nodes]
        if node.target in made_at and any(s != made_at[node.target] for s in readers):
            raise PlanError(
                f"buffer '{node.target}' is changed in stage {made_at[node.target]} and read in stages {readers}; "
                "choose cuts that leave its module in one stage"
            )
        if node.target in graph.statistics and len(readers) > 1:
            raise PlanError(
                f"norms in stages {readers} write the running statistics '{node.target}', of which each stage would "
                "have its own; choose cuts that leave all calls of that norm in one stage"
            )


def _stage(
    graph: Graph, number: int, stage_of: dict[int, int], wanted: set[int], stage_edges: dict[Ref, StageEdge],
    made_at: dict[str, int], last: int,
) -> StageGraph:  # fmt: skip
    arriving = {ref: stage_edge for ref, stage_edge in stage_edges.items() if number in stage_edge.targets}
    nodes: list[Node] = []
    renumbered: dict[Ref, Ref] = {}
    leaves = [i for i in sorted(wanted) if graph.nodes[i].kind != "op"]
    leaves += [graph.index[n] for n, s in made_at.items() if s == number and graph.index[n] not in wanted]
    before = _written_before(graph, {graph.nodes[i].target for i in leaves if graph.nodes[i].kind == "param"}, number)
    if before is not None:
        leaves += [k for _, n in before.of_kind("buffer") if (k := graph.index[n.name]) not in leaves]
    for i in sorted(leaves):
        renumbered[Ref(i)] = Ref(len(nodes))
        nodes.append(graph.nodes[i])
    for ref, stage_edge in arriving.items():
        node = graph.nodes[ref.node]
        renumbered[ref] = Ref(len(nodes))
        name = f"from_{node.name}" + (f"_{ref.out}" if ref.out else "")
        nodes.append(
            Node(
                name, "input", stage_edge.tensor, (), {}, (stage_edge.spec,), node.module, node.source,
                stage_edge.needs_grad, True,
            )
        )  # fmt: skip
    for i in sorted(wanted):
        node = graph.nodes[i]
        if node.kind != "op":
            continue
        args, kwargs = (map_refs(a, renumbered.__getitem__) for a in (node.args, node.kwargs))
        for out in range(len(node.outs)):
            renumbered[Ref(i, out)] = Ref(len(nodes), out)
        nodes.append(replace(node, args=args, kwargs=kwargs, site=i if node.site < 0 else node.site))
    leaving = {ref: stage_edge for ref, stage_edge in stage_edges.items() if stage_edge.source == number}
    positions = [
        k for k, out in enumerate(graph.outputs)
        if (stage_of.get(out.node, last) if isinstance(out, Ref) else last) == number
    ]  # fmt: skip
    outs = [graph.outputs[k] for k in positions]
    loss = len(leaving) + positions.index(graph.loss) if graph.loss in positions else None
    names = {n.target for n in nodes if n.kind == "param"}
    cut_graph = Graph(
        tuple(nodes), (*(renumbered[r] for r in leaving), *(renumbered[o] if isinstance(o, Ref) else o for o in outs)),
        loss, {alias: name for alias, name in graph.tied.items() if name in names},
        {name: renumbered[graph.updates[name]] for name, s in made_at.items() if s == number}, len(leaving),
        tuple(stage_edge.targets for stage_edge in leaving.values()),
        {stage_edge.tensor: stage_edge.source for stage_edge in arriving.values()}, graph.precision, before=before,
    )  # fmt: skip
    return StageGraph(number, cut_graph, tuple(arriving.values()), tuple(leaving.values()), tuple(positions))


def _written_before(graph: Graph, params: set[str], stage: int) -> Graph | None:
    """Return what a call writes first to the parameters of a stage.

    Raises:
        PlanError: it follows from parameters of another stage.
    """
    whole = graph.before
    written = {} if whole is None else {name: ref for name, ref in whole.updates.items() if name in params}
    if whole is None or not written:
        return None
    needed: set[int] = set()
    todo = [ref.node for ref in written.values()]
    while todo:
        i = todo.pop()
        if i not in needed:
            needed.add(i)
            todo.extend(ref.node for ref in whole.nodes[i].refs)
    others = sorted(n.target for i in needed if (n := whole.nodes[i]).kind == "param" and n.target not in params)
    if others:
        raise PlanError(
            f"forward writes parameter '{next(iter(written))}' of stage {stage} by values of '{others[0]}', which "
            "another stage has; choose cuts that leave both in one stage"
        )
    number = {i: k for k, i in enumerate(sorted(needed))}

    def move(ref: Ref) -> Ref:
        return Ref(number[ref.node], ref.out)

    nodes = [whole.nodes[i].moved(move) if whole.nodes[i].refs else whole.nodes[i] for i in sorted(needed)]
    return Graph(tuple(nodes), (), updates={name: move(ref) for name, ref in written.items()})


def stage_edges_of(graphs: Sequence[StageGraph]) -> tuple[StageEdge, ...]:
    """Return all transfers between the stages in `graphs`, by the stage that makes the tensor."""
    return tuple(stage_edge for graph in graphs for stage_edge in graph.gives)


def first_op(graph: Graph) -> str:
    """Return the name of the first operator that depends on a parameter; empty if none does."""
    return next((node.name for node in graph.nodes if node.kind == "op" and node.hot), "")
