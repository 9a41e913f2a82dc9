"""A strategy: what one op does on every axis of a mesh, and the states of its tensors that follow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autopar.errors import PlanError
from autopar.rules.axis_options import Option, axis_options
from autopar.rules.notation import Rule
from autopar.rules.option_names import factor_and_block
from autopar.rules.registry import rules_of
from autopar.words.exchanges import exchange_of, exchange_written
from autopar.words.graph import Graph, Node
from autopar.words.meshes import Mesh
from autopar.words.placements import INVARIANT, REPLICATED, State
from autopar.words.shards import lengths_of


@dataclass(frozen=True, slots=True)
class Strategy:
    """One option per axis, and the states of the op's tensors that follow."""

    options: tuple[Option, ...]
    ins: tuple[State, ...]
    outs: tuple[State, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Option name per axis, as plans store them."""
        return tuple(option.name for option in self.options)


def can_be_cut(rule: Rule, options: Sequence[Option], mesh: Mesh) -> bool:
    """Check whether an op can be cut so: into equal shards, or into others where rule and lowering allow it."""
    cuts: dict[str, list[tuple[int, int]]] = {}
    for option, (_, size) in zip(options, mesh, strict=True):
        factor, block = factor_and_block(option.name)
        if factor in rule.sizes and size > 1:
            cuts.setdefault(factor, []).append((size, block))
    if not cuts:
        return True
    if not rule.can_lower(cuts):
        return False
    if not _can_travel(rule, cuts):
        return False
    if why_not_exchanged(rule, [option.name for option in options], mesh):
        return False
    one = rule.lowering(cuts)
    if one is not None and any(len(cuts[f]) > 1 for f in one.on_one_axis & cuts.keys()):
        return False
    if all(
        rule.sizes[f] % prod(size for size, _ in axes) == 0 and not any(block for _, block in axes)
        for f, axes in cuts.items()
    ):
        return True
    lowering = rule.lowering(cuts)
    if lowering is not None and not lowering.uneven and not rule.random:
        return False
    return not any(why_not_cut(rule, f, axes) for f, axes in cuts.items())


def _can_travel(rule: Rule, cuts: Mapping[str, Sequence[tuple[int, int]]]) -> bool:
    """Check that what travels round a ring does so on one axis, in shards of equal size on all ranks.

    Unequal shards are padded where nothing else of the sequence is cut and ranks do not exchange parts of theirs.
    """
    lowering = rule.lowering(cuts)
    if lowering is None:
        return True
    together = lowering.factors & cuts.keys()
    pieces = prod(size for f in together for size, _ in cuts[f])
    rings = {comm.factor for comm in lowering.comm if comm.in_ring} & cuts.keys()
    uneven = rule.uneven if len(together) == 1 else frozenset()
    return all(len(cuts[ring]) == 1 and (ring in uneven or not rule.sizes[ring] % pieces) for ring in rings)


def why_not_cut(rule: Rule, factor: str, axes: Sequence[tuple[int, int]]) -> str:
    """Say why axes of these sizes and blocks (0 for none) cannot cut a factor in turn; empty if they can."""
    n, pieces = rule.sizes[factor], prod(size for size, _ in axes)
    in_blocks = any(block for _, block in axes)
    if n % pieces == 0 and not in_blocks:
        return ""
    if factor not in rule.uneven and not (in_blocks and factor in rule.in_blocks):
        able = [f"'{f}*{u}'" for f, u in rule.blocks if f == factor]
        uneven = f" ({' or '.join(able)} cuts it into uneven ones)" if able else ""
        return f"has size {n}, which does not divide over {pieces} ranks, and its pieces must be equal here{uneven}"
    before: list[tuple[int, int]] = []
    for size, block in axes:
        lengths = lengths_of(n, before)
        if max(lengths) < size * max(block, 1):
            return f"has size {n}, too little for {pieces} ranks"
        if factor in rule.together and len(set(lengths)) > 1:
            return f"has size {n}: on all axes but the last its pieces must be equal here"
        if block and any(length % block for length in lengths):
            return f"has size {n}, of which not all pieces so far are multiples of {block}"
        if block and all(not length % (size * block) for length in lengths):
            return f"has size {n}, whose blocks of {block} go evenly over {size} ranks: name '{factor}' itself"
        if not block and factor in rule.tied and any(length % size for length in lengths):
            return f"has size {n}, which does not divide over {pieces} ranks, and its pieces must be equal here"
        before.append((size, max(block, 1)))
    if factor in rule.needs_some and not min(lengths_of(n, before)):
        return f"has size {n}: cut over {pieces} ranks, it leaves some without any"
    return ""


def why_not_exchanged(rule: Rule, names: Sequence[str], mesh: Mesh) -> str:
    """Say why rows are not exchanged as the names of options, one for each axis, have it; empty if they are."""
    if not any(exchange_written(name) for name in names):
        return ""
    large = [(name, axis, size) for name, (axis, size) in zip(names, mesh, strict=True) if size > 1]
    for f in rule.ways:
        cut = [k for k, (name, _, _) in enumerate(large) if factor_and_block(name)[0] == f]
        pieces, exchange, written = prod(large[k][2] for k in cut), exchange_of("")[1], ""
        for k in cut:
            name, axis, _ = large[k]
            joined, exchange = exchange_of(name)
            written += exchange_written(name)
            if joined and k - 1 not in cut:
                return f"'{name}' on axis '{axis}' goes with '{f}' on the axis before it, which has another option"
            if (exchange.chunks > 1 or exchange.bound) and k != cut[-1]:
                return f"'{name}' on axis '{axis}': chunks and bounds are of the last exchange; name '{f}' there"
        if written and rule.sizes[f] % (pieces * exchange.chunks):
            parts = f" in {exchange.chunks} chunks" if exchange.chunks > 1 else " in one exchange"
            return f"'{f}' has size {rule.sizes[f]}, which does not divide over {pieces} ranks{parts}"
        if exchange.bound:
            if any(not exchange_of(large[k][0])[0] for k in cut[1:]):
                return f"'{large[cut[-1]][0]}': of several exchanges none is bounded; make one of them ('{f}+')"
            rows = next(factor for factor in rule.together[f] if rule.gemm is None or factor != rule.gemm[3])
            of_rows = prod(size for name, _, size in large if factor_and_block(name)[0] in (f, rows))
            if rule.sizes[rows] % of_rows:
                return (
                    f"'{large[cut[-1]][0]}': {rule.sizes[rows]} rows do not divide over {of_rows} ranks, and a bound "
                    "is for as many on each; use a batch that divides, or no bound"
                )
    return ""


def joinable_axes(graph: Graph, mesh: Mesh) -> list[tuple[str, ...]]:
    """List the sets of several neighbouring axes of a mesh along which an operator may make one exchange."""
    ways = any(rule is not None and rule.ways for rule in rules_of(graph))
    large = [axis for axis, size in mesh if size > 1] if ways else []
    return [tuple(large[a:b]) for b in range(2, len(large) + 1) for a in range(b - 1)]


def grads_of(graph: Graph, node: Node) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return whether gradients flow through each input and each output tensor of ``node``."""
    ins = tuple(node.needs_grad and graph.nodes[r.node].needs_grad and graph.spec(r).is_float for r in node.refs)
    outs = tuple(node.needs_grad and o.is_float for o in node.outs if o is not None)
    return ins, outs


def ends_gradients(graph: Graph, node: Node) -> bool:
    """Check whether ``node`` reads only tensors with gradients and gives none back, such as ``argmax`` or ``detach``.

    It takes copies as they are: requesting their gradients' sum would plan a reduction that never runs.
    """
    return not node.needs_grad and bool(node.refs) and all(
        graph.nodes[r.node].needs_grad and graph.spec(r).is_float for r in node.refs
    )  # fmt: skip


def combine(options: Sequence[Option]) -> Strategy:
    """Return the strategy of one option per axis."""
    n_in, n_out = len(options[0].ins), len(options[0].outs)
    return Strategy(
        tuple(options),
        tuple(State(o.ins[i] for o in options) for i in range(n_in)),
        tuple(State(o.outs[i] for o in options) for i in range(n_out)),
    )


def options_of(graph: Graph, node: Node, rule: Rule, blocks: Sequence[tuple[str, int]] = ()) -> dict[str, Option]:
    """Return the options of one op on one axis, by name; those of ``blocks`` too (``Rule.blocks_on``)."""
    grads, ends = grads_of(graph, node), ends_gradients(graph, node)
    key = "options", grads, ends, tuple(blocks)
    options: dict[str, Option] | None = rule.derived.get(key)
    if options is None:
        every = axis_options(rule, *grads, blocks)
        if ends:
            every = [replace(o, ins=tuple(INVARIANT if p is REPLICATED else p for p in o.ins)) for o in every]
        options = rule.derived[key] = {option.name: option for option in every}
    return options


def blocks_named(rule: Rule, names: Sequence[str]) -> list[tuple[str, int]]:
    """Return the blocks in `names` of options, if the rule's factors can be cut into them."""
    blocks = dict.fromkeys(factor_and_block(name) for name in names if re.fullmatch(r"\w+\*[1-9]\d{0,17}", name))
    return [(f, block) for f, block in blocks if f in rule.in_blocks and not rule.sizes[f] % block]


def strategy_named(graph: Graph, node: Node, rule: Rule | None, names: Sequence[str]) -> Strategy:
    """Return one op's strategy from the names of its options, one per axis, which were checked before."""
    assert rule is not None
    key = "strategy", grads_of(graph, node), ends_gradients(graph, node), tuple(names)
    strategy: Strategy | None = rule.derived.get(key)
    if strategy is None:
        options = options_of(graph, node, rule, blocks_named(rule, names))
        strategy = rule.derived[key] = combine([options[name] for name in names])
    return strategy


def strategy_in_plan(graph: Graph, node: Node, rule: Rule, names: Sequence[str], mesh: Mesh) -> Strategy:
    """Return the strategy that a plan names for one op.

    Raises:
        PlanError: the op has no such option (the message lists those it has), or nothing cuts these factors at once.
    """
    options = options_of(graph, node, rule, blocks_named(rule, names))
    if len(names) != len(mesh):
        raise PlanError(f"{node.where}: the plan has {len(names)} choices {names}, the mesh has {len(mesh)} axes")
    for name, (axis, _) in zip(names, mesh, strict=True):
        if name not in options:
            raise PlanError(
                f"{node.where}: no option '{name}' (axis '{axis}'); it offers {', '.join(options)}\n  rule: {rule}"
            )
    cut = [factor_and_block(name)[0] for name, (_, size) in zip(names, mesh, strict=True) if size > 1]
    if not rule.can_lower(cut):
        raise PlanError(f"{node.where}: {' and '.join(cut)} cannot be cut at once; cut one of them\n  rule: {rule}")
    if why := why_not_exchanged(rule, names, mesh):
        raise PlanError(f"{node.where}: {why}")
    return combine([options[name] for name in names])
