"""Inputs that want gradients: under the cheapest plan and random ones they get those of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from eager import train_eager
from procs.pipelines import Config, make_plan
from zoo import ZOO

from autopar.capture import Captured, capture
from autopar.certificate import check
from autopar.comparison import program_vs_eager as V
from autopar.errors import PlanError
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.random_plans import random_plan
from autopar.rules.registry import rules_of
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from hardware_profiles import abstract_cluster

MESH = Mesh.of(data=2, tensor=2)
CLUSTER = abstract_cluster(dict(MESH), alpha=(1e-6,) * 2, beta=(1e-9,) * 2)


def prepared(name: str, frozen: bool) -> tuple[Captured, tuple[Any, ...], V.Trained]:
    case = ZOO[name]()
    case.model.requires_grad_(not frozen)
    args, kwargs = V.wanting((case.args, case.kwargs))
    captured = capture(case.model, args, kwargs)
    weights, buffers = V.state_of(captured, case.model)
    state = weights, buffers, V.inputs_of(captured, args, kwargs)
    eager = train_eager(captured, case.model, args, kwargs)
    found = V.compare(name, V.train(captured, V.one_device(captured.graph), *state), eager)
    assert found.worst < 1e-4, found
    promoted = V.promoted(captured)
    doubled = tuple(V.doubled(part) for part in state)
    return promoted, doubled, V.train(promoted, V.one_device(promoted.graph), *doubled)


@pytest.mark.parametrize(
    "name, frozen",
    [
        ("mlp", False),
        ("mlp", True),
        pytest.param("mlp_mixer", True, marks=pytest.mark.slow),
        pytest.param("resnet", False, marks=pytest.mark.slow),
    ],
)
def test_same_numbers(name: str, frozen: bool) -> None:
    captured, state, reference = prepared(name, frozen)
    graph = captured.graph
    wanted = [n.target for _, n in graph.of_kind("input") if n.needs_grad]
    assert wanted and all(V.input_name(n) in reference.gradients for n in wanted)
    cheapest = plan_graph(graph, CLUSTER, MESH)
    assert all(cheapest.inputs[n] == ("I", "I") for n in wanted), "the caller's tensor is whole, and so its gradient"
    assert any(p.is_shard for steps in cheapest.reshard_paths.values() for _, dst in steps for p in dst)
    certificate = check(cheapest, graph, CLUSTER)
    assert not certificate.failures, certificate
    for label, plan in [("cheapest", cheapest)] + [
        (f"random {s}", random_plan(graph, rules_of(graph), pricer(CLUSTER, MESH), s)) for s in range(3)
    ]:
        found = V.compare(label, V.train(captured, plan, *state), reference)
        assert found.worst < 1e-9, found


def test_a_pinned_input_has_its_piece_of_the_gradient() -> None:
    captured, state, reference = prepared("mlp", False)
    name = next(n.target for _, n in captured.graph.of_kind("input") if n.needs_grad)
    plan = plan_graph(captured.graph, CLUSTER, MESH, Options(inputs={name: State.of("S0", "I")}))
    assert plan.inputs[name] == State.of("S0", "I")
    assert V.compare("pinned", V.train(captured, plan, *state), reference).worst < 1e-9
    with pytest.raises(PlanError, match="use S<dim>, I, and"):
        plan_graph(captured.graph, CLUSTER, MESH, Options(inputs={name: State.of("S0", "R")}))


def test_plans_tell_gradients_of_inputs_apart() -> None:
    case = ZOO["mlp"]()
    without = capture(case.model, case.args, case.kwargs).graph
    args, kwargs = V.wanting((case.args, case.kwargs))
    graph = capture(case.model, args, kwargs).graph
    assert graph.fingerprint != without.fingerprint
    plan = plan_graph(without, CLUSTER, MESH)
    with pytest.raises(PlanError, match="fingerprint"):
        check(replace(plan), graph, CLUSTER)


class _Often(torch.nn.Module):
    """Reads its first input in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h)) + x
        return ((h - y) ** 2).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", pytest.param("interleaved-1f1b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_pipeline(schedule: str, frozen: bool) -> None:
    """Every stage that reads an input adds its part; rows of microbatches stand in order; a mean of their losses."""
    torch.manual_seed(0)
    model = _Often().double().requires_grad_(not frozen)
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    y = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    captured = capture(model, (x[:4], y[:4]), {})
    stages = 4 if schedule == "interleaved-1f1b" else 2
    config = Config("", schedule, (MESH, Mesh.of(data=2)), 2, stages=stages, seed=1, even=True)
    weights, buffers = V.state_of(captured, model)
    parts = [{"x": a, "y": b} for a, b in zip(x.detach().split(4), y.detach().split(4), strict=True)]
    found = V.train_pipeline(captured, make_plan(captured, config), weights, buffers, parts)
    (sum(model(a, b) for a, b in zip(x.split(4), y.split(4), strict=True)) / 2).backward()
    torch.testing.assert_close(found.gradients[V.input_name("x")], x.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.gradients[V.input_name("y")], y.grad, rtol=1e-9, atol=1e-12)
