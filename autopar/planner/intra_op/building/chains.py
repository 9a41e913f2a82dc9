"""Chains of operators that are decided as one: each reads what the one before makes, alone, and follows its cut.

A chain is one item where nothing is lost by it: an operator that moves or maps its one input follows its producer if it
can follow every strategy of the producer and its result is no larger, since a reshard after the pair then costs no more
than between the two. An operator of two inputs (the addition of a residual) follows neither: where its producer makes
pending sums it would add them pending, replicated. Nor does an operator follow one that is pinned: what the pin leaves
out may be what the follower wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.planner.effort import EFFORT
from autopar.planner.intra_op.building.flows import ReadAlike
from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.building.space import in_all_ways, strategies
from autopar.rules.notation import Rule
from autopar.rules.option_names import WHOLE
from autopar.rules.strategy import Strategy
from autopar.words.exchanges import is_bounded
from autopar.words.graph import Graph, Node
from autopar.words.placements import State

FOLLOWERS = frozenset({"none", "pointwise", "copy", "reduce"})
Allowed = Callable[[Node, Strategy], bool]


@dataclass
class Chain:
    """Nodes that are decided as one item; each row has one strategy for every node.

    Attributes:
        recomputed: by row, the nodes that run a second time in the backward; empty if none may.
        regathered: by row, the inputs (node and position) whose gathered copies are gathered a second time, with the
            part of a copy that is kept instead; empty if none may be.
        given_up: by row, the decision about the result of each node that is not kept; empty if there are none.
        copied: by row, the seconds of a step of copies beside compute to the host and back, which are part of
            ``seconds``; empty if there are none.
    """

    nodes: list[int]
    rows: list[tuple[Strategy, ...]]
    seconds: list[float]
    n_bytes: list[float]
    recomputed: list[frozenset[int]] = field(default_factory=list)
    regathered: list[dict[tuple[int, int], float]] = field(default_factory=list)
    given_up: list[dict[int, str]] = field(default_factory=list)
    copied: list[tuple[float, float]] = field(default_factory=list)

    def repeat(self, r: int) -> None:
        """Append row ``r`` once more, with all but what of it is regathered."""
        self.rows.append(self.rows[r])
        self.seconds.append(self.seconds[r])
        self.n_bytes.append(self.n_bytes[r])
        if self.recomputed:
            self.recomputed.append(self.recomputed[r])
        if self.given_up:
            self.given_up.append(self.given_up[r])
        if self.copied:
            self.copied.append(self.copied[r])

    def follow(
        self, i: int, position: int, strategies: Sequence[Strategy], seconds: Sequence[float], n_bytes: Sequence[float]
    ) -> bool:
        """Append node ``i``, which reads the last node's result, and return whether it can follow all rows."""
        by_in: dict[State, list[int]] = {}
        for k, s in enumerate(strategies):
            by_in.setdefault(s.ins[position], []).append(k)
        if any(row[-1].outs[0] not in by_in for row in self.rows):
            return False
        pairs = [(r, k) for r, row in enumerate(self.rows) for k in by_in[row[-1].outs[0]]]
        if len(pairs) > max(EFFORT.long_chain, EFFORT.chain_growth * len(self.rows)):
            return False
        self.rows, self.seconds, self.n_bytes = (
            [(*self.rows[r], strategies[k]) for r, k in pairs],
            [self.seconds[r] + seconds[k] for r, k in pairs],
            [self.n_bytes[r] + n_bytes[k] for r, k in pairs],
        )
        self.nodes.append(i)
        return True



@dataclass(frozen=True)
class ChainMaker:
    """Makes the chains of the hot operators of a graph.

    Attributes:
        allowed: what pins leave of an operator's strategies; None allows all.
        cut_contractions: as for :class:`.Builder`.
        recomputed: numbers of recomputed nodes, by their representative.
    """

    graph: Graph
    rules: Sequence[Rule | None]
    fold: Fold
    pricer: Pricer
    microbatches: int
    allowed: Allowed | None
    cut_contractions: bool
    recomputed: Mapping[int, int]

    def chains(self, groups: Mapping[int, list[ReadAlike]]) -> tuple[list[Chain], dict[int, int]]:
        """Return the chains, and the number of the chain of each operator; ``groups`` are its tensors, read alike."""
        graph, rep, counts = self.graph, self.fold.representative, self.fold.counts
        chains: list[Chain] = []
        chain_of: dict[int, int] = {}
        cache: dict[tuple[int, bool, tuple[bool, ...]], list[Strategy]] = {}
        pinned: set[int] = set()
        for i, node in enumerate(graph.nodes):
            if node.kind != "op" or not node.hot or rep[i] != i:
                continue
            rule = self.rules[i]
            assert rule is not None
            key = (id(rule), node.needs_grad, tuple(graph.nodes[r.node].needs_grad for r in node.refs))
            if key not in cache:
                cache[key] = strategies(graph, node, rule, self.pricer.mesh)
            every = cache[key]
            usable = [s for s in (self._quickest(node, rule, s) for s in every) if s is not None]
            if len(usable) < len(every):
                pinned.add(i)
            if rule.kind in ("pointwise", "reduce") and i in self.graph.from_inputs:
                usable = [s for s in usable if is_plain(s, rule)] or usable
            if self.cut_contractions and rule.kind in ("matmul", "conv", "attention"):
                usable = most_cut(usable, rule)
            times = counts[i] * self.microbatches
            seconds = [times * sum(self.pricer.op(graph, node, rule, s)) for s in usable]
            again = self.recomputed.get(i, 0) * self.microbatches
            if again:
                more = [again * sum(self.pricer.forward(graph, node, rule, s)) for s in usable]
                seconds = [a + b for a, b in zip(seconds, more, strict=True)]
            n_bytes = [0.0] * len(usable)
            leader = self._leader(i, node, rule, groups, chain_of)
            if leader is not None and leader[0] not in pinned:
                chain = chains[chain_of[leader[0]]]
                if chain.nodes[-1] == leader[0] and chain.follow(i, leader[1], usable, seconds, n_bytes):
                    chain_of[i] = chain_of[leader[0]]
                    continue
            chain_of[i] = len(chains)
            chains.append(Chain([i], [(s,) for s in usable], seconds, n_bytes))
        return chains, chain_of

    def _quickest(self, node: Node, rule: Rule, strategy: Strategy) -> Strategy | None:
        """Return the quickest of the ways to make the exchanges of a strategy that pins allow; None if none is.

        A bound may be exceeded when the program runs: whoever wants one pins it.
        """
        ways = in_all_ways(self.graph, node, rule, self.pricer.mesh, strategy)
        pinned = [] if self.allowed is None else [s for s in ways if self.allowed(node, s)]
        ways = [s for s in ways if not any(map(is_bounded, s.names))]
        if self.allowed is not None:
            ways = [s for s in ways if s in pinned] or pinned
        if len(ways) < 2:
            return ways[0] if ways else None
        return min(ways, key=lambda s: sum(self.pricer.op(self.graph, node, rule, s)))

    def _leader(
        self, i: int, node: Node, rule: Rule, groups: Mapping[int, list[ReadAlike]], chain_of: Mapping[int, int]
    ) -> tuple[int, int] | None:
        """Return the producer and the position of the one activation that node ``i`` reads, if it may follow that."""
        if rule.kind not in FOLLOWERS or len(node.outs) != 1:
            return None
        activations = [
            (position, ref) for position, ref in enumerate(node.refs)
            if self.graph.nodes[ref.node].hot and self.graph.nodes[ref.node].kind != "param"
        ]  # fmt: skip
        if len(activations) == 1:
            ((position, ref),) = activations
            u = ref.node
            of_u = groups.get(u, ())
            if (
                u in chain_of and node.out.n_bytes <= self.graph.spec(ref).n_bytes
                and len(of_u) == 1 and of_u[0].readers == ((i, position),) and not of_u[0].outputs
                and not of_u[0].updates and of_u[0].count == self.fold.counts[i] and len(self.graph.nodes[u].outs) == 1
            ):  # fmt: skip
                return u, position
        return None


def is_plain(strategy: Strategy, rule: Rule) -> bool:
    """Return whether a pointwise strategy is worth offering on activations.

    Replicated values with pending gradients (``R``), and pending sums through a product, only help tensors that are
    smaller than what they become, such as position embeddings; on activations the same costs as much a step earlier or
    later. Pending sums through an addition stay: they join the all-reduces of parallel branches.
    """
    joint = {f"P{k}" for k, group in enumerate(rule.linear) if len(group) > 1}
    return all(rule.factor_of(name) or name == WHOLE or name in joint for name in strategy.names)


def most_cut(strategies: list[Strategy], rule: Rule) -> list[Strategy]:
    """Return the strategies that cut a factor on as many axes as any does."""
    cuts = [sum(rule.factor_of(name) is not None for name in s.names) for s in strategies]
    return [s for s, n in zip(strategies, cuts, strict=True) if n == max(cuts)]


def position_of(node: Node, out: int) -> int:
    """Return the position of output ``out`` among the outputs that are tensors."""
    return sum(o is not None for o in node.outs[:out])
