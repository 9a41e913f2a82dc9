"""Properties of plans: deterministic, never worse on better hardware, folding loses nothing, limits and pins hold."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import replace

import pytest
import torch
from meta_models import llama
from zoo import ZOO

import autopar
from autopar.capture import capture
from autopar.certificate import check
from autopar.errors import InfeasibleError
from autopar.planner.effort import BRIEF, PATIENT, SolverWork, requested_seconds
from autopar.planner.intra_op.building.fold import fold
from autopar.planner.intra_op.building.integer_program import Beaten, Problem
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.random_plans import random_plan
from autopar.planner.intra_op.solving import highs
from autopar.planner.intra_op.solving.cbc import ByCbc
from autopar.planner.intra_op.solving.highs import HighsProgram
from autopar.planner.intra_op.within_memory import OutOfReach
from autopar.plans.offload_options import parse_offload
from autopar.plans.plan import StagePlan
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.texts import parse_bytes
from hardware_profiles import abstract_cluster, load_cluster

TWO = Mesh.of(data=2, tensor=4)
RECOUNTED = ("gpt2", "llama", "resnet", "t5", "unet")


@functools.cache
def graph_of(name: str, layers: int = 2) -> Graph:
    case = ZOO[name](layers=layers) if name not in ("resnet", "unet", "mlp") else ZOO[name]()
    return capture(case.model, case.args, case.kwargs).graph


@pytest.mark.parametrize("name", ["gpt2", pytest.param("resnet", marks=pytest.mark.slow)])
def test_same_inputs_same_plan_also_after_other_meshes(name: str) -> None:
    graph, cluster = graph_of(name), load_cluster("dgx-h100")
    alone = plan_graph(graph, cluster, TWO)
    for mesh in (Mesh.of(data=8), Mesh.of(tensor=2), Mesh.of(data=4, tensor=2)):
        plan_graph(graph, cluster, mesh)
    assert plan_graph(graph, cluster, TWO) == alone


def test_identical_blocks_are_found_and_deciding_them_once_loses_nothing() -> None:
    graph, cluster = graph_of("gpt2", 4), load_cluster("dgx-h100")
    (block,) = fold(graph).blocks
    assert block[2] in (3, 4)
    folded, plain = (plan_graph(graph, cluster, Mesh.of(x=4), Options(fold=f)) for f in (True, False))
    assert folded.price.seconds == pytest.approx(plain.price.seconds, rel=1e-6)


@pytest.mark.parametrize("name", ["mlp", "llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_better_hardware_is_never_worse(name: str) -> None:
    graph = graph_of(name)
    rng = random.Random(3)
    for _ in range(4):
        alpha, beta = rng.uniform(0, 1e-3), rng.uniform(1e-9, 1e-6)
        slow, fast = (
            plan_graph(graph, abstract_cluster({"x": 4}, alpha=(alpha * k,), beta=(beta * k,)), Mesh.of(x=4))
            for k in (1.0, rng.uniform(0.2, 0.9))
        )
        assert fast.price.seconds <= slow.price.seconds * (1 + 1e-9)


def test_faster_gpus_give_faster_plans() -> None:
    graph = graph_of("gpt2")
    seconds = [plan_graph(graph, load_cluster(c), TWO).price.compute_seconds for c in ("dgx-a100", "dgx-h100")]
    assert seconds[1] <= seconds[0]


@pytest.mark.parametrize(
    "name, seeds", [("gpt2", 1), ("resnet", 1), *(pytest.param(n, 3, marks=pytest.mark.slow) for n in RECOUNTED)]
)
def test_the_price_is_what_check_recounts(name: str, seeds: int) -> None:
    graph, cluster, mesh = graph_of(name), load_cluster("dgx-h100"), Mesh.of(data=2, tensor=2)
    rules, priced = rules_of(graph), pricer(cluster, mesh)
    plans = [plan_graph(graph, cluster, mesh), *(random_plan(graph, rules, priced, seed) for seed in range(seeds))]
    for plan in plans:
        report = check(plan, graph, cluster)
        assert report.ok, report.failures


class _TopOne(torch.nn.Module):
    """Routing as in Switch: which expert is first has no gradient, its probability has one."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = torch.nn.Linear(64, 8), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        probs = self.router(x).softmax(-1)
        hit = torch.nn.functional.one_hot(probs.argmax(-1), 8).to(x.dtype)
        return torch.nn.functional.mse_loss(self.up(x) * (probs * hit).sum(-1, keepdim=True), y)


def test_no_gradient_is_summed_for_what_gives_none() -> None:
    x, cluster = torch.randn(64, 64), load_cluster("local-x4")
    model = _TopOne()
    captured = capture(model, (x, x))
    whole = {":softmax": {"tensor": "replicate"}, ":argmax": {"tensor": "replicate"}}
    plan = autopar.plan(model, cluster, (x, x), captured=captured, mesh="tensor=4", constraints=whole).stages[0]
    assert not check(plan, captured.graph, cluster, types=True).failures
    assert "softmax" not in plan.reshard_paths, "the copies of its gradient would be summed where there is none"


def test_a_false_claim_is_caught() -> None:
    graph, cluster, mesh = graph_of("mlp"), load_cluster("dgx-h100"), Mesh.of(data=2)
    plan = random_plan(graph, rules_of(graph), pricer(cluster, mesh), 1)
    wrong = replace(plan, price=replace(plan.price, activation_seconds=plan.price.activation_seconds * 1.2))
    assert not check(wrong, graph, cluster).ok
    wrong = replace(plan, price=replace(plan.price, parameter_bytes=plan.price.parameter_bytes + 1))
    assert not check(wrong, graph, cluster).ok


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "llama"))])
def test_without_highs_cbc_makes_plans_of_the_same_price(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    graph, cluster, mesh = graph_of(name), load_cluster("dgx-h100"), Mesh.of(data=2, tensor=2)
    plan = plan_graph(graph, cluster, mesh)
    monkeypatch.setattr(highs, "highspy", None)
    by_cbc = plan_graph(graph, cluster, mesh)
    assert by_cbc.solution.solver == "cbc"
    assert by_cbc.price.seconds == pytest.approx(plan.price.seconds, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_without_highs_plans_keep_within_memory_and_bounds_hold(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    graph, cluster, mesh = graph_of(name), load_cluster("dgx-h100"), Mesh.of(data=2, tensor=2)
    limit = 0.9 * plan_graph(graph, cluster, mesh).price.memory_bytes
    plan = plan_graph(graph, cluster, mesh, Options(memory_limit_bytes=limit))
    monkeypatch.setattr(highs, "highspy", None)
    by_cbc = plan_graph(graph, cluster, mesh, Options(memory_limit_bytes=limit))
    assert by_cbc.solution.solver == "cbc" and by_cbc.price.memory_bytes <= limit
    assert by_cbc.solution.objective_seconds * (1 - by_cbc.solution.gap) <= plan.solution.objective_seconds


@pytest.mark.parametrize("asked", [None, 30.0, 300.0])
def test_the_solver_gets_the_time_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, asked: float | None) -> None:
    """Also where memory binds, where the planner would give it less of its own."""
    graph, cluster, mesh = graph_of("mlp"), load_cluster("dgx-h100"), Mesh.of(data=2)
    limit = 0.9 * plan_graph(graph, cluster, mesh).price.memory_bytes
    efforts: list[SolverWork] = []

    def program(problem: Problem, effort: SolverWork) -> HighsProgram | ByCbc:
        efforts.append(effort)
        return solver_program(problem, effort=effort)

    solver_program = highs.program
    monkeypatch.setattr(highs, "program", program)
    plan_graph(graph, cluster, mesh, Options(memory_limit_bytes=limit, time_limit_seconds=asked))
    assert len(efforts) > 1
    assert set(efforts) == ({PATIENT, BRIEF} if asked is None else {requested_seconds(asked)})


def smallest_said(error: InfeasibleError) -> float:
    """The bytes of the smallest plan, as the error says."""
    said = re.search(r"the smallest needs (\S+ \S+),", str(error))
    needed = parse_bytes(said.group(1).replace(" ", "")) if said is not None else None
    assert needed is not None
    return needed


@pytest.mark.parametrize(
    "name, may_recompute", [("resnet", False), ("mlp", True), pytest.param("resnet", True, marks=pytest.mark.slow)]
)
def test_the_smallest_that_an_error_names_is_the_smallest(name: str, may_recompute: bool) -> None:
    """By the fullest moment of a step, as the limit is: with as much a plan is found, with a tenth less none is."""
    graph, cluster, mesh = graph_of(name), load_cluster("dgx-h100"), Mesh.of(data=2)

    def limited(n_bytes: float) -> Options:
        return Options(memory_limit_bytes=n_bytes, may_recompute=may_recompute)

    with pytest.raises(InfeasibleError, match="the smallest needs") as error:
        plan_graph(graph, cluster, mesh, limited(1000))
    needed = smallest_said(error.value)
    assert plan_graph(graph, cluster, mesh, limited(needed + 1024)).price.memory_bytes <= needed + 1024
    with pytest.raises(InfeasibleError, match="the smallest needs"):
        plan_graph(graph, cluster, mesh, limited(0.9 * needed))


def test_the_least_need_is_that_of_all_that_the_user_allows() -> None:
    """What may be moved to the host lessens the need that an error names, and never adds to it."""
    graph, cluster, mesh = graph_of("mlp"), load_cluster("dgx-h100"), Mesh.of(data=2)
    needs: dict[str, float] = {}
    for wish in ("none", "activations", "optimizer", "activations,optimizer", "auto"):
        with pytest.raises(InfeasibleError, match="the smallest needs") as error:
            plan_graph(graph, cluster, mesh, Options(memory_limit_bytes=1000, offload=parse_offload(wish)))
        needs[wish] = smallest_said(error.value)
    assert needs["activations"] <= needs["none"]
    assert needs["activations,optimizer"] <= needs["optimizer"] < needs["none"]
    assert needs["auto"] <= needs["activations,optimizer"]


def test_a_search_is_told_that_nothing_fits_without_the_smallest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes no branch and bound. Where the relaxation fits, the plan is the same with explanations and without."""
    graph, cluster, mesh = graph_of("gpt2"), load_cluster("dgx-h100"), Mesh.of(data=8)
    some = 0.5 * plan_graph(graph, cluster, mesh).price.memory_bytes
    plans = [plan_graph(graph, cluster, mesh, Options(memory_limit_bytes=some, explains=e)) for e in (True, False)]
    assert plans[0] == plans[1]
    with pytest.raises(InfeasibleError, match="the smallest needs") as error:
        plan_graph(graph, cluster, mesh, Options(memory_limit_bytes=0.1 * some))

    def branches(*args: object) -> None:
        raise AssertionError("branch and bound")

    monkeypatch.setattr(HighsProgram, "best", branches)
    with pytest.raises(OutOfReach, match=r"no plan fits .* per device on data=8") as short:
        plan_graph(graph, cluster, mesh, Options(memory_limit_bytes=0.1 * some, explains=False))
    assert str(error.value).startswith(str(short.value).partition(" per device")[0])


def test_memory_limits_hold_and_cost() -> None:
    graph, cluster, mesh = graph_of("gpt2"), load_cluster("dgx-h100"), Mesh.of(data=8)
    free = plan_graph(graph, cluster, mesh)
    before = free.price.seconds
    held = 0
    for share in (0.8, 0.5, 0.3):
        limit = share * free.price.memory_bytes
        try:
            plan = plan_graph(graph, cluster, mesh, Options(memory_limit_bytes=limit))
        except InfeasibleError:
            break
        held += 1
        assert plan.price.memory_bytes <= limit
        assert plan.price.seconds >= before * 0.99, "less memory is never faster, but for the gap"
        assert plan.solution is not None and plan.solution.gap <= 0.02
        before = plan.price.seconds
    assert held


def test_pins_hold() -> None:
    graph, cluster = graph_of("llama"), load_cluster("dgx-h100")
    pins = {"*.mlp.up_proj": {"tensor": "k"}, "model.layers.1.self_attn.q_proj": {"data": "replicate"}}
    plan = plan_graph(graph, cluster, TWO, Options(constraints=pins, params={"lm_head.weight": "replicate"}))
    for node in graph.nodes:
        if node.kind == "op" and node.target == "aten.linear.default":
            if node.module.endswith("up_proj"):
                assert plan.ops[node.name][1] == "k"
            if node.module == "model.layers.1.self_attn.q_proj":
                assert plan.ops[node.name][0] == "I"
    assert plan.params["lm_head.weight"].stored == ("I", "I")


def test_pins_that_are_too_fine_are_all_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.Linear(7, 4))
    graph = capture(model, (torch.randn(4, 8),), {}, loss_fn=torch.sum).graph
    cluster, mesh = load_cluster("dgx-h100"), Mesh.of(data=8)
    names = [node.target for _, node in graph.of_kind("param")]
    with pytest.raises(InfeasibleError) as caught:
        plan_graph(graph, cluster, mesh, Options(params=dict.fromkeys(names, "S1")))
    text = str(caught.value)
    assert "3 of 4 parameters that were pinned are too small" in text
    assert "1.weight [4 7] as S1: on axis 'data' dim 1 has 7 left for 8 ranks" in text
    assert "0.bias [7] as S1: on axis 'data' it has no dim 1" in text and "1.bias" in text
    assert "0.weight" not in text and "end it with '0.bias': 'replicate'" in text
    plan = plan_graph(graph, cluster, mesh, Options(params={"*": "S1", "*.bias": "replicate", "1.*": "replicate"}))
    assert [plan.params[n].stored for n in ("0.weight", "0.bias", "1.weight")] == [("S1",), ("I",), ("I",)]


class Scaled(torch.nn.Module):
    """A scalar and a bias of one element, as of CLIP and of a last layer for one number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x)) * self.scale).square().mean()


def test_what_is_too_small_for_a_pattern_stays_whole() -> None:
    x = torch.randn(4, 4)
    plan = autopar.plan(Scaled(), "dgx-h100", x, mesh={"data": 2}, params={"*": "S0 use"})
    cut = {name for name, choice in plan.params.items() if choice.stored == ("S0",)}
    assert cut == {"up.weight", "up.bias"} == {n for n, c in plan.params.items() if c.lifetime == "use"}
    (note,) = (note for note in plan.notes if "too small" in note)
    assert note.startswith("3 parameter(s) are too small for the pieces that params= asks for by a pattern")
    assert note.endswith("stay whole: scale [], down.weight [1, 8], down.bias [1]")
    plan = autopar.plan(Scaled(), "dgx-h100", x, mesh={"data": 1}, params={"*": "S0 use"})
    assert not any(choice.stored.is_cut for choice in plan.params.values()) and not plan.notes


def test_a_name_of_what_is_too_small_is_refused_once() -> None:
    for params in ({"scale": "S0"}, {"*": "S0 use", "scale": "S0"}):
        with pytest.raises(InfeasibleError, match="parameters that were pinned are too small") as caught:
            autopar.plan(Scaled(), "dgx-h100", torch.randn(4, 4), mesh={"data": 2}, params=params)
        assert str(caught.value).count("scale [] as S0: on axis 'data' it has no dim 0") == 1
        assert "microbatches" not in str(caught.value)


def test_a_first_block_without_gradient_into_it_is_not_like_the_others() -> None:
    # its input is data: folded with the others, it would decide for them what whole means for their gradients
    graph = graph_of("mlp")
    for layers in ("bert", "gpt2"):
        found = fold(graph_of(layers, 4))
        nodes = graph_of(layers, 4).nodes
        for i, r in enumerate(found.representative):
            grads = [[nodes[ref.node].needs_grad for ref in nodes[k].refs] for k in (i, r)]
            assert grads[0] == grads[1]
    assert fold(graph).blocks == ()


@functools.cache
def tight() -> tuple[Graph, Options, StagePlan]:
    """24 blocks in 60% of the memory that the fastest plan takes, nothing recomputed: graph, what is asked, plan."""
    graph = llama(8, 256, hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, vocab_size=4096)
    cluster, mesh = load_cluster("dgx-h100"), Mesh.of(data=8)
    limit = 0.6 * plan_graph(graph, cluster, mesh).price.memory_bytes
    keeping = Options(memory_limit_bytes=limit, may_recompute=False)
    return graph, keeping, plan_graph(graph, cluster, mesh, keeping)


@pytest.mark.slow
def test_blocks_differ_where_one_choice_for_all_would_waste_memory() -> None:
    graph, keeping, mixed = tight()
    cluster, mesh, limit = load_cluster("dgx-h100"), Mesh.of(data=8), keeping.memory_limit_bytes
    assert mixed.solution is not None and mixed.solution.binds
    with pytest.raises(Beaten):  # branch and bound would be needed, for what is known to be too slow
        short = replace(keeping, memory_gap=0.0, worth_seconds=0.9 * mixed.price.seconds)
        plan_graph(graph, cluster, mesh, short)
    names = [n.removeprefix("model.layers.1.") for n in mixed.params if n.startswith("model.layers.1.")]
    ways = [len({mixed.params[f"model.layers.{k}.{name}"] for k in range(1, 24)}) for name in names]
    assert max(ways) == 2, "some blocks keep a weight in one way, the others in another"
    assert limit is not None and mixed.price.memory_bytes <= limit and check(mixed, graph, cluster).ok
    assert mixed.solution.gap <= 0.01


@pytest.mark.slow
def test_blocks_that_are_all_alike_are_slower_within_the_same_memory() -> None:
    graph, keeping, mixed = tight()
    alike = plan_graph(graph, load_cluster("dgx-h100"), Mesh.of(data=8), replace(keeping, memory_gap=0.0))
    assert alike.solution is not None and mixed.solution is not None
    assert mixed.price.seconds < alike.price.seconds, "the best plan of blocks that are all alike is slower"
    assert mixed.price.seconds * (1 - mixed.solution.gap) <= alike.price.seconds, "the bound holds for it too"
