"""Chains of operators that are decided as one: each reads what the one before makes, alone, and follows its cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.planner.effort import EFFORT
from autopar.rules.notation import Rule
from autopar.rules.option_names import WHOLE
from autopar.rules.strategy import Strategy
from autopar.words.graph import Node
from autopar.words.placements import State


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
