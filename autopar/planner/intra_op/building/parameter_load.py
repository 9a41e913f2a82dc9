"""The collectives of a stage's parameters against its computation, and its work besides operators.

:mod:`cost_models.parameter_overlap` has the rule of how much is hidden, the cost source (:mod:`cost_models.costs`) the
seconds to accumulate gradients and step parameters. This is where a plan's price, the phases of a pipeline and the
estimate of stages get both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.intra_op.building import matrix_prices
from autopar.planner.intra_op.building import parameter_sharding as P
from autopar.planner.intra_op.building.price import Pricer
from autopar.plans.plan import ParamChoice
from autopar.plans.stepped_by import matrices_of
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Ref
from autopar.words.placements import State
from cost_models.costs import StageWork
from cost_models.host_link import UNUSED, HostLinkUse
from cost_models.parameter_overlap import (
    HIDES_NOTHING,
    NO_COPIES,
    NONE,
    Computing,
    HostSeconds,
    ParameterSeconds,
    Shares,
    exposed,
)


@dataclass(frozen=True)
class ParameterLoad:
    """Seconds of a step that a stage's parameters cost.

    Attributes:
        costs: the costs of every parameter; empty where loads were put together.
        collectives: seconds by themselves, by when they run.
        may_hide: the part of `collectives` that may overlap with computing, as if no parameter were read first.
        first: the part of `collectives` of parameters that are read first, along with which nothing is computed.
        computing: seconds of a microbatch, of operators that depend on parameters.
        copies: the part of `may_hide` that is copied between device and host, without what is in `first`.
        link: what activations do on the link to the host.
    """

    costs: Sequence[P.ParamCost]
    collectives: ParameterSeconds
    may_hide: ParameterSeconds
    first: ParameterSeconds
    computing: Computing
    shares: Shares
    copies: HostSeconds = NO_COPIES
    link: HostLinkUse = UNUSED

    @property
    def host_seconds(self) -> float:
        """Seconds of the optimizer's step on the host."""
        return sum(cost.host_seconds for cost in self.costs)

    def exposed(self) -> ParameterSeconds:
        """Return what of the collectives a step waits for."""
        may_hide = self.may_hide.plus(self.first, -1)
        return exposed(self.collectives, may_hide, self.computing, self.shares, self.copies, self.link)


NOTHING = ParameterLoad((), NONE, NONE, NONE, Computing(0.0, 0.0), HIDES_NOTHING)
"""The load of a stage without parameters."""


def together(loads: Sequence[tuple[int, ParameterLoad]]) -> ParameterLoad:
    """Return the load of a stage of ``n`` blocks each: all hide together; of one block parameters are read first."""
    collectives = may_hide = first = NONE
    forward = backward = 0.0
    copies = NO_COPIES
    for n, load in loads:
        copies = copies.plus(load.copies, n)
        collectives, may_hide = collectives.plus(load.collectives, n), may_hide.plus(load.may_hide, n)
        first = ParameterSeconds(*map(max, zip(first, load.first, strict=True)))
        forward, backward = forward + n * load.computing.forward, backward + n * load.computing.backward
    shares = loads[0][1].shares if loads else NOTHING.shares
    computing = Computing(forward, backward)
    return ParameterLoad((), collectives, may_hide, first, computing, shares, copies, _link_of(loads))


def _link_of(loads: Sequence[tuple[int, ParameterLoad]]) -> HostLinkUse:
    """Return what the activations of all blocks do on the link; blocks that move none leave it all they compute."""
    uses = [(n, load.link, load.computing) for n, load in loads]
    if not any(any(link.copied) for _, link, _ in uses):
        return UNUSED

    def total(values: Iterable[tuple[int, tuple[float, float]]]) -> tuple[float, float]:
        there, back = zip(*[(n * a, n * b) for n, (a, b) in values], strict=True)
        return sum(there), sum(back)

    return HostLinkUse(
        total((n, link.waits) for n, link, _ in uses), total((n, link.copied) for n, link, _ in uses),
        total((n, link.left if any(link.copied) else (own.forward, own.backward)) for n, link, own in uses),
        max(link.gain for _, link, _ in uses),
    )  # fmt: skip


def parameter_load(
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, chosen: Mapping[int, Strategy],
    owned: Mapping[int, ParamChoice], microbatches: int, optimizer: str, link: HostLinkUse, versions: int = 1,
) -> ParameterLoad:  # fmt: skip
    """Return the load of a plan's parameters.

    ``chosen``: strategies by node, of all operators that depend on parameters; ``owned``: how parameters are stored
    and used, by node; ``link``: what activations do on the link to the host.
    """
    nodes, alike = graph.nodes, graph.alike
    first_read = P.first_read(graph, pricer.costs.bucket_bytes)
    costs: list[P.ParamCost] = []
    cost_of: dict[tuple[P.ParamInStep, ParamChoice], P.ParamCost] = {}  # repeated blocks have the same ones
    collectives = may_hide = first = NONE
    copies = NO_COPIES
    for i, choice in owned.items():
        key = P.ParamInStep.of(graph, nodes[i], optimizer, microbatches, versions), choice
        cost = cost_of.get(key)
        if cost is None:
            cost = cost_of[key] = P.cost(*key, pricer)
        costs.append(cost)
        if cost.seconds:
            collectives, may_hide = collectives.plus(cost.collectives), may_hide.plus(cost.may_hide)
            if i in first_read:
                first = first.plus(cost.may_hide)
            else:
                copies = copies.plus(cost.copies)
    forward = backward = 0.0
    spent_on: dict[tuple[int, int], tuple[float, float]] = {}
    for i, node in enumerate(nodes) if any(may_hide) else ():
        rule = rules[i]
        if node.kind != "op" or not node.hot or rule is None:
            continue
        same = alike[i], id(chosen[i])
        if same not in spent_on:
            spent = pricer.compute(graph, node, rule, chosen[i])
            spent_on[same] = spent.forward, spent.total - spent.forward
        forward, backward = forward + spent_on[same][0], backward + spent_on[same][1]
    computing = Computing(forward, backward)
    return ParameterLoad(costs, collectives, may_hide, first, computing, pricer.shares, copies, link)


def beside_ops(
    graph: Graph, pricer: Pricer, owned: Mapping[int, ParamChoice], made_as: Mapping[Ref, State], microbatches: int,
    optimizer: str,
) -> StageWork:  # fmt: skip
    """Return the work of one rank on a stage besides operators, from how parameters are stored and tensors are made."""
    summed: list[tuple[int, float]] = []
    nodes = graph.nodes
    for ref, readers in graph.consumers.items():
        node, spec = nodes[ref.node], graph.spec(ref)
        if len(readers) > 1 and node.needs_grad and spec.is_float and node.kind != "buffer":
            paths = sum(nodes[i].needs_grad for i, _ in readers)
            if paths > 1:
                summed.append((paths - 1, pricer.local_bytes(spec, made_as[ref])))
    parameters: list[tuple[float, float]] = []
    cast_bytes = 0.0
    for i, node in graph.of_kind("param"):
        if node.needs_grad:
            choice = owned[i]
            elements = pricer.local_bytes(node.out, choice.used) / node.out.item_bytes
            policy = graph.policy_of(node)
            if P.keeps_copies(policy, pricer.kernels):
                cast_bytes += P.cast_bytes(node.out, choice, elements, microbatches, policy)
            stored = 0 if choice.on_host else pricer.local_bytes(graph.stored(node), choice.stored)
            parameters.append((pricer.local_bytes(node.out, choice.used), stored))
    n_ops = sum(n.kind == "op" and n.needs_grad for n in nodes)
    matrices = matrices_of(graph, optimizer)
    matrix_bytes = sum(pricer.local_bytes(graph.stored(node), owned[i].stored) for i, node in matrices)
    seconds = matrix_prices.matrix_seconds(pricer, matrix_prices.matrix_loads(graph, pricer, owned, optimizer))
    return StageWork(
        summed, parameters, n_ops, microbatches, optimizer, cast_bytes, graph.forward_only, matrix_bytes, seconds
    )
