"""Prices of steps on whole matrices (Muon): who owns what, what is counted for whom, and the recount."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.certificate import check, peak_of
from autopar.errors import PlanError
from autopar.plans.clusters import get_cluster
from autopar.plans.stepped_by import stepped_by
from autopar.runtime.optimizers.user_optimizers import name_of
from cost_models.costs import costs_of
from cost_models.matrix_steps import (
    WholeMatrix,
    buckets_of,
    iteration_seconds,
    loads,
    newton_schulz_flops,
    owners_of,
    peak_bytes,
)
from cost_models.optimizer_bytes import optimizer_state_bytes


class Net(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, width), nn.Linear(width, 40, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


X = torch.arange(64).reshape(8, 8) % 40


def planned(optimizer: Any = "muon", **options: Any) -> Any:
    return autopar.plan(Net(), "dgx-h100", (X,), mesh="data=4,tensor=2", optimizer=optimizer, **options)


def captured() -> Any:
    return autopar.capture(Net(), (X,))


@pytest.mark.parametrize("work", [[5.0, 4.0, 3.0, 3.0, 3.0], [1.0] * 7, [9.0, 1.0, 1.0], [2.5, 2.0, 1.5, 1.0, 0.5]])
@pytest.mark.parametrize("n", [2, 3])
def test_owners_have_about_as_much_work(work: list[float], n: int) -> None:
    """At most 4/3 - 1/(3n) of the best that there is, and the same at every call."""

    def most(owners: Any) -> float:
        return max(sum(w for w, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(n))

    found = owners_of(work, n)
    best = min(most(owners) for owners in product(range(n), repeat=len(work)))
    assert best <= most(found) <= (4 / 3 - 1 / (3 * n)) * best and found == owners_of(work, n)


def test_buckets_hold_a_bounded_number_of_bytes() -> None:
    buckets = buckets_of([1.0] * 5, [40.0, 40.0, 40.0, 300.0, 40.0], 2, at_once=50.0)
    assert [bucket.numbers for bucket in buckets] == [(0, 1), (2,), (3,), (4,)]
    assert buckets[0].owners == (0, 1)


def test_operations_of_an_iteration_are_those_of_its_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for shape in ((64, 96), (96, 64), (50, 50)):
        with FlopCounterMode(display=False) as counted:
            torch.optim._muon._zeropower_via_newtonschulz(torch.randn(shape), (3.4, -4.8, 2.0), 5, 1e-7)
        assert counted.get_total_flops() == newton_schulz_flops(shape)


def test_loads_of_matrices() -> None:
    """Four matrices of 256 x 256 on four ranks, in two bytes an element: one each; pieces go back to all that store
    them."""
    whole = 2 * 256 * 256
    (load,) = loads([WholeMatrix((256, 256), 4, 1.0)] * 4, 4)
    assert load[:5] == (1.0, 1.0, whole, whole, whole) and load.peak_bytes == 3 * whole + whole
    (load,) = loads([WholeMatrix((256, 256), 1, 1.0)] * 4, 4)  # each rank has all: the result goes to all
    assert load[:5] == (1.0, 1.0, whole, 4 * whole, 4 * whole)
    (load,) = loads([WholeMatrix((64, 256), 1, 1.0)] * 4, 4)  # too small to send
    assert load[:5] == (4.0, 4.0, 0.0, 0.0, 0.0)
    assert peak_bytes([]) == 0


def test_matrices_of_hidden_layers_are_muons_and_the_rest_is_adamws() -> None:
    graph = captured().graph
    by = {node.target: stepped_by(graph, node, "muon") for _, node in graph.of_kind("param")}
    assert {name for name, each in by.items() if each == "muon"} == {f"layers.{k}.weight" for k in range(6)}
    assert {stepped_by(graph, node, "sgd") for _, node in graph.of_kind("param")} == {"sgd"}


def test_bytes_of_state_are_those_of_two_optimizers() -> None:
    model = Net()
    muon = torch.optim.Muon([p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2])
    rest = [p for name, p in model.named_parameters() if "layers" not in name or p.ndim == 1]
    adamw = torch.optim.AdamW(rest)
    model(X).backward()
    muon.step()
    adamw.step()
    real = sum(t.nbytes for each in (muon, adamw) for state in each.state.values() for t in state.values())
    plan = autopar.plan(Net(), "local-x2", (X,), mesh="data=2", params={"*": "I"}, optimizer="muon")
    assert plan.price.optimizer_bytes == real
    assert optimizer_state_bytes("muon", 10, 4) == 40 and name_of(muon) == "muon"


@pytest.mark.parametrize("params", [None, {"layers.*.weight": "S0,I use"}, {"layers.*.weight": "S0,S1 use"}])
def test_a_plan_is_what_its_program_does(params: Any) -> None:
    """Seconds and state are recounted."""
    plan, graph = planned(params=params), captured().graph
    report = check(plan.stages[0], graph, get_cluster("dgx-h100"))
    assert not report.failures, report.failures
    assert any("muon: 6 matrices are spread over 8 ranks" in note for note in plan.notes)


def test_a_peak_in_the_step_is_counted_allocation_by_allocation() -> None:
    """Where parameters stay as they are stored and the batch is small, the step is the fullest moment."""
    plan = autopar.plan(Net(512), "local-x4", (X,), mesh="data=4", params={"*": "I"}, optimizer="muon")
    peak = peak_of(plan.stages[0], autopar.capture(Net(512), (X,)).graph)
    assert plan.stages[0].fullest is None and peak.at.startswith("step")
    assert 0.99 < peak.n_bytes / plan.price.memory_bytes < 1.01


def test_a_step_on_owners_is_priced() -> None:
    """Work of the busiest owner, and the way there and back: more than SGD's step, less than that of one with all."""
    stored = {"layers.*.weight": "S0,I use"}
    seconds = {name: planned(name, params=stored).price.optimizer_seconds for name in ("muon", "sgd_momentum")}
    cluster = get_cluster("dgx-h100")
    every = 6 * iteration_seconds(costs_of(cluster), cluster.devices[0], (256, 256))
    assert seconds["sgd_momentum"] + every / 6 < seconds["muon"] < seconds["sgd_momentum"] + every


def test_the_integer_program_counts_the_bytes_of_a_finished_plan() -> None:
    """Of matrices that are alike and as many as ranks."""
    from autopar.planner.intra_op.building.matrix_prices import bytes_of
    from autopar.words.graph import Spec
    from autopar.words.meshes import Mesh
    from autopar.words.placements import State

    mesh, spec = Mesh.of(data=4), Spec((256, 512), "float32")
    whole = 2 * prod(spec.shape)
    (load,) = loads([WholeMatrix(spec.shape, 4, 1.0)] * 4, 4)
    assert 4 * bytes_of(mesh, spec, State.of("S0")) == 3 * whole == load.peak_bytes


def test_other_trainers_files_are_refused() -> None:
    from autopar.targets.exporting import Exporter

    class Found:
        plan = planned()

    with pytest.raises(PlanError, match="two optimizers: plan with --optimizer adamw"):
        Exporter.export(object.__new__(Exporter), Found())  # type: ignore[arg-type]
