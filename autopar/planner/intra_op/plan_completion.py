"""Completion of decided strategies to a plan: cold nodes follow demand, reshard paths are found, all is priced."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from functools import partial
from typing import Any

from autopar.errors import PlanError
from autopar.planner.intra_op.building.hidden_seconds import hidden
from autopar.planner.intra_op.building.parameter_load import beside_ops, parameter_load
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.building.space import strategies
from autopar.planner.intra_op.memory.ledger import Ledger, recompute_seconds, use_of_link
from autopar.planner.intra_op.memory.memory_walk import Walk
from autopar.planner.intra_op.memory.stage_peaks import with_working_bytes
from autopar.planner.intra_op.memory.walked_ledger import ledger_of
from autopar.planner.intra_op.reshard import Edge, reshard_path
from autopar.planner.intra_op.written_buffers import held_whole
from autopar.plans.memory_decisions import RECOMPUTE, REGATHER, Memory, about_tensors, in_order
from autopar.plans.plan import ParamChoice, StagePlan, reshard_key, segment_numbers
from autopar.plans.prices import ONE_VERSION, KeptVersions, Price
from autopar.plans.regather import gathers, may_wait, ref_of
from autopar.plans.stage_graphs import first_op
from autopar.rules.lowering_helpers.overlapped_steps import ReshardPaths
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Ref, has_effect
from autopar.words.meshes import Mesh
from autopar.words.placements import PENDING, State, whole_state


def demand(
    graph: Graph, rules: Sequence[Rule | None], mesh: Mesh, decided: Mapping[int, Strategy], *, partly: bool = False,
    stored: Mapping[str, State] | None = None,
) -> tuple[dict[int, Strategy], dict[str, State]]:
    """Return the strategies of the undecided operators, and the placements of buffers.

    Backwards through the graph: if all readers of a tensor want the same shard, and its op can make just that, it
    does (positions and masks are made sharded); else it is computed whole and sliced, which costs nothing.

    ``partly``: more is to be decided, so buffers need not agree yet. ``stored``: placements of buffers that are known.
    """
    whole = whole_state(mesh)
    chosen = dict(decided)
    uncut = held_whole(graph)
    wanted: dict[Ref, set[State]] = {}
    for name, ref in graph.updates.items():
        wanted.setdefault(ref, set()).add((stored or {}).get(name, whole))
    for out in graph.outputs:
        if isinstance(out, Ref):
            wanted.setdefault(out, set()).add(whole)
    cache: dict[int, list[Strategy]] = {}
    buffers: dict[str, State] = {}
    written: dict[int, set[State]] = {}  # of buffers that operators write to as they run
    readers: dict[int, list[tuple[int, State]]] = {}
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        if node.kind == "buffer":
            inside = written.get(i, set())
            states = inside if len(inside) == 1 else wanted.get(Ref(i), set())
            only = next(iter(states)) if len(states) == 1 and node.target not in graph.updates else whole
            buffers[node.target] = whole if PENDING in only else only
            if not partly:
                _check_written(graph, node.target, buffers[node.target], inside, readers.get(i, ()))
        if node.kind != "op":
            continue
        if i not in chosen:
            rule = rules[i]
            assert rule is not None
            if id(rule) not in cache:
                cache[id(rule)] = strategies(graph, node, rule, mesh)
            options = cache[id(rule)]
            pick = options[0]
            states = wanted.get(Ref(i), set())
            if len(node.outs) == 1 and len(states) == 1 and i not in uncut:
                goal = next(iter(states))
                pick = next((s for s in options if s.outs[0] == goal and _plain(s)), pick)
            chosen[i] = pick
        for ref, state in zip(node.refs, chosen[i].ins, strict=True):
            if graph.nodes[ref.node].kind == "buffer":
                if has_effect(node.target):
                    written.setdefault(ref.node, set()).add(state)
                readers.setdefault(ref.node, []).append((i, state))
            if ref.node not in decided:  # what is decided does not follow
                wanted.setdefault(ref, set()).add(state)
    return chosen, buffers


def _check_written(
    graph: Graph, name: str, stored: State, inside: Set[State], readers: Sequence[tuple[int, State]]
) -> None:
    """Refuse a buffer that operators write to in placements that its storage cannot keep.

    ``inside`` are the states in which operators write to it, ``readers`` all readers with the states that they want.
    """
    moved = [k for k, state in readers if state != stored]
    writers = [k for k, _ in readers if inside and has_effect(graph.nodes[k].target)]
    if any(min(moved) < k < max(moved) for k in writers if moved):
        raise PlanError(
            f"buffer '{name}' is read in other shards before and after an operator that writes to it, and one copy "
            "would serve both; constrain that operator to a cut of the batch, or clone it first"
        )
    if inside - {stored}:
        raise PlanError(
            f"buffer '{name}' is written by operators that hold it in different shards "
            f"({'; '.join(sorted(state.text for state in inside))}): no placement keeps what all of them write; "
            "constrain them to the same cut, such as the batch"
        )


def _plain(strategy: Strategy) -> bool:
    """Return whether a strategy makes no pending sums: only those need communication."""
    return not any(PENDING in state for state in (*strategy.ins, *strategy.outs))


def needs(
    graph: Graph, mesh: Mesh, chosen: Mapping[int, Strategy], params: Mapping[int, ParamChoice],
    buffers: Mapping[str, State], inputs: Mapping[str, State], outputs: Mapping[int, State],
) -> tuple[dict[Ref, State], dict[Ref, dict[State, None]], list[State | None]]:  # fmt: skip
    """Return the states in which each tensor is made and wanted, and the placement of every output."""
    whole_grad, whole = whole_state(mesh, True), whole_state(mesh)
    made_as: dict[Ref, State] = {}
    wanted: dict[Ref, dict[State, None]] = {}
    for i, node in enumerate(graph.nodes):
        if node.kind == "op":
            strategy = chosen[i]
            if len(node.outs) == len(strategy.outs) == 1:
                made_as[Ref(i)] = strategy.outs[0]
            else:
                tensors = (k for k, spec in enumerate(node.outs) if spec is not None)
                made_as.update({Ref(i, k): state for k, state in zip(tensors, strategy.outs, strict=True)})
            for ref, state in zip(node.refs, strategy.ins, strict=True):
                goals = wanted.get(ref)
                if goals is None:
                    wanted[ref] = {state: None}
                else:
                    goals[state] = None
        elif node.kind == "param":
            made_as[Ref(i)] = params[i].used
        else:
            states = buffers if node.kind == "buffer" else inputs
            made_as[Ref(i)] = states.get(node.target, whole_grad if node.needs_grad else whole)
    out_states: list[State | None] = []
    for number, out in enumerate(graph.outputs):
        if not isinstance(out, Ref):
            out_states.append(None)
            continue
        grad = graph.nodes[out.node].needs_grad and graph.spec(out).is_float
        state = outputs.get(number, whole_grad if grad else whole)
        out_states.append(state)
        wanted.setdefault(out, {})[state] = None
    for name, ref in graph.updates.items():
        wanted.setdefault(ref, {})[buffers.get(name, whole)] = None
    return made_as, wanted, out_states


def complete(  # noqa: PLR0913  (all that a solver decided)
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, decided: Mapping[int, Strategy],
    params: Mapping[int, ParamChoice], outputs: Mapping[int, State], *, inputs: Mapping[str, State] | None = None,
    buffers: Mapping[str, State] | None = None, optimizer: str = "adamw", microbatches: int = 1, in_flight: int = 1,
    memory: Mapping[str, Collection[Any]] | None = None, weighed: bool = True,
    versions: KeptVersions = ONE_VERSION,
) -> StagePlan:  # fmt: skip
    """Return the plan of decisions, with its reshard paths and its price.

    Operators left out of ``decided`` and buffers left out of ``buffers`` follow demand; parameters left out are
    replicated, as are outputs. Of ``memory``, decisions about tensors that are not gathered, or that nobody keeps, are
    left out. ``weighed`` counts the bytes of activations, which take longest to find; without, and if no decision is
    made about memory, they are 0.

    Raises:
        PlanError: a tensor cannot be brought to where it is wanted.
    """
    mesh = pricer.mesh
    chosen, buffer_states = demand(graph, rules, mesh, decided, stored=buffers)
    buffer_states.update(buffers or {})
    whole_grad, whole = whole_state(mesh, True), whole_state(mesh)
    owned: dict[int, ParamChoice] = {}
    for i, node in graph.of_kind("param"):
        state = whole_grad if node.needs_grad else whole
        owned[i] = params.get(i, ParamChoice(state, state))
    made_as, wanted, out_states = needs(graph, mesh, chosen, owned, buffer_states, inputs or {}, outputs)
    reshard_paths: dict[str, tuple[Edge, ...]] = {}
    seconds = 0.0
    cache: dict[object, tuple[float, tuple[Edge, ...]] | None] = {}
    for ref, goals in wanted.items():
        state = made_as[ref]
        if len(goals) == 1 and state in goals:
            continue
        node, spec = graph.nodes[ref.node], graph.spec(ref)
        grad = node.needs_grad and spec.is_float
        key = (spec, grad, state, tuple(sorted(goals)))
        if key not in cache:
            cache[key] = reshard_path(spec.shape, mesh, grad, state, list(goals), partial(pricer.step, spec, grad))
        cheapest = cache[key]
        if cheapest is None:
            raise PlanError(
                f"{node.where}: a tensor of shape {spec.shape} made as {made_as[ref].text} cannot be brought "
                f"to {' and '.join(g.text for g in goals)}; choose another cut for it or for its readers"
            )
        if cheapest[1]:
            reshard_paths[reshard_key(graph, ref)] = cheapest[1]
            seconds += cheapest[0]
    decisions = that_can_be(graph, mesh, reshard_paths, memory or {})
    weighed = weighed or any(decisions.values())
    walk = Walk(graph, rules, mesh, chosen, reshard_paths, decisions, kernels=pricer.kernels) if weighed else None
    holds = ledger_of(walk) if walk is not None else Ledger((), ())
    segment_of = segment_numbers(graph, holds.memory.get(RECOMPUTE.name, ()))
    beside_others = sum(h.total for h in hidden(graph, rules, pricer, chosen, reshard_paths, segment_of).values())
    price = _price(
        graph, rules, pricer, chosen, owned, seconds - beside_others, optimizer, microbatches, in_flight,
        reshard_paths, holds, made_as, buffer_states, versions.number,
    )  # fmt: skip
    peaks = None
    if walk is not None:
        price, peaks = with_working_bytes(
            price, walk, holds, owned, out_states, optimizer, microbatches, in_flight, versions
        )
    names_of = {key: s.names for key, s in {id(s): s for s in chosen.values()}.items()}  # blocks share strategies
    return StagePlan(
        graph.fingerprint, mesh,
        {node.name: names_of[id(chosen[i])] for i, node in enumerate(graph.nodes) if node.kind == "op"},
        {graph.nodes[i].target: choice for i, choice in owned.items()},
        buffer_states, tuple(out_states), reshard_paths, dict(inputs or {}), optimizer, microbatches, price,
        memory=holds.memory, in_flight=in_flight, first=first_op(graph), devices=pricer.devices,
        versions=versions,
        fullest=peaks.fullest(in_flight) if peaks is not None else None, peaks=peaks,
    )  # fmt: skip


def that_can_be(
    graph: Graph, mesh: Mesh, reshard_paths: Mapping[str, Sequence[Edge]], decided: Mapping[str, Collection[Any]]
) -> Memory:
    """Return decisions about memory without tensors that are not gathered, or that recomputed segments make or read."""
    can = {name: tuple(entries) for name, entries in decided.items()}
    if not can:
        return can
    segment_of = segment_numbers(graph, can.get(RECOMPUTE.name, ()))
    if copies := can.get(REGATHER.name):
        can[REGATHER.name] = tuple(sorted(set(copies).intersection(gathers(graph, mesh, reshard_paths, segment_of))))
    for record in about_tensors():
        refs = {key: ref_of(graph, key) for key in can.get(record.name, ())}
        can[record.name] = tuple(
            key for key, ref in refs.items()
            if ref is not None and may_wait(graph, ref, segment_of) and record.may(graph, ref)
        )  # fmt: skip
    return in_order(can)


def _price(  # noqa: PLR0913  (the terms of a price)
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, chosen: Mapping[int, Strategy],
    owned: Mapping[int, ParamChoice], moved_seconds: float, optimizer: str, microbatches: int,
    in_flight: int, reshard_paths: ReshardPaths, holds: Ledger, made_as: Mapping[Ref, State],
    buffers: Mapping[str, State], versions: int,
) -> Price:  # fmt: skip
    """Return the price without its transient bytes; ``moved_seconds`` are those of reshards, less overlapped parts."""
    compute, inside = recompute_seconds(graph, rules, pricer, chosen, reshard_paths, holds)
    memo: dict[object, tuple[float, float]] = {}
    nodes, alike = graph.nodes, graph.alike
    for i, node in enumerate(nodes):
        if node.kind != "op":
            continue
        strategy = chosen[i]
        key = alike[i], id(strategy), pricer.of_kernel(graph, node)
        if key not in memo:
            rule = rules[i]
            assert rule is not None
            memo[key] = pricer.op(graph, node, rule, strategy)
        compute += memo[key][0]
        inside += memo[key][1]
    link = use_of_link(graph, rules, pricer, chosen, holds)
    load = parameter_load(graph, rules, pricer, chosen, owned, microbatches, optimizer, link, versions)
    extra = pricer.costs.stage(lambda: beside_ops(graph, pricer, owned, made_as, microbatches, optimizer))
    totals = [0] * 4
    peak = 0
    for cost in load.costs:
        for k, n in enumerate((cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes, cost.gathered_bytes)):
            totals[k] += n
        peak = max(peak, cost.peak_bytes)
    lives_again = holds.again_bytes
    collectives = load.collectives.of_step(microbatches)
    return Price(
        compute * microbatches, (moved_seconds + inside) * microbatches, collectives,
        collectives - load.exposed().of_step(microbatches),
        microbatches * (extra.forward + extra.backward) if extra is not None else 0.0,
        load.host_seconds + (extra.step if extra is not None else 0.0),
        totals[0], totals[1], totals[2], totals[3] + peak,
        in_flight * holds.kept_bytes + lives_again, lives_again,
        buffer_bytes=_buffer_bytes(graph, pricer, buffers) if graph.forward_only else 0,
        version_bytes=sum(cost.version_bytes for cost in load.costs),
    )  # fmt: skip


def _buffer_bytes(graph: Graph, pricer: Pricer, buffers: Mapping[str, State]) -> int:
    """Return the bytes of all buffers on one rank."""
    return sum(pricer.local_bytes(node.out, buffers[node.target]) for _, node in graph.of_kind("buffer"))
