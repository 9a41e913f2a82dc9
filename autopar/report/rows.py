"""Rows of a plan: ops with strategies and collectives, parameters, memory; plain values for tables or JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

from autopar.planfile.patterns import compress
from autopar.planner.intra_op.building import parameter_sharding as P
from autopar.planner.intra_op.building.fold import fold
from autopar.planner.intra_op.building.hidden_seconds import hidden_in
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.memory.ledger import Ledger, recompute_seconds, waiting_seconds
from autopar.planner.intra_op.memory.walked_ledger import ledger
from autopar.plans.plan import StagePlan, reshard_key
from autopar.plans.prices import Price
from autopar.report import Facts
from autopar.rules.local_calls import collectives_inside, cuts_of
from autopar.rules.notation import Rule
from autopar.rules.option_names import WHOLE
from autopar.rules.registry import rules_of, source_of_rule
from autopar.rules.strategy import Strategy, grads_of, strategy_in_plan
from autopar.words.graph import Graph, Node, Ref, Spec
from autopar.words.labels import op_labels
from autopar.words.placements import State, step_collectives
from autopar.words.shards import local_shape

Collective = Facts
"""``{"kind", "axis", "pass": forward or backward, "bytes"}``."""


@dataclass(frozen=True)
class OpRow:
    """One op of a block.

    Attributes:
        label: name of the op, with ``*`` for the number of the block.
        rule: the factors of its tensors; ``none`` without a rule, marked ``(discovered)`` if nobody wrote it.
        cuts: axis -> factor, for the axes that shard one.
        steps: ``from -> to`` of every reshard of its outputs.
        collectives: the collectives inside the op and of the reshards, with the bytes of one rank's buffer.
        compute_seconds, collective_seconds: forward and backward of one copy, without overlapped ones.
        hidden_seconds: seconds of its collectives that overlap the operators in ``beside``.
    """

    label: str
    module: str
    source: str
    rule: str
    cuts: dict[str, str]
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    steps: tuple[str, ...]
    collectives: tuple[Collective, ...]
    compute_seconds: float
    collective_seconds: float
    hidden_seconds: float = 0.0
    beside: tuple[str, ...] = ()

    @property
    def moves(self) -> bool:
        """True unless it is a view, which costs nothing."""
        return bool(self.compute_seconds or self.collectives or self.steps)


@dataclass(frozen=True)
class BlockRows:
    """Ops in execution order that ``count`` equal blocks share; ``name`` is their common module path."""

    name: str
    count: int
    ops: tuple[OpRow, ...]


@dataclass(frozen=True)
class ParamRow:
    """Parameters with the same decision; bytes and seconds are for all of them, on one rank."""

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    stored: str
    used: str
    lifetime: str
    collectives: tuple[Collective, ...]
    stored_bytes: int
    seconds: float
    on_host: bool = False


def op_row(graph: Graph, plan: StagePlan, priced: Pricer, i: int, rules: Sequence[Rule | None], label: str) -> OpRow:
    """Return the row of node ``i``."""
    node, rule = graph.nodes[i], rules[i]
    assert rule is not None
    strategy = strategy_in_plan(graph, node, rule, plan.ops[node.name], plan.mesh)
    compute, inside = priced.op(graph, node, rule, strategy)
    sizes = plan.mesh.size_of
    collectives = [
        _collective(comm.kind, axis, comm.backward, n_bytes)
        for comm, axis, n_bytes, times in collectives_inside(
            rule, *cuts_of(rule, strategy.options, plan.mesh), any(grads_of(graph, node)[1]), sizes
        )
        for _ in range(times)
    ]
    steps: list[str] = []
    beside, hidden_seconds = hidden_in(graph, rules, priced, plan, i)
    seconds = inside - hidden_seconds
    for number, spec in enumerate(node.outs):
        if spec is not None:
            grad = node.needs_grad and spec.is_float
            for a, b in plan.reshard_paths.get(reshard_key(graph, Ref(i, number)), ()):
                steps.append(f"{a.text} -> {b.text}")
                collectives += step_rows(plan, spec, grad, a, b)
                seconds += priced.step(spec, grad, a, b)
    return OpRow(
        label, node.module, node.source, rule_text(node, rule),
        {axis: name for (axis, n), name in zip(plan.mesh, strategy.names, strict=True) if name != WHOLE and n > 1},
        tuple(s.text for s in strategy.ins), tuple(s.text for s in strategy.outs), tuple(steps),
        tuple(collectives), compute, seconds, hidden_seconds, tuple(graph.nodes[k].name for k in beside),
    )  # fmt: skip


def rule_text(node: Node, rule: Rule) -> str:
    """Return a rule as reports show it, with its origin unless it was written, and a narrow product's format."""
    source = source_of_rule(node, rule)
    text = source if source == "none" else str(rule) if source == "written" else f"{rule} (discovered)"
    return text if node.narrow is None else f"{text} (in {node.narrow.format})"


def _collective(kind: str, axis: str, backward: bool, n_bytes: int) -> Collective:
    return {"kind": kind, "axis": axis, "pass": "backward" if backward else "forward", "bytes": n_bytes}


def step_rows(plan: StagePlan, spec: Spec, grad: bool, a: State, b: State) -> list[Collective]:
    """Return the collectives of one reshard step, forward and backward."""
    axis = next(k for k in range(len(a)) if a[k] != b[k])
    name, size = plan.mesh[axis]
    if size == 1:
        return []
    here, there = (prod(local_shape(spec.shape, s, plan.mesh)) * spec.item_bytes for s in (a, b))
    collectives = []
    for backward, kind in enumerate(step_collectives(a[axis], b[axis])):
        if kind is not None and (grad or not backward):
            whole = kind in ("all_gather", "reduce_scatter")
            collectives.append(_collective(kind, name, bool(backward), max(here, there) if whole else here))
    return collectives


def block_rows(graph: Graph, plan: StagePlan, priced: Pricer, *, every: bool = False) -> list[BlockRows]:
    """Return the ops of a plan, equal blocks once; ``every`` adds ops that depend on no parameter."""
    rules, labels = rules_of(graph), op_labels(graph)
    ops = [i for i, node in enumerate(graph.nodes) if node.kind == "op"]
    result: list[BlockRows] = []

    def rows(numbers: Sequence[int], name: str) -> tuple[OpRow, ...]:
        return tuple(
            op_row(graph, plan, priced, i, rules, _within(labels[graph.nodes[i].name], name))
            for i in numbers if every or graph.nodes[i].hot
        )  # fmt: skip

    def add(numbers: Sequence[int], count: int = 1, name: str = "", last: str = "") -> None:
        op_rows = rows(numbers, name)
        if op_rows:
            result.append(BlockRows(f"{name} .. {last}" if last else name, count, op_rows))

    arriving: dict[str, list[OpRow]] = {}
    for i in range(len(graph.nodes)):
        row = _arrival(graph, plan, priced, i)
        if row is not None:
            key = repr((re.sub(r"(?<=\.)\d+(?=\.)", "*", row.label), row.steps, row.collectives))
            arriving.setdefault(key, []).append(row)
    by_count: dict[int, list[OpRow]] = {}
    for same in arriving.values():
        label = re.sub(r"(?<=\.)\d+(?=\.)", "*", same[0].label) if len(same) > 1 else same[0].label
        by_count.setdefault(len(same), []).append(replace(same[0], label=label))
    for count, op_rows in by_count.items():
        result.append(BlockRows("inputs and parameters that are brought elsewhere", count, tuple(op_rows)))
    at = 0
    for first, length, repeats in fold(graph).blocks:
        add(ops[at:first])
        copies = [ops[first + k * length : first + (k + 1) * length] for k in range(repeats)]
        start = 0
        while start < repeats:  # neighbouring copies with the same decisions share a table
            end = start + 1
            while end < repeats and _alike(graph, plan, copies[start], copies[end]):
                end += 1
            last = _common(graph, copies[end - 1]) if end - start > 1 else ""
            add(copies[start], end - start, _common(graph, copies[start]), last)
            start = end
        at = first + length * repeats
    add(ops[at:])
    return result


def _arrival(graph: Graph, plan: StagePlan, priced: Pricer, i: int) -> OpRow | None:
    """Return the row of a resharded input, buffer or parameter; None for any other node."""
    node = graph.nodes[i]
    reshard_path = plan.reshard_paths.get(reshard_key(graph, Ref(i)), ()) if node.kind != "op" else ()
    if not reshard_path:
        return None
    grad = node.needs_grad and node.out.is_float
    return OpRow(
        node.target, node.module, "", "", {}, (), (reshard_path[0][0].text,),
        tuple(f"{a.text} -> {b.text}" for a, b in reshard_path),
        tuple(c for a, b in reshard_path for c in step_rows(plan, node.out, grad, a, b)), 0.0,
        sum(priced.step(node.out, grad, a, b) for a, b in reshard_path),
    )  # fmt: skip


def _alike(graph: Graph, plan: StagePlan, a: Sequence[int], b: Sequence[int]) -> bool:
    for i, j in zip(a, b, strict=True):
        if plan.ops[graph.nodes[i].name] != plan.ops[graph.nodes[j].name]:
            return False
        for number in range(len(graph.nodes[i].outs)):
            route_a, route_b = (plan.reshard_paths.get(reshard_key(graph, Ref(n, number)), ()) for n in (i, j))
            if route_a != route_b:
                return False
    return True


def _common(graph: Graph, block: Sequence[int]) -> str:
    """Return the module path that most ops of a block are in: ``layers.0``."""
    paths = [graph.nodes[i].module.split(".") for i in block if graph.nodes[i].module]
    best = ""
    for depth in range(1, max(map(len, paths), default=0) + 1):
        counts: dict[str, int] = {}
        for path in paths:
            if len(path) >= depth:
                counts[".".join(path[:depth])] = counts.get(".".join(path[:depth]), 0) + 1
        name, n = max(counts.items(), key=lambda e: e[1])
        if n < 0.75 * len(paths) and not name.rpartition(".")[2].isdecimal():  # copies may begin within a block
            break
        best = name
    return best


def _within(label: str, block: str) -> str:
    """Return a label without the part that the whole block shares."""
    if block and label.startswith(block) and label[len(block) : len(block) + 1] in (".", ":"):
        return label[len(block) :].lstrip(".")
    return label


def param_rows(graph: Graph, plan: StagePlan, priced: Pricer) -> list[ParamRow]:
    """Return the parameters of a plan; those of equal name (but for numbers), shape and decision share a row."""
    nodes = {node.target: node for _, node in graph.of_kind("param")}
    kinds = {name: (node.out.shape, node.out.dtype, node.needs_grad, plan.params[name]) for name, node in nodes.items()}
    groups: dict[str, list[str]] = {}
    for pattern, kind in compress(list(nodes), kinds.__getitem__):
        names = [n for n in nodes if kinds[n] == kind and fnmatchcase(n, pattern)]
        names = [n for n in names if not any(n in g for g in groups.values())]
        if names:
            groups[pattern] = names
    rows = []
    for pattern, names in groups.items():
        node, choice = nodes[names[0]], plan.params[names[0]]
        policy = graph.policy_of(node)
        cost = P.cost(P.ParamInStep.of(graph, node, plan.optimizer, plan.microbatches), choice, priced)
        collectives = tuple(
            _collective(kind, axis, kind != "all_gather", n)
            for axis, kind, n, times in P.collectives(
                node.out, node.needs_grad, choice, plan.mesh, plan.microbatches, policy
            )
            for _ in range(times)
        )
        rows.append(
            ParamRow(
                pattern if len(names) > 1 else names[0], len(names), node.out.shape, node.out.dtype,
                choice.stored.text, choice.used.text, choice.lifetime, collectives,
                len(names) * cost.parameter_bytes, len(names) * cost.seconds, choice.on_host,
            )
        )  # fmt: skip
    return rows


def totals(p: Price) -> Facts:
    """Return seconds and bytes of a step on one rank."""
    return {
        "seconds": {
            "compute": p.compute_seconds, "activation collectives": p.activation_seconds,
            "parameter collectives": p.parameter_seconds, "of these beside computing": p.hidden_seconds,
            "executor and sums of gradients": p.overhead_seconds, "optimizer": p.optimizer_seconds, "step": p.seconds,
        },
        "bytes": {
            "parameters": p.parameter_bytes, "gradients": p.gradient_bytes, "optimizer": p.optimizer_bytes,
            "gathered": p.gathered_bytes, **({"weight versions": p.version_bytes} if p.version_bytes else {}),
            "activations": p.activation_bytes, "working memory": p.working_bytes,
            "total": p.memory_bytes,
        },
    }  # fmt: skip


def collective_counts(plan: StagePlan, graph: Graph, priced: Pricer) -> dict[str, int]:
    """Return the number of collectives of a step by kind: ``{"all_reduce over tensor": 48}``."""
    rules, labels = rules_of(graph), op_labels(graph)
    counts: dict[str, int] = {}

    def count(collectives: Sequence[Collective]) -> None:
        for c in collectives:
            key = f"{c['kind']} over {c['axis']}"
            counts[key] = counts.get(key, 0) + 1

    for i, node in enumerate(graph.nodes):
        if node.kind == "op":
            count(op_row(graph, plan, priced, i, rules, labels[node.name]).collectives)
        else:
            grad = node.needs_grad and node.out.is_float
            for a, b in plan.reshard_paths.get(reshard_key(graph, Ref(i)), ()):
                count(step_rows(plan, node.out, grad, a, b))
    holds = _again(graph, plan, _chosen(graph, plan), priced)
    for segment in holds.segments:
        for i in segment.ops if segment.active else ():
            of_op = op_row(graph, replace(plan, reshard_paths={}), priced, i, rules, "").collectives
            count([c for c in of_op if c["pass"] == "forward"])
        for ref, a, b in segment.steps if segment.active else ():
            count(step_rows(plan, graph.spec(ref), False, a, b))
    for ref, a, b in holds.steps_again:
        count(step_rows(plan, graph.spec(ref), False, a, b))
    for row in param_rows(graph, plan, priced):
        count(row.collectives * row.count)
    return dict(sorted(counts.items()))


def recomputed_seconds(graph: Graph, plan: StagePlan, priced: Pricer) -> float:
    """Return the seconds per step of recomputed forwards and gathers, which the rows of ops do not include."""
    rules, chosen = rules_of(graph), _chosen(graph, plan)
    recomputed = _again(graph, plan, chosen, priced)
    again = sum(recompute_seconds(graph, rules, priced, chosen, plan.reshard_paths, recomputed))
    return plan.microbatches * again - sum(waited_seconds(graph, plan, priced).values())


def waited_seconds(graph: Graph, plan: StagePlan, priced: Pricer) -> dict[str, float]:
    """Return the seconds per step of offloading and the like, by decision, which the rows do not include."""
    chosen = _chosen(graph, plan)
    waited = waiting_seconds(graph, rules_of(graph), priced, chosen, _again(graph, plan, chosen, priced))
    return {name: plan.microbatches * seconds for name, seconds in waited.items()}


def _again(graph: Graph, plan: StagePlan, chosen: Mapping[int, Strategy], priced: Pricer) -> Ledger:
    """Return the ledger of a plan that recomputes in the backward; an empty one for others."""
    if not plan.memory:
        return Ledger((), ())
    rules = rules_of(graph)
    return ledger(graph, rules, plan.mesh, chosen, plan.reshard_paths, plan.memory, kernels=priced.kernels)


def _chosen(graph: Graph, plan: StagePlan) -> dict[int, Strategy]:
    """Return the strategies of a plan that recomputes; nothing for others, which need none."""
    rules = rules_of(graph)
    return {
        i: strategy_in_plan(graph, node, rules[i], plan.ops[node.name], plan.mesh)  # type: ignore[arg-type]
        for i, node in enumerate(graph.nodes if plan.memory else ()) if node.kind == "op"
    }  # fmt: skip
