"""Random plans, drawn from the whole strategy space, so that every rule meets every other."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.graph import Graph, Ref, Spec
from autopar.placements import Mesh, State, fits, shard, started, whole_placement, whole_state
from autopar.plan import ParamChoice, Recompute, StagePlan, segment_numbers
from autopar.planner.intra_op import params as P
from autopar.planner.intra_op.complete import complete
from autopar.planner.intra_op.price import Pricer
from autopar.planner.intra_op.space import strategies
from autopar.regather import gathers
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy


def random_plan(
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, seed: int, *, attempts: int = 50,
    recompute: Recompute = (), gather_again: bool = False,
) -> StagePlan:  # fmt: skip
    """A feasible plan with every decision drawn at random: ops (cold ones too), parameters and lifetimes.

    With ``gather_again``, about half of the copies that could be gathered again are.

    Raises:
        PlanError: ``attempts`` draws gave no plan in which every tensor can reach its readers.
    """
    rng = random.Random(seed)
    mesh = pricer.mesh
    options: dict[int, list[Strategy]] = {}
    error: PlanError | None = None
    for _ in range(attempts):
        decided: dict[int, Strategy] = {}
        uses: dict[int, set[State]] = {}
        for i, node in enumerate(graph.nodes):
            rule = rules[i]
            if rule is None:
                continue
            if i not in options:
                options[i] = strategies(graph, node, rule, mesh)
            # shards are what is to be tested: an op is whole only when nothing else is there, or one time in eight
            cut = [s for s in options[i] if any(n in rule.sizes for n in s.names)]
            decided[i] = rng.choice(cut if cut and rng.random() < 0.875 else options[i])
            for ref, state in zip(node.refs, decided[i].ins, strict=True):
                if graph.nodes[ref.node].kind == "param":
                    uses.setdefault(ref.node, set()).add(started(state, graph.nodes[ref.node].needs_grad))
        params: dict[int, ParamChoice] = {}
        for i, node in graph.of_kind("param"):
            everywhere = whole_state(mesh, node.needs_grad)
            found = P.choices(node.out, node.needs_grad, uses.get(i, {everywhere}), mesh)
            params[i] = rng.choice(found)
        inputs, outputs = _at_the_borders(graph, mesh, rng)
        try:
            plan = complete(graph, rules, pricer, decided, params, outputs, inputs=inputs, recompute=recompute)
            if not gather_again:
                return plan
            can = gathers(graph, mesh, plan.routes, segment_numbers(graph, recompute))
            again = [key for key in can if rng.random() < 0.5]
            return complete(
                graph, rules, pricer, decided, params, outputs, inputs=inputs, recompute=recompute, gather_again=again
            )
        except PlanError as failed:
            error = failed
    raise PlanError(f"no random plan in {attempts} draws: {error}")


def _at_the_borders(graph: Graph, mesh: Mesh, rng: random.Random) -> tuple[dict[str, State], dict[int, State]]:
    """Random placements of what comes from earlier pipeline stages and goes to later ones."""

    def drawn(spec: Spec, grad: bool) -> State:
        whole = whole_placement(grad)
        state = tuple(rng.choice([whole, *map(shard, range(len(spec.shape)))]) for _ in mesh)
        return state if fits(spec.shape, state, mesh) else whole_state(mesh, grad)

    inputs = {n.target: drawn(n.out, n.needs_grad) for _, n in graph.of_kind("input") if n.hot}
    sent = {k: ref for k, ref in enumerate(graph.outputs[: graph.sends]) if isinstance(ref, Ref)}
    return inputs, {
        k: drawn(graph.spec(r), graph.nodes[r.node].needs_grad and graph.spec(r).is_float) for k, r in sent.items()
    }
