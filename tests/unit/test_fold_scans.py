"""Loops over the places of a sequence, unrolled, are decided once a step, and nothing is lost by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.comparison import program_vs_eager as V
from autopar.planner.intra_op.building.fold import fold
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.words.meshes import Mesh
from hardware_profiles import abstract_cluster

WIDTH, STEPS = 16, 12


class Layer(nn.Module):
    """A recurrence as state-space models have it: the state decays and is added to, place by place."""

    def __init__(self, unbinds: bool) -> None:
        super().__init__()
        self.unbinds = unbinds
        self.into, self.gate, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # [b s c] -> [b s c]
        added, kept = self.into(x), torch.sigmoid(self.gate(x))
        state, states = torch.zeros_like(x[:, 0]), []
        for a, k in zip(added.unbind(1), kept.unbind(1), strict=True) if self.unbinds else self.places(added, kept):
            state = state * k + a
            states.append(torch.tanh(state))
        return x + self.out(torch.stack(states, 1))

    def places(self, added: Tensor, kept: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(added[:, i], kept[:, i]) for i in range(added.shape[1])]


class Cells(nn.Module):
    """Steps with parameters of their own: no scan."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(STEPS))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for i, scale in enumerate(self.scales):
            state = torch.tanh(state * scale + x[:, i])
        return state


def captured_of(model: nn.Module) -> tuple[Captured, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, STEPS, WIDTH)
    return capture(model, (x,), loss_fn=lambda y: y.square().mean()), x


@pytest.mark.parametrize("unbinds", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_are_decided_once(unbinds: bool) -> None:
    model = nn.Sequential(Layer(unbinds), Layer(unbinds))
    captured, x = captured_of(model)
    graph, mesh = captured.graph, Mesh.of(a=2, b=2)
    folding = fold(graph)
    decided = {folding.representative[i] for i, _ in graph.of_kind("op")}
    assert len(graph.of_kind("op")) - len(decided) > 2 * 2 * (STEPS - 2), "two operators of every step, in two layers"
    cluster = abstract_cluster(dict(mesh), alpha=(1e-9,) * 2, beta=(1e-9,) * 2)
    folded, plain = (plan_graph(graph, cluster, mesh, Options(fold=f)) for f in (True, False))
    assert folded.price.seconds == pytest.approx(plain.price.seconds, rel=1e-6)
    assert folded.solution.status == "optimal"
    assert any(name != "-" for strategy in folded.ops.values() for name in strategy)
    state = (*V.state_of(captured, model), V.inputs_of(captured, (x,), {}))
    reference = V.train(captured, V.one_device(graph), *map(V.doubled, state))
    found = V.compare("folded", V.train(captured, folded, *map(V.doubled, state)), reference)
    assert found.worst < 1e-9, found


def test_steps_with_parameters_of_their_own_are_free() -> None:
    graph = captured_of(Cells())[0].graph
    assert fold(graph).representative == tuple(range(len(graph.nodes)))


def test_scans_in_repeated_layers_are_those_of_the_first() -> None:
    class Deep(Layer):
        def __init__(self) -> None:
            super().__init__(unbinds=False)
            self.more = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.more(super().forward(x))

    graph = captured_of(nn.Sequential(*[Deep() for _ in range(4)]))[0].graph
    folding = fold(graph)
    assert [repeats for _, _, repeats in folding.blocks] in ([3], [4])
    assert all(folding.representative[r] == r for r in folding.representative)
    assert max(folding.counts.values()) >= (STEPS - 2) * 3
