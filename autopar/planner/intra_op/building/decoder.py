"""What a solution of the integer program decides, read back: strategies, parameters, outputs, what is made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.memory.moment_rows import MomentRows
from autopar.planner.intra_op.memory.recompute_choices import Again
from autopar.plans.memory_decisions import GATHER_AGAIN
from autopar.plans.plan import ParamChoice, reshard_key
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Ref
from autopar.words.placements import State


class Decided(NamedTuple):
    """What is decided of a graph.

    Attributes:
        ops: strategies by node.
        params: choices by parameter node.
        outputs: states by output position.
        inputs: states in which tensors of earlier stages arrive, by input name.
        again: operators that run again in the backward.
        tensors: by decision about memory, the tensors that it is made for, by :func:`~autopar.plans.plan.reshard_key`.
    """

    ops: dict[int, Strategy]
    params: dict[int, ParamChoice]
    outputs: dict[int, State]
    inputs: dict[str, State]
    again: frozenset[int] = frozenset()
    tensors: Mapping[str, frozenset[str]] = {}

    @property
    def cuts(self) -> object:
        """All but what is done again in the backward; equal for equal decisions about one graph."""
        names = tuple([strategy.names for strategy in self.ops.values()])
        return names, tuple(self.params.values()), tuple(self.outputs.values()), tuple(self.inputs.values())


@dataclass(frozen=True)
class Decoder:
    """Reads a choice back."""

    chains: tuple[tuple[int, tuple[int, ...], tuple[tuple[Strategy, ...], ...]], ...]
    parameters: tuple[tuple[int, int, tuple[ParamChoice, ...]], ...]
    outputs: tuple[tuple[int, int, tuple[State, ...]], ...]
    arrivals: tuple[tuple[int, str, tuple[State, ...]], ...] = ()
    repeats: tuple[tuple[int, tuple[frozenset[int], ...]], ...] = ()
    again: Again | None = None
    gathers: tuple[tuple[int, tuple[frozenset[tuple[int, int]], ...]], ...] = ()
    graph: Graph | None = None
    moments: MomentRows | None = None
    waits: tuple[tuple[int, tuple[Mapping[int, str], ...]], ...] = ()

    def gathered_again(self, picked: Sequence[int], fold: Fold) -> frozenset[str]:
        """Tensors whose copies are gathered again in the backward, of every block."""
        reads = {read for item, rows in self.gathers for read in rows[picked[item]]}
        if not reads or self.graph is None:
            return frozenset()
        positions: dict[int, list[int]] = {}
        for node, position in reads:
            positions.setdefault(node, []).append(position)
        nodes = self.graph.nodes
        return frozenset(
            reshard_key(self.graph, nodes[i].refs[position])
            for i, r in enumerate(fold.representative)
            if r in positions
            for position in positions[r]
        )

    def waiting(self, picked: Sequence[int], fold: Fold) -> dict[str, frozenset[str]]:
        """Tensors that are given up by decisions about tensors, of every block."""
        by_node = {node: name for item, rows in self.waits for node, name in rows[picked[item]].items()}
        return self._results(by_node, fold)

    def every_waiting(self, fold: Fold) -> list[dict[str, frozenset[str]]]:
        """For each decision about tensors, all those for which it may be made."""
        names = {name for _, rows in self.waits for row in rows for name in row.values()}
        return [
            self._results({n: name for _, rows in self.waits for row in rows for n in row if row[n] == name}, fold)
            for name in sorted(names)
        ]

    def _results(self, by_node: Mapping[int, str], fold: Fold) -> dict[str, frozenset[str]]:
        """The results of nodes of the classes of these, by what is said of them."""
        keys: dict[str, set[str]] = {}
        for i, r in enumerate(fold.representative) if by_node else ():
            if r in by_node and self.graph is not None:
                keys.setdefault(by_node[r], set()).add(reshard_key(self.graph, Ref(i)))
        return {name: frozenset(of_name) for name, of_name in keys.items()}

    def runs_again(self, picked: Sequence[int], fold: Fold) -> frozenset[int]:
        """Operators that run again in the backward, of every block."""
        chosen = {node for item, rows in self.repeats for node in rows[picked[item]]}
        return frozenset(i for i, r in enumerate(fold.representative) if r in chosen) if chosen else frozenset()

    def decided(self, picked: Sequence[int], fold: Fold) -> Decided:
        """All that a choice decides, for every node of every class."""
        tensors = {GATHER_AGAIN.name: self.gathered_again(picked, fold), **self.waiting(picked, fold)}
        return Decided(*self.decode(picked, fold), self.inputs(picked), self.runs_again(picked, fold), tensors)

    def inputs(self, picked: Sequence[int]) -> dict[str, State]:
        """States in which tensors of earlier pipeline stages arrive, by input."""
        return {name: states[picked[item]] for item, name, states in self.arrivals}

    def decode(
        self, picked: Sequence[int], fold: Fold
    ) -> tuple[dict[int, Strategy], dict[int, ParamChoice], dict[int, State]]:
        """``(strategy by node, choice by parameter node, state by output position)``, for every node of every class."""
        ops: dict[int, Strategy] = {}
        for item, nodes, rows in self.chains:
            for node, strategy in zip(nodes, rows[picked[item]], strict=True):
                ops[node] = strategy
        owned = {node: options[picked[item]] for item, node, options in self.parameters}
        every_op = {i: ops[r] for i, r in enumerate(fold.representative) if r in ops}
        every_param = {i: owned[r] for i, r in enumerate(fold.representative) if r in owned}
        return every_op, every_param, {n: states[picked[item]] for item, n, states in self.outputs}


__all__ = ["Decided", "Decoder"]
