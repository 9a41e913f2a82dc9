"""Every model of the zoo, under the optimal plan and under random ones, gives the numbers of one device.

Many ranks in this process, float64: loss, every gradient, and weights and buffers after two steps of SGD within 1e-9.
The models are tiny, so on real hardware their cheapest plan cuts nothing; the cluster here states no compute speed, and
every contraction is cut. In the sweep, a second plan has less memory than that one takes.
Every program also passes the spmd-types checker (``verify.train`` runs it).
"""

from __future__ import annotations

import functools

import pytest
import torch
from eager import train_eager
from procs.in_turn import marked
from zoo import ZOO, Case

from autopar.capture import Captured, capture
from autopar.comparison import program_vs_eager as V
from autopar.errors import InfeasibleError
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options, PlansByMemory, plan_graph
from autopar.planner.intra_op.random_plans import random_plan
from autopar.plans.plan import StagePlan
from autopar.rules.registry import rules_of, source_of_rule
from autopar.words.meshes import Mesh
from hardware_profiles import Cluster, abstract_cluster, load_cluster

MESHES = {
    "2": Mesh.of(data=2),
    "4": Mesh.of(data=4),
    "2x2": Mesh.of(data=2, tensor=2),
    "2x2x2": Mesh.of(data=2, seq=2, tensor=2),
    "2x4": Mesh.of(data=2, tensor=4),
}
MODELS = sorted(ZOO)
SIMILAR = ("bert", "transformer_encoder", "unet_upsample", "bert_masked", "whisper", "mistral", "opt", "vit", "llama")
"""To others, which are tried every time."""


@functools.cache
def _captured(name: str) -> tuple[Captured, Case]:
    case = ZOO[name]()
    args, kwargs = V.wanting(case.batch)  # gradients of inputs are compared, too
    return capture(case.model, args, kwargs), case


@functools.cache
def _prepared(name: str) -> tuple[Captured, dict, dict, dict, V.Trained]:
    captured, case = _captured(name)
    args, kwargs = case.batch
    weights, buffers = V.state_of(captured, case.model)
    inputs = V.inputs_of(captured, args, kwargs)
    promoted = V.promoted(captured)
    state = V.doubled(weights), V.doubled(buffers), V.doubled(inputs)
    return promoted, *state, V.train(promoted, V.one_device(promoted.graph), *state)


def _check(name: str, mesh_name: str, plans: range, optimal: bool, memory: bool = False) -> None:
    captured, weights, buffers, inputs, reference = _prepared(name)
    graph, mesh = captured.graph, MESHES[mesh_name]
    cluster = abstract_cluster(mesh.size_of, alpha=(1e-6,) * len(mesh), beta=(1e-9,) * len(mesh))
    chosen = _optimal(captured, cluster, mesh, memory) if optimal else []
    priced, rules = pricer(cluster, mesh), rules_of(graph)
    chosen += [(f"random {seed}", random_plan(graph, rules, priced, seed)) for seed in plans]
    for label, plan in chosen:
        found = V.compare(label, V.train(captured, plan, weights, buffers, inputs), reference)
        assert found.worst < 1e-9, found


def _optimal(captured: Captured, cluster: Cluster, mesh: Mesh, memory: bool) -> list[tuple[str, StagePlan]]:
    free = plan_graph(captured.graph, cluster, mesh)
    cut = [names for names in free.ops.values() if any(n not in ("I", "R") for n in names)]
    assert len(cut) >= 5, "this would prove little"
    if not memory:
        return [("optimal", free)]
    options = Options(memory_limit_bytes=0.85 * free.price.memory_bytes, time_limit_seconds=5)
    try:
        return [("optimal", free), ("in less memory", plan_graph(captured.graph, cluster, mesh, options))]
    except InfeasibleError:  # little of it is activations that could be sharded further
        return [("optimal", free)]


@pytest.mark.parametrize("name", marked(MODELS, SIMILAR))
def test_every_operator_has_a_rule(name: str) -> None:
    graph = _captured(name)[0].graph
    sources = {
        node.target: source_of_rule(node, rule)
        for node, rule in zip(graph.nodes, rules_of(graph), strict=True) if rule is not None
    }  # fmt: skip
    assert not {target: source for target, source in sources.items() if source != "written"}


LONG = ("unet", "t5")
"""HiGHS takes 11 and 4 s for their optimal plans, which the sweep tries."""


@pytest.mark.parametrize("name", marked(MODELS, (*SIMILAR, "t5", "resnet")))
def test_on_2x2(name: str) -> None:
    _check(name, "2x2", range(1), optimal=name not in LONG)


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "resnet", "llama", "t5"))]
)
def test_on_8_ranks(name: str) -> None:
    _check(name, "2x2x2", range(1), optimal=False)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("name", MODELS)
def test_sweep(name: str, mesh: str) -> None:
    _check(name, mesh, range(20), optimal=True, memory=mesh == "2x2")


@pytest.mark.parametrize("name", marked(MODELS, SIMILAR))
def test_one_device_is_eager(name: str) -> None:
    captured, case = _captured(name)
    weights, buffers = V.state_of(captured, case.model)
    # the second batch shows what the first would have baked in
    for args, kwargs in map(V.wanting, (case.batch, case.batch2)):
        inputs = V.inputs_of(captured, args, kwargs)
        mine = V.train(captured, V.one_device(captured.graph), weights, buffers, inputs)
        found = V.compare(name, mine, train_eager(captured, case.model, args, kwargs))
        assert found.worst < 1e-4, found


@pytest.mark.parametrize(
    "name, seeds",
    [("mlp", 2), *(pytest.param(n, 3, marks=pytest.mark.slow) for n in ("gpt2", "transformer_encoder"))],
)
def test_dropout_does_not_depend_on_the_mesh(name: str, seeds: int) -> None:
    case = ZOO[name](dropout=0.1)
    captured = V.promoted(capture(case.model, case.args, case.kwargs))
    weights, buffers = V.state_of(captured, case.model)
    state = V.doubled(weights), V.doubled(buffers), V.doubled(V.inputs_of(captured, case.args, case.kwargs))
    graph, cluster, mesh = captured.graph, load_cluster("dgx-h100"), MESHES["2x2"]
    reference = V.train(captured, V.one_device(graph), *state)
    other = V.train(captured, V.one_device(graph), *state, steps=1, seed=5)
    assert not torch.allclose(reference.losses[0], other.losses[0]), "another seed draws other masks"
    for seed in range(seeds):
        plan = random_plan(graph, rules_of(graph), pricer(cluster, mesh), seed)
        found = V.compare(str(seed), V.train(captured, plan, *state), reference)
        assert found.worst < 1e-9, found


@pytest.mark.slow
def test_dropout_of_attention_that_is_cut_along_the_sequence() -> None:
    """Queries, the ring, and both, draw what one device draws."""
    case = ZOO["gpt2"](dropout=0.1)
    captured = V.promoted(capture(case.model, case.args, case.kwargs))
    weights, buffers = V.state_of(captured, case.model)
    state = V.doubled(weights), V.doubled(buffers), V.doubled(V.inputs_of(captured, case.args, case.kwargs))
    reference = V.train(captured, V.one_device(captured.graph), *state)
    cluster, mesh = load_cluster("dgx-h100"), MESHES["2x2"]
    first, second = (axis for axis in mesh.names)
    for ways in ({first: "q", second: "ring"}, {first: "b", second: "ring"}):
        pins = {"*:scaled_dot_product_attention": ways}
        plan = plan_graph(captured.graph, cluster, mesh, Options(constraints=pins))
        found = V.compare(str(ways), V.train(captured, plan, *state), reference)
        assert found.worst < 1e-9, found


@pytest.mark.slow
def test_plans_of_the_planner_that_gather_again() -> None:
    """Of the plans among which a stage chooses by their memory, those whose copies are gathered again in the backward
    train as one device does."""
    captured, weights, buffers, inputs, reference = _prepared("llama")
    mesh = MESHES["2x2"]
    cluster = abstract_cluster(mesh.size_of, alpha=(1e-9,) * len(mesh), beta=(1e-9,) * len(mesh))
    plans = PlansByMemory(captured.graph, cluster, mesh, Options()).every((3.0, 30.0))
    gathering = [plan for plan in plans if plan.gather_again]
    assert gathering
    for plan in (gathering[0], gathering[-1])[: len(gathering)]:  # of the fastest to the leanest
        found = V.compare("gathers again", V.train(captured, plan, weights, buffers, inputs), reference)
        assert found.worst < 1e-9, found
