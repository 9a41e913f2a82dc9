"""Random plans, drawn from the whole strategy space, so that every rule meets every other."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.planner.intra_op.building import parameter_sharding as P
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.building.space import strategies
from autopar.planner.intra_op.plan_completion import complete
from autopar.plans.memory_decisions import memory
from autopar.plans.plan import ParamChoice, Recompute, StagePlan, reshard_key, segment_numbers
from autopar.plans.regather import can_recompute_result, gathers
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Ref, Spec, has_effect
from autopar.words.meshes import Mesh
from autopar.words.placements import State, replicated_placement, shard, whole_state
from autopar.words.shards import fits

ATTEMPTS = 50
"""Draws until one has a way from every tensor to its readers: most have."""


def random_plan(
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, seed: int, *,
    recompute: Recompute = (), gather_again: bool = False, make_again: bool = False,
) -> StagePlan:  # fmt: skip
    """Return a feasible plan with every decision drawn at random: operators, parameters and lifetimes.

    With ``gather_again``, about half of the copies that could be are regathered. With ``make_again``, stretches of
    operators are recomputed in addition to ``recompute`` (about half of all), and about half of their results that
    others read are given up until then.
    """
    rng = random.Random(seed)
    mesh = pricer.mesh
    options: dict[int, list[Strategy]] = {}
    error: PlanError | None = None
    for _ in range(ATTEMPTS):
        decided: dict[int, Strategy] = {}
        uses: dict[int, set[State]] = {}
        for i, node in enumerate(graph.nodes):
            rule = rules[i]
            if rule is None:
                continue
            if i not in options:
                options[i] = strategies(graph, node, rule, mesh)
            # shards are what is to be tested: an op is whole only when nothing else is there, or one time in eight
            cut = [s for s in options[i] if any(map(rule.factor_of, s.names))]
            decided[i] = rng.choice(cut if cut and rng.random() < 0.875 else options[i])
            for ref, state in zip(node.refs, decided[i].ins, strict=True):
                if graph.nodes[ref.node].kind == "param":
                    uses.setdefault(ref.node, set()).add(state.started(graph.nodes[ref.node].needs_grad))
        params: dict[int, ParamChoice] = {}
        for i, node in graph.of_kind("param"):
            used = uses.get(i, {whole_state(mesh, node.needs_grad)})
            if can := P.choices(node.out, node.needs_grad, used, mesh):
                params[i] = rng.choice(can)
            else:  # such as multiples of a unit cut by two axes, to which no stored placement leads
                error = PlanError(f"{node.target} cannot be stored for its use as {used}")
                break
        if len(params) < len(graph.of_kind("param")):
            continue
        inputs, outputs = _at_the_borders(graph, mesh, rng)
        try:
            runs = stretches(graph, recompute, rng) if make_again else recompute
            segment_of = segment_numbers(graph, runs)
            results = [Ref(i, k) for i in segment_of for k, spec in enumerate(graph.nodes[i].outs) if spec is not None]
            remade = [
                reshard_key(graph, ref) for ref in results
                if make_again and can_recompute_result(graph, ref, segment_of) and rng.random() < 0.5
            ]  # fmt: skip
            plan = complete(
                graph, rules, pricer, decided, params, outputs, inputs=inputs,
                memory=memory(recompute=runs, make_again=remade),
            )  # fmt: skip
            if not gather_again:
                return plan
            can = gathers(graph, mesh, plan.reshard_paths, segment_of)
            again = [key for key in can if rng.random() < 0.5]
            return complete(
                graph, rules, pricer, decided, params, outputs, inputs=inputs,
                memory=memory(recompute=runs, gather_again=again, make_again=remade),
            )  # fmt: skip
        except PlanError as failed:
            error = failed
    raise PlanError(f"no random plan in {ATTEMPTS} draws: {error}")


def stretches(graph: Graph, recompute: Recompute, rng: random.Random) -> Recompute:
    """Return segments, and random stretches of the operators between them."""
    taken = segment_numbers(graph, recompute)
    runs: list[tuple[str, str]] = []
    now: list[str] = []
    for i, node in graph.of_kind("op"):
        if now and (i in taken or has_effect(node.target) or rng.random() < 0.25):
            runs.append((now[0], now[-1]))
            now = []
        elif i not in taken and not has_effect(node.target) and (now or rng.random() < 0.5):
            now.append(node.name)
    runs += [(now[0], now[-1])] if now else []
    return tuple(sorted({*recompute, *runs}, key=lambda run: graph.index[run[0]]))


def _at_the_borders(graph: Graph, mesh: Mesh, rng: random.Random) -> tuple[dict[str, State], dict[int, State]]:
    """Return random placements of the tensors from earlier pipeline stages and to later ones."""

    def drawn(spec: Spec, grad: bool) -> State:
        whole = replicated_placement(grad)
        state = State(rng.choice([whole, *map(shard, range(len(spec.shape)))]) for _ in mesh)
        return state if fits(spec.shape, state, mesh) else whole_state(mesh, grad)

    inputs = {n.target: drawn(n.out, n.needs_grad) for _, n in graph.of_kind("input") if n.hot}
    sent = {k: ref for k, ref in enumerate(graph.outputs[: graph.sends]) if isinstance(ref, Ref)}
    return inputs, {
        k: drawn(graph.spec(r), graph.nodes[r.node].needs_grad and graph.spec(r).is_float) for k, r in sent.items()
    }
