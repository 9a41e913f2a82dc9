"""What runs again in the backward is decided with the cuts: nothing where there is room, what is cheapest elsewhere."""

from __future__ import annotations

import functools
from dataclasses import replace

import meta_models
import pytest

from autopar import planfile
from autopar.certificate import check
from autopar.planner.inter_op.simulating.phases import phases
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.mesh_problem import MeshProblem
from autopar.planner.intra_op.solving.highs import program
from autopar.planner.intra_op.within_memory import UNLIMITED
from autopar.plans.plan import Plan
from autopar.report.recomputed import runs_again
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

CLUSTER = load_cluster("dgx-h100")
MESH = Mesh.of(data=2, tensor=2)
LAYERS = 4


@functools.cache
def llama() -> Graph:
    return meta_models.llama(
        32, 512, hidden_size=512, intermediate_size=1408, num_hidden_layers=LAYERS, vocab_size=1024
    )


def test_with_less_memory_more_runs_again_and_the_certificate_holds() -> None:
    graph = llama()
    free = plan_graph(graph, CLUSTER, MESH)
    assert not free.recompute and free.solution is not None and not free.solution.binds
    last = free
    for share in (0.8, 0.55):
        limit = share * free.price.memory_bytes
        plan = plan_graph(graph, CLUSTER, MESH, Options(memory_limit_bytes=limit))
        assert plan.price.memory_bytes <= limit
        assert plan.recompute and plan.price.seconds >= last.price.seconds
        assert plan.price.compute_seconds > last.price.compute_seconds
        parts = phases(graph, plan, pricer(CLUSTER, MESH))
        assert parts.forward_seconds + parts.backward_seconds + parts.step_seconds == pytest.approx(plan.price.seconds)
        last = plan
    report = check(last, graph, CLUSTER)
    assert report.ok, report.failures


def test_in_words_and_in_a_plan_file() -> None:
    graph = llama()
    free = plan_graph(graph, CLUSTER, MESH)
    plan = plan_graph(graph, CLUSTER, MESH, Options(memory_limit_bytes=0.8 * free.price.memory_bytes))
    said = runs_again(graph, plan)
    assert said[0].startswith("model.layers 0") and "selective (" in said[0]
    assert runs_again(graph, free) == []
    whole = plan_graph(graph, CLUSTER, MESH, Options(recompute=["model.layers.[01]"]))
    assert runs_again(graph, whole) == [f"model.layers 0-1 full, 2-{LAYERS - 1} none"]
    text = planfile.dumps(Plan.alone(plan, "dgx-h100"), graph, None)
    read = planfile.loads(text, graph)
    assert (read.recompute, read.make_again, read.price) == (plan.recompute, plan.make_again, plan.price)


def test_what_is_asked_for_is_all_that_runs_again() -> None:
    graph = llama()
    limit = 0.95 * plan_graph(graph, CLUSTER, MESH).price.memory_bytes
    plan = plan_graph(graph, CLUSTER, MESH, Options(recompute=["model.layers.*"], memory_limit_bytes=limit))
    assert len(plan.recompute) == LAYERS and not plan.make_again
    assert not plan_graph(graph, CLUSTER, MESH, Options(memory_limit_bytes=limit, may_recompute=False)).recompute


@pytest.mark.parametrize("fold", [True, False], ids=["repeated blocks", "no repeats"])
def test_gathering_again_is_priced_in_the_program_with_the_cuts(fold: bool) -> None:
    """Choices that gather copies again hold less, and the program knows what the second gathers take."""
    graph = llama()
    setting = MeshProblem(graph, CLUSTER, Mesh.of(tensor=4), Options(may_recompute=False, fold=fold), None)
    problem, decoder = setting.problem(True, choices=True)
    gathering = 0
    for choice in program(replace(problem, limit_bytes=UNLIMITED)).hull((0.3, 2.0, 10.0, 100.0)):
        decided = decoder.decided(choice.picked)
        plan = setting.realise(decided)
        if plan.gather_again:
            gathering += 1
            kept = setting.realise(decided._replace(tensors={}))
            more = plan.price.seconds - kept.price.seconds
            assert plan.kept_bytes < kept.kept_bytes and more > 0
            assert choice.objective > setting.decided_seconds(kept) + 0.5 * more
            assert choice.objective == pytest.approx(setting.decided_seconds(plan), rel=0.01)
            report = check(plan, graph, CLUSTER)
            assert report.ok, report.failures
    assert gathering
