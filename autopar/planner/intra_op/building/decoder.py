"""The way back from a solution of the integer program to decisions about the nodes of its graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.planner.intra_op.building.chains import Chain
from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.memory.moment_rows import MomentRows
from autopar.planner.intra_op.memory.recomputable import Recomputable
from autopar.plans.memory_decisions import REGATHER
from autopar.plans.plan import ParamChoice, reshard_key
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Ref
from autopar.words.placements import State


class Decided(NamedTuple):
    """Decisions about a graph.

    Attributes:
        ops: strategies by node.
        params: choices by parameter node.
        outputs: states by output position.
        inputs: states in which tensors of earlier stages arrive, by input name.
        recomputed: operators that run a second time in the backward.
        tensors: by decision about memory, the tensors that it is made for, by :func:`~autopar.plans.plan.reshard_key`.
        buffers: placements of stored buffers, by name.
    """

    ops: dict[int, Strategy]
    params: dict[int, ParamChoice]
    outputs: dict[int, State]
    inputs: dict[str, State]
    recomputed: frozenset[int] = frozenset()
    tensors: Mapping[str, frozenset[str]] = {}
    buffers: Mapping[str, State] = {}

    @property
    def cuts(self) -> object:
        """All but decisions about memory; equal for equal decisions about one graph."""
        names = tuple([strategy.names for strategy in self.ops.values()])
        states = (self.outputs, self.inputs, self.buffers)
        return names, tuple(self.params.values()), tuple(tuple(of.values()) for of in states)


@dataclass(frozen=True)
class Decoder:
    """Decisions of each item of a program by the strategy that is picked for it, for every block that it stands for.

    Attributes:
        chains: the chains of the first items, one each.
        parameters, outputs, arrivals: by item, the parameter's node, the output's position or the input's name, and
            what each strategy means for it.
        recomputable: the operators that may be recomputed, where that was a choice.
        moments: rows of the program for the bytes at moments of a step, where memory was limited.
        storage: by item, the first of a class of stored buffers, and the placement of each strategy.
    """

    graph: Graph
    fold: Fold
    chains: Sequence[Chain]
    parameters: Mapping[int, tuple[int, Sequence[ParamChoice]]]
    outputs: Mapping[int, tuple[int, Sequence[State]]]
    arrivals: Mapping[int, tuple[str, Sequence[State]]]
    recomputable: Recomputable | None = None
    moments: MomentRows | None = None
    storage: Mapping[int, tuple[int, Sequence[State]]] = field(default_factory=dict)

    def decided(self, picked: Sequence[int]) -> Decided:
        """Return the decisions of a solution, which picks one strategy per item, for every node of the graph."""
        rows = list(zip(self.chains, picked, strict=False))  # chains are the first items
        ops = {node: s for chain, row in rows for node, s in zip(chain.nodes, chain.rows[row], strict=True)}
        params = {node: choices[picked[item]] for item, (node, choices) in self.parameters.items()}
        recomputed = {node for chain, row in rows if chain.recomputed for node in chain.recomputed[row]}
        regathered = {read for chain, row in rows if chain.regathered for read in chain.regathered[row]}
        given_up = {n: name for chain, row in rows if chain.given_up for n, name in chain.given_up[row].items()}
        stored = {node: states[picked[item]] for item, (node, states) in self.storage.items()}
        nodes, members = self.graph.nodes, list(enumerate(self.fold.representative))
        inputs_of: dict[int, list[int]] = {}
        for node, position in regathered:
            inputs_of.setdefault(node, []).append(position)
        refs = [nodes[i].refs[position] for i, r in members for position in inputs_of.get(r, ())]
        return Decided(
            {i: ops[r] for i, r in members if r in ops}, {i: params[r] for i, r in members if r in params},
            {number: states[picked[item]] for item, (number, states) in self.outputs.items()},
            {name: states[picked[item]] for item, (name, states) in self.arrivals.items()},
            frozenset(i for i, r in members if r in recomputed),
            {REGATHER.name: frozenset(reshard_key(self.graph, ref) for ref in refs), **self._results(given_up)},
            {nodes[i].target: stored[r] for i, r in members if r in stored},
        )  # fmt: skip

    def all_given_up(self) -> list[dict[str, frozenset[str]]]:
        """Return for each decision about tensors all the tensors for which it may be made."""
        by_name: dict[str, dict[int, str]] = {}
        for node, name in ((n, name) for chain in self.chains for row in chain.given_up for n, name in row.items()):
            by_name.setdefault(name, {})[node] = name
        return [self._results(by_name[name]) for name in sorted(by_name)]

    def _results(self, decision_of: Mapping[int, str]) -> dict[str, frozenset[str]]:
        """Return by decision the results of all nodes of the classes for which it is made."""
        keys: dict[str, set[str]] = {}
        members: Iterable[tuple[int, int]] = enumerate(self.fold.representative) if decision_of else ()
        for i, r in members:
            if r in decision_of:
                keys.setdefault(decision_of[r], set()).add(reshard_key(self.graph, Ref(i)))
        return {name: frozenset(of_name) for name, of_name in keys.items()}
