"""The peak of memory of a training step on the first rank: counted on tensors without values it is that of a process
with real ones, and the price of the plan says it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ZOO

from autopar.allocations import Allocations
from autopar.capture import Captured, capture
from autopar.certificate.peak import peak_of
from autopar.comparison import program_vs_eager as V
from autopar.lower.emit import lower
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.mesh_problem import MeshProblem
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.intra_op.random_plans import random_plan
from autopar.planner.intra_op.solving.highs import program
from autopar.plans.plan import StagePlan
from autopar.plans.stage_graphs import cut, hot_ops
from autopar.rules.proving.many_ranks import piece
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

CLUSTER = load_cluster("dgx-h100")
MESH = Mesh.of(data=2, tensor=2)


@functools.cache
def known(name: str) -> tuple[Captured, dict[str, torch.Tensor]]:
    """A model, and its buffers and inputs by name."""
    case = ZOO[name]()
    captured = capture(case.model, case.args, case.kwargs)
    _, buffers = V.state_of(captured, case.model)
    return captured, {**buffers, **V.inputs_of(captured, case.args, case.kwargs)}


def drawn(name: str, seed: int) -> StagePlan:
    graph = known(name)[0].graph
    return random_plan(graph, rules_of(graph), pricer(CLUSTER, MESH), seed)


class Zeros(TorchDispatchMode):
    """Collectives of a fake group leave memory as it is; numbers of rows that are made of it lead out of tables."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace and isinstance(result, torch.Tensor):
            result.zero_()
        return result


def agree(name: str, plan: StagePlan) -> None:
    captured, whole = known(name)
    graph = captured.graph
    given = {
        slot.name: piece(whole[slot.name], slot.state, plan.mesh, 0)
        for slot in lower(graph, plan).slots if slot.kind in ("buffer", "input")
    }  # fmt: skip
    counted = peak_of(plan, graph)
    with Zeros():
        real = peak_of(plan, graph, given)
    assert -0.01 < counted.n_bytes / real.n_bytes - 1 < 0.01, (counted, real)
    assert -0.05 < real.n_bytes / plan.price.memory_bytes - 1 < 0.02, (real, plan.price)


@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_peak_of_random_plans(name: str) -> None:
    agree(name, drawn(name, 0))


@functools.cache
def of_many_words() -> Graph:
    """GPT-2 with its vocabulary of 50257."""
    case = ZOO["gpt2"](vocabulary=50257)
    return capture(case.model, case.args, case.kwargs).graph


def test_rows_of_the_limit_see_a_loss_that_runs_again() -> None:
    """A distributed loss keeps more inside than the whole one does; it has that again when its backward comes."""
    graph, mesh = of_many_words(), Mesh.of(tensor=2)
    setting = MeshProblem(graph, CLUSTER, mesh, Options(), None)
    problem, decoder = setting.problem(True, choices=True)
    assert decoder.moments is not None
    loss = next(i for i, node in graph.of_kind("op") if "cross_entropy" in node.target)
    ((number, rows),) = [
        (k, chain.recomputed) for k, chain in enumerate(decoder.chains) if any(loss in r for r in chain.recomputed)
    ]
    item = problem.items[number]  # keeping what the loss has inside would take very long
    dear = tuple(s + (loss not in again) for s, again in zip(item.seconds, rows, strict=True))
    items = (*problem.items[:number], replace(item, seconds=dear), *problem.items[number + 1 :])
    choice = program(replace(problem, items=items)).nearest()
    plan = setting.realise(decoder.decided(choice.picked))
    assert plan.fullest is not None and plan.fullest.node == loss
    assert graph.nodes[loss].name in {last for _, last in plan.recompute}
    row = decoder.moments.at(plan.fullest).n_bytes(problem, choice.picked)
    assert row == pytest.approx(plan.price.memory_bytes, rel=0.02)


def test_peak_where_the_loss_needs_most() -> None:
    """Logits over a vocabulary of 50257: their gradient and that of their softmax are what no plan adds up."""
    graph = of_many_words()
    plan = plan_graph(graph, CLUSTER, Mesh.of(one=1))
    peak, logits = peak_of(plan, graph), 8 * 16 * 50257 * 4
    assert peak.at == "backward: aten._log_softmax_backward_data.default"
    price = plan.price
    before = price.stored_bytes + price.activation_bytes - price.gradient_bytes
    assert peak.n_bytes == pytest.approx(before + 2 * logits, rel=0.01)
    assert price.memory_bytes == pytest.approx(peak.n_bytes, rel=0.001)


@pytest.mark.parametrize(
    "name, again, seed", [("gpt2", "gather_again", 2), ("gpt2", "make_again", 0), ("mlp_mixer", "make_again", 1)]
)
def test_peak_where_something_is_made_again(name: str, again: str, seed: int) -> None:
    """What copies were gathered from is let go of when their readers' backward is over, and a segment runs again where
    something is first asked of it: the backward of its last operator may ask for nothing. Collectives copy what is not
    contiguous: the mixer's are of transposed tensors."""
    graph = known(name)[0].graph
    plan = random_plan(graph, rules_of(graph), pricer(CLUSTER, MESH), seed, **{again: True})
    assert -0.05 < peak_of(plan, graph).n_bytes / plan.price.memory_bytes - 1 < 0.02


def agree_in_stages(name: str, seed: int, **again: bool) -> None:
    """Of both halves of a model: what arrives and what is sent on, and their gradients, count too."""
    graph = known(name)[0].graph
    hot = hot_ops(graph)
    for stage in cut(graph, [graph.nodes[hot[len(hot) // 2]].name]):
        if any(node.needs_grad for _, node in stage.graph.of_kind("op")):
            plan = random_plan(stage.graph, rules_of(stage.graph), pricer(CLUSTER, MESH), seed, **again)
            counted = peak_of(plan, stage.graph)
            assert -0.05 < counted.n_bytes / plan.price.memory_bytes - 1 < 0.02, (counted, plan.price)


def test_peak_of_stages() -> None:
    agree_in_stages("gpt2", 0)


def test_peak_where_pieces_are_unequal_and_copies_are_given_up() -> None:
    """Three parts over two ranks travel padded; gradients of transposed tensors are copied by collectives; what reads a
    copy that is given up may die before that."""
    agree_in_stages("transformer_encoder", 1, gather_again=True)


def test_peak_where_an_operator_keeps_the_result_that_it_gives_up() -> None:
    """A relu's backward asks for its own result, which was given up for the readers and is made again."""
    agree_in_stages("resnet", 1, make_again=True)


@pytest.mark.slow
@pytest.mark.parametrize("again", [{}, {"gather_again": True}, {"make_again": True}])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_peak_of_stages_of_every_model(name: str, again: dict[str, bool]) -> None:
    for seed in range(2):
        agree_in_stages(name, seed, **again)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO))
def test_peak_of_every_model(name: str) -> None:
    graph = known(name)[0].graph
    one, four = (plan_graph(graph, CLUSTER, mesh) for mesh in (Mesh.of(one=1), MESH))
    for plan in (one, four, *(drawn(name, seed) for seed in range(3))):
        agree(name, plan)


@pytest.mark.slow
@pytest.mark.parametrize("again", ["gather_again", "make_again"])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_peak_of_every_model_where_something_is_made_again(name: str, again: str) -> None:
    graph = known(name)[0].graph
    for seed in range(2):
        agree(name, random_plan(graph, rules_of(graph), pricer(CLUSTER, MESH), seed, **{again: True}))


def test_what_dies_is_not_counted() -> None:
    with Allocations() as count:
        x = torch.ones(1000)
        for _ in range(5):
            x = x * 2
        y = x.view(10, 100)
        del x
    assert count.peak_bytes == 8000 and count.live_bytes == 4000 and y.numel() == 1000
