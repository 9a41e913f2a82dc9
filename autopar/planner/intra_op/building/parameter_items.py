"""Items of parameters: the choices of each class that are worth keeping, with their seconds and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.planner.intra_op.building import parameter_sharding as P
from autopar.planner.intra_op.building.flows import ReadAlike
from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.integer_program import Item
from autopar.planner.intra_op.building.overlap_terms import MayHide
from autopar.planner.intra_op.building.price import Pricer
from autopar.plans.plan import ParamChoice
from autopar.words.graph import Graph, Node
from autopar.words.placements import State, whole_state
from cost_models.parameter_overlap import hidden_seconds


@dataclass(frozen=True)
class ParameterItems:
    """Adds an item for each class of parameters to a program.

    Attributes:
        keep_memory, versions, in_memories: as for :class:`.Builder`.
        allowed: what pins leave of the choices; None allows all.
        shares_link: activations may need the link to the host, too.
    """

    graph: Graph
    fold: Fold
    pricer: Pricer
    optimizer: str
    microbatches: int
    versions: int
    keep_memory: bool
    allowed: Callable[[Node, ParamChoice], bool] | None
    in_memories: Callable[[Node, ParamChoice], list[ParamChoice]] | None
    shares_link: bool

    def add(
        self, items: list[Item], item_of: dict[int, int], groups: Mapping[int, list[ReadAlike]],
        wanted: Callable[[int, int], list[State]],
    ) -> tuple[
        dict[int, tuple[int, list[ParamChoice]]], list[tuple[int, list[MayHide]]], dict[int, list[State]]
    ]:  # fmt: skip
        """Add an item for each class of parameters.

        Return by item its node and choices, the seconds of collectives that may be hidden, and by node the states of
        its choices as readers use it.
        """
        graph, rep = self.graph, self.fold.representative
        parameters: dict[int, tuple[int, list[ParamChoice]]] = {}
        may_hide: list[tuple[int, list[MayHide]]] = []
        made_as: dict[int, list[State]] = {}
        waits_first = Counter(rep[i] for i in P.first_read(graph, self.pricer.costs.bucket_bytes))
        for i, node in enumerate(graph.nodes):
            if node.kind != "param" or rep[i] != i:
                continue
            uses = {
                s.started(node.needs_grad)
                for g in groups.get(i, ()) for reader, position in g.readers for s in wanted(reader, position)
            }  # fmt: skip
            options = self._options(node, uses)
            item_of[i] = len(items)
            parameters[len(items)] = i, [choice for choice, _ in options]
            made_as[i] = [choice.used for choice, _ in options]
            costs, n = [cost for _, cost in options], self.fold.counts[i]
            peaks = tuple(c.peak_bytes for c in costs) if self.keep_memory and any(c.peak_bytes for c in costs) else ()
            seconds = tuple(n * (c.seconds + c.step_seconds) for c in costs)
            items.append(Item(node.name, seconds, tuple(n * c.n_bytes for c in costs), peaks))
            hides = n - waits_first[i]
            if hides and any(any(c.may_hide) for c in costs):
                may_hide.append((item_of[i], MayHide.of_class(costs, hides)))
        return parameters, may_hide, made_as

    def _options(self, node: Node, uses: set[State]) -> list[tuple[ParamChoice, P.ParamCost]]:
        """Return the choices that are worth keeping, with the price of each for one parameter."""
        mesh = self.pricer.mesh
        whole = whole_state(mesh, node.needs_grad)
        spec = node.out
        param = P.ParamInStep.of(self.graph, node, self.optimizer, self.microbatches, self.versions)
        options: list[tuple[ParamChoice, P.ParamCost]] = []
        by_use: dict[State, list[tuple[ParamChoice, P.ParamCost]]] = {}
        every = self.allowed is not None
        offered = P.choices(spec, node.needs_grad, uses or {whole}, mesh, all_dims=every)
        if self.in_memories is not None:
            offered = [choice for of_device in offered for choice in self.in_memories(node, of_device)]
        for choice in offered:
            if self.allowed is not None and not self.allowed(node, choice):
                continue
            if self.versions > 1 and choice.lifetime == "use":
                continue
            cost = P.cost(param, choice, self.pricer)
            by_use.setdefault(choice.used, []).append((choice, cost))
        for of_use in by_use.values():
            # peaks of several parameters do not add up, so a choice with one is compared by the bytes it adds at least
            accounts = [(*self._least_and_most(cost), cost.n_bytes) for _, cost in of_use]
            options.extend(of_use[k] for k in P.cheapest(accounts, self.keep_memory))
        return options

    def _least_and_most(self, cost: P.ParamCost) -> tuple[float, ...]:
        """Return a parameter's seconds in a step: with nothing hidden behind compute, and with all that can be.

        Where activations may need the link to the host, also with all hidden but its copies.
        """
        seconds, may_hide = cost.seconds + cost.step_seconds, cost.may_hide.of_step(self.microbatches)
        least = seconds - hidden_seconds(may_hide, may_hide)
        if not self.shares_link:
            return seconds, least
        copies = cost.copies.both.of_step(self.microbatches)
        return seconds, least, least + hidden_seconds(copies, copies)
