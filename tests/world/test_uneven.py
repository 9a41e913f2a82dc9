"""Models on numbers of ranks that divide none of their sizes: random plans give the numbers of one device.

Many ranks in this process, float64, loss, gradients, weights and buffers after two steps within 1e-9; every program
passes the spmd-types checker, and the price of every plan is what its program is counted to cost.
"""

from __future__ import annotations

import functools

import pytest
import torch
from procs.pipelines import Config, make_plan
from zoo import ZOO

from autopar.capture import Captured, capture
from autopar.certificate import check
from autopar.comparison import program_vs_eager as V
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.intra_op.random_plans import random_plan
from autopar.rules.registry import rules_of
from autopar.words.meshes import Mesh
from hardware_profiles import abstract_cluster

MESHES: dict[str, Mesh] = {
    "3": Mesh.of(data=3), "5": Mesh.of(data=5), "6": Mesh.of(data=6), "7": Mesh.of(data=7),
    "2x3": Mesh.of(data=2, tensor=3),
}  # fmt: skip


@functools.cache
def _prepared(name: str, **zoo: int) -> tuple[Captured, tuple[dict[str, torch.Tensor], ...], V.Trained]:
    case = ZOO[name](**zoo)
    args, kwargs = V.wanting((case.args, case.kwargs))
    captured = capture(case.model, args, kwargs)
    weights, buffers = V.state_of(captured, case.model)
    state = V.doubled(weights), V.doubled(buffers), V.doubled(V.inputs_of(captured, args, kwargs))
    promoted = V.promoted(captured)
    return promoted, state, V.train(promoted, V.one_device(promoted.graph), *state)


def _check(name: str, mesh_name: str, seed: int, **zoo: int) -> None:
    captured, state, reference = _prepared(name, **zoo)
    graph, mesh = captured.graph, MESHES[mesh_name]
    cluster = abstract_cluster(mesh.size_of, alpha=(1e-6,) * len(mesh), beta=(1e-9,) * len(mesh))
    plan = random_plan(graph, rules_of(graph), pricer(cluster, mesh), seed)
    found = V.compare(f"random {seed}", V.train(captured, plan, *state), reference)
    assert found.worst < 1e-9, found
    report = check(plan, graph, cluster)
    assert report.ok, report.failures


ONE = {"layers": 1}
"""Layers of one kind are cut in one way as in another; the sweep has two of each."""


@pytest.mark.parametrize(
    "name, mesh, zoo",
    [
        ("mlp", "2x3", {}),
        ("gpt2", "3", ONE),
        pytest.param("llama", "2x3", ONE, marks=pytest.mark.slow),
        pytest.param("resnet", "5", {}, marks=pytest.mark.slow),
    ],
)
def test_numbers(name: str, mesh: str, zoo: dict[str, int]) -> None:
    _check(name, mesh, 1, **zoo)


def test_six_heads_on_four_ranks() -> None:
    """Heads are cut into 2, 2, 2 and 0, in their dim (heads width) too, and so is the projection that reads them."""
    captured, state, reference = _prepared("gpt2", heads=6, hidden=48, layers=1)
    graph, mesh = captured.graph, Mesh.of(tensor=4)
    cluster = abstract_cluster(mesh.size_of, alpha=(1e-6,), beta=(1e-9,))
    heads = {"*:scaled_dot_product_attention": {"tensor": "h"}, "*attn.c_proj:addmm": {"tensor": "k*8"}}
    plan = plan_graph(graph, cluster, mesh, Options(constraints=heads))
    projection = next(node for node in graph.nodes if node.module.endswith("attn.c_proj") and "addmm" in node.target)
    assert plan.ops[projection.name] == ("k*8",)
    assert plan.params["transformer.h.0.attn.c_proj.weight"].used == ("S0*8",), "of 48 features 16, 16, 16 and none"
    compared = V.compare("heads", V.train(captured, plan, *state), reference)
    assert compared.worst < 1e-9, compared
    report = check(plan, graph, cluster, types=True)
    assert report.ok, report.failures


def test_blocks_cut_by_two_axes_are_drawn_again() -> None:
    """No stored placement of a parameter leads to blocks that two axes cut one after the other."""
    captured = _prepared("gpt2", heads=6, hidden=48, layers=1)[0]
    graph, mesh = captured.graph, Mesh.of(data=4, tensor=2)
    cluster = abstract_cluster(mesh.size_of, alpha=(1e-6, 1e-6), beta=(1e-9, 1e-9))
    for seed in range(12):
        random_plan(graph, rules_of(graph), pricer(cluster, mesh), seed)


def _check_stages(name: str, groups: tuple[Mesh, ...], schedule: str, seed: int) -> None:
    """One microbatch through stages whose ranks hold uneven pieces, so that uneven pieces cross between them."""
    captured, (weights, buffers, inputs), reference = _prepared(name)
    plan = make_plan(captured, Config(name, schedule, groups, 1, len(groups), seed, cuts=seed))
    found = V.compare(schedule, V.train_pipeline(captured, plan, weights, buffers, [inputs]), reference)
    assert found.worst < 1e-9, found


def test_numbers_of_stages() -> None:
    _check_stages("gpt2", (MESHES["3"], Mesh.of(data=2)), "1f1b", 1)


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["3+5", "2x3+2"])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_model_in_stages(name: str, groups: str) -> None:
    meshes = {**MESHES, "2": Mesh.of(data=2)}
    _check_stages(name, tuple(meshes[part] for part in groups.split("+")), "1f1b", len(name))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_model(name: str, mesh: str) -> None:
    for seed in range(2):
        _check(name, mesh, seed)
