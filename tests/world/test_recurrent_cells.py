"""What is hidden of a recurrent layer is cut, each gate in its own rows, and gives the numbers of one device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_trial import CLUSTER, LIMIT
from torch import nn

from autopar.capture import Captured, capture
from autopar.comparison.program_vs_eager import (
    compare,
    doubled,
    inputs_of,
    one_device,
    promoted,
    state_of,
    train,
    verify_pipeline,
)
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.planning import in_stages
from autopar.plans.pins import Pins
from autopar.plans.plan import StagePlan
from autopar.plans.request import PlanRequest
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

ROWS, STEPS, CLASSES = 4, 5, 3
TENSOR = {"tensor": "cells"}


class Labelled(nn.Module):
    """A recurrent network, time first, whose outputs are classified and whose last states are kept small."""

    def __init__(self, net: nn.Module, width: int) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs, states = self.net(x)
        states = states if isinstance(states, tuple) else (states,)
        loss = nn.functional.cross_entropy(self.head(outputs).flatten(0, 1), labels.flatten())
        return loss + sum(state.square().mean() for state in states)


def _captured(net: nn.Module, width: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], Captured]:
    model = Labelled(net, width)
    batch = torch.randn(STEPS, ROWS, 6), torch.randint(CLASSES, (STEPS, ROWS))
    return model, batch, capture(model, batch)


def _plan(double: Captured, mesh: Mesh, cuts: dict[str, str]) -> StagePlan:
    plan = plan_graph(double.graph, load_cluster(Path(CLUSTER)), mesh, Options(constraints={"net": cuts}))
    assert any("cells" in names for names in plan.ops.values())
    return plan


@pytest.mark.parametrize(
    "make, width, mesh, cuts",
    [
        (lambda: nn.LSTM(6, 8, bidirectional=True), 16, Mesh.of(data=2, tensor=2), {"data": "b", "tensor": "cells"}),
        (lambda: nn.LSTM(6, 8, proj_size=4, bias=False), 4, Mesh.of(tensor=2), TENSOR),
        (lambda: nn.GRU(6, 8), 8, Mesh.of(tensor=4), TENSOR),
        (lambda: nn.GRU(6, 8, bias=False), 8, Mesh.of(data=2, tensor=2), {"data": "cells", "tensor": "cells"}),
    ],
    ids=["lstm-both-ways", "lstm-projected", "gru-4", "gru-2x2"],
)
def test_cells_are_cut(make: Callable[[], nn.Module], width: int, mesh: Mesh, cuts: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, batch, captured = _captured(make(), width)
    double = promoted(captured)
    state = tuple(map(doubled, state_of(captured, model)))
    inputs = doubled(inputs_of(captured, batch, {}))
    plan = _plan(double, mesh, cuts)
    reference = train(double, one_device(double.graph), *state, inputs)
    difference = compare("cells", train(double, plan, *state, inputs), reference)
    assert difference.worst <= LIMIT, str(difference)


def test_stages_part_the_layers_of_a_stack() -> None:
    torch.manual_seed(0)
    model, batch, captured = _captured(nn.LSTM(6, 8, num_layers=4), 8)
    assert sum(node.target == "aten.lstm.input" for node in captured.graph.nodes) == 4
    asked = PlanRequest(Pins(stages=2, mesh=Mesh.of(tensor=1)), microbatches=1)
    plan = in_stages({1: captured.graph}, load_cluster(Path(CLUSTER)), 2, asked, "small").plan
    difference = verify_pipeline(captured, model, batch, {}, plan)
    assert difference.worst <= LIMIT, str(difference)
    assert all(sum(name.startswith("lstm") for name in stage.ops) for stage in plan.stages)
