"""Recomputed blocks: the same numbers, the collectives that the price counts, and less kept for the backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kept import Made, kept_bytes
from zoo import ZOO

from autopar.capture import Captured, capture
from autopar.certificate import check
from autopar.comparison import program_vs_eager as V
from autopar.errors import InfeasibleError, PlanError
from autopar.lower.emit import lower
from autopar.planner.inter_op.simulating.phases import phases
from autopar.planner.inter_op.stage_pins import starts_of
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.memory.recompute import segments_of
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.plan_completion import complete
from autopar.planner.intra_op.random_plans import random_plan
from autopar.plans.memory_decisions import memory
from autopar.plans.stage_graphs import cut, hot_ops
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

MESH = Mesh.of(data=2, tensor=2)
CLUSTER = load_cluster("dgx-h100")
BLOCKS = {"gpt2": "*.h.*", "llama": "*.layers.*", "t5": "*.block.*", "resnet": "*layer?", "opt": "*.layers.*"}


def captured_of(name: str, **options: float) -> tuple[Captured, torch.nn.Module, dict[str, torch.Tensor]]:
    case = ZOO[name](**options)
    captured = capture(case.model, case.args, case.kwargs)
    return V.promoted(captured), case.model, V.inputs_of(captured, case.args, case.kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt2 with dropout", "opt with layerdrop", "llama", "t5", "resnet"])
def test_same_numbers(name: str) -> None:
    """Random plans; buffers are compared too, so a batch norm that counts its batch twice would show."""
    dropout = {"dropout": 0.1} if "dropout" in name else {"layerdrop": 0.5} if "layerdrop" in name else {}
    name = name.split()[0]
    captured, model, inputs = captured_of(name, **dropout)
    graph, rules, priced = captured.graph, rules_of(captured.graph), pricer(CLUSTER, MESH)
    weights, buffers = V.state_of(captured, model)
    state = V.doubled(weights), V.doubled(buffers), V.doubled(inputs)
    again = segments_of(graph, rules, [BLOCKS[name]])
    assert len(again) == {"t5": 4}.get(name, 2)
    reference = V.train(captured, V.one_device(graph), *state)
    for seed in range(2):
        plan = random_plan(graph, rules, priced, seed, recompute=again)
        report, plain = check(plan, graph, CLUSTER), check(replace(plan, memory={}), graph, CLUSTER)
        assert report.ok, report.failures
        assert report.collectives.total() > plain.collectives.total()
        assert report.price.compute_seconds > 1.1 * plain.price.compute_seconds
        parts = phases(graph, plan, priced)
        whole = parts.forward_seconds + parts.backward_seconds + parts.step_seconds
        assert whole == pytest.approx(plan.price.seconds, rel=1e-9)
        found = V.compare(str(seed), V.train(captured, plan, *state), reference)
        assert found.worst < 1e-9, found


class Normed(torch.nn.Module):
    """A norm whose rows 3 ranks have in pieces of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(torch.tanh(self.a(x)))).square().mean()


def test_uneven_pieces_run_again_as_they_ran_first() -> None:
    """Many ranks of uneven pieces in one process need a function mode, which ``backward`` puts off."""
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(7, 16)
    captured = V.promoted(capture(model, (x,)))
    graph, mesh, rules = captured.graph, Mesh.of(data=3), rules_of(captured.graph)
    norm = next(n.name for n in graph.nodes if "layer_norm" in n.target)
    state = tuple(map(V.doubled, (*V.state_of(captured, model), V.inputs_of(captured, (x,), {}))))
    chosen = {i: strategy_named(graph, n, rules[i], ("n0",)) for i, n in graph.of_kind("op") if n.name == norm}
    plan = complete(graph, rules, pricer(CLUSTER, mesh), chosen, {}, {}, memory=memory(recompute=[(norm, norm)]))  # type: ignore[arg-type]
    reference = V.train(captured, V.one_device(graph), *state)
    assert V.compare("uneven", V.train(captured, plan, *state), reference).worst < 1e-12


class Classes(torch.nn.Module):
    """The loss of a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.a(x), classes, label_smoothing=0.1)


def test_sums_of_a_loss_over_classes_are_priced_as_they_travel() -> None:
    """Together in one collective, and as often as the loss runs."""
    captured = capture(Classes(), (torch.randn(8, 16), torch.randint(32, (8,))))
    graph, mesh, rules = captured.graph, Mesh.of(data=2, tensor=2), rules_of(captured.graph)
    loss = next(n.name for n in graph.nodes if "cross_entropy" in n.target)
    chosen = {i: strategy_named(graph, n, rules[i], ("v", "v")) for i, n in graph.of_kind("op") if n.name == loss}
    for again in ([], [(loss, loss)]):
        plan = complete(graph, rules, pricer(CLUSTER, mesh), chosen, {}, {}, memory=memory(recompute=again))  # type: ignore[arg-type]
        report = check(plan, graph, CLUSTER, tolerance=1e-9)
        assert report.ok, report.failures
        assert report.price.compute_seconds == pytest.approx(plan.price.compute_seconds)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_less_is_kept(name: str) -> None:
    """One device: what autograd keeps falls by what the price says, less the block that lives again."""
    captured, model, inputs = captured_of(name)
    graph, rules = captured.graph, rules_of(captured.graph)
    weights, buffers = V.state_of(captured, model)
    values = {**V.doubled(weights), **V.doubled(buffers), **V.doubled(inputs)}
    priced = pricer(CLUSTER, Mesh.of(one=1))
    found = {}
    for patterns in ((), (BLOCKS[name],)):
        plan = complete(graph, rules, priced, {}, {}, {}, memory=memory(recompute=segments_of(graph, rules, patterns)))
        found[patterns] = kept_bytes(captured, plan, values), plan.price.activation_bytes
    (before, priced_before), (after, priced_after) = found.values()
    assert after < 0.7 * before
    assert priced_after < priced_before
    # two blocks' insides are gone; the price has those of one, which live again one at a time. It counts casts, which
    # change nothing in float64
    assert before - after == pytest.approx(2 * (priced_before - priced_after), rel=0.2)


def test_each_microbatch_of_a_stage_keeps_less() -> None:
    """What every microbatch in flight adds falls by what the plan of the stage says: nothing of a block but inputs."""
    captured, model, inputs = captured_of("gpt2")
    hot = [captured.graph.nodes[i] for i in hot_ops(captured.graph)]
    stage = cut(captured.graph, [next(n.name for n in hot if ".h.1." in n.module)])[1]
    rules, priced = rules_of(stage.graph), pricer(CLUSTER, Mesh.of(one=1))
    weights, buffers = V.state_of(captured, model)
    known = {**V.doubled(weights), **V.doubled(buffers), **V.doubled(inputs)}
    arriving = {n.target: n.out for _, n in stage.graph.of_kind("input") if n.hot}
    made: dict[bool, tuple[list[int], int]] = {}
    for again in (False, True):
        segments = segments_of(stage.graph, rules, ["*.h.*"]) if again else ()
        states = dict.fromkeys(arriving, ("I",))
        decided = memory(recompute=segments)
        plan = complete(stage.graph, rules, priced, {}, {}, {}, inputs=states, memory=decided, in_flight=3)
        program, held, kept = lower(stage.graph, plan), [], []
        for _ in range(3):
            new = {n: torch.randn(s.shape, dtype=torch.float64, requires_grad=True) for n, s in arriving.items()}
            values = [new.get(s.name, known.get(s.name, torch.tensor(0))) for s in program.slots]
            with Made() as made_now:
                held.append(program.runnable(*values))
                kept.append(made_now.live_bytes)
        made[again] = kept, plan.kept_bytes
        assert plan.price.activation_bytes == 3 * plan.kept_bytes + plan.price.again_bytes
    (before, priced_before), (after, priced_after) = made[False], made[True]
    assert len(set(before)) == len(set(after)) == 1, "every microbatch adds the same"
    # the price has casts, which change nothing in float64, and the tensor that arrives, which is made elsewhere
    assert before[0] - after[0] == pytest.approx(priced_before - priced_after, rel=0.25)


def test_which_blocks() -> None:
    graph = captured_of("gpt2")[0].graph
    rules = rules_of(graph)
    modules = {n.name: n.module for n in graph.nodes}
    both = segments_of(graph, rules, ["*.h.*"])
    assert [modules[first].split(".h.")[1] for first, _ in both] == ["0.ln_1", "1.ln_1"]
    # the residual addition at the end keeps nothing, so it is no part of the segment
    assert [modules[last].split(".h.")[1] for _, last in both] == ["0.mlp.c_proj", "1.mlp.c_proj"]
    assert segments_of(graph, rules, ["*.h.*", "*.h.*.attn", "*.h.1.mlp.*"]) == both, "modules inside others"
    with pytest.raises(PlanError, match=r"recompute '\*.block.*' matches no module; modules are .*transformer.h"):
        segments_of(graph, rules, ["*.block.*"])
    shared = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(self.two(self.one(x))).sum()

    twice = capture(Twice(), (torch.zeros(2, 4),)).graph
    with pytest.raises(PlanError, match=r"'one' are not one contiguous run .*two"):
        segments_of(twice, rules_of(twice), ["one"])


def test_a_memory_limit_that_only_recomputing_meets() -> None:
    captured, *_ = captured_of("llama")
    graph, mesh = captured.graph, Mesh.of(data=2)
    free = plan_graph(graph, CLUSTER, mesh)
    again = plan_graph(graph, CLUSTER, mesh, Options(recompute=(BLOCKS["llama"],)))
    assert again.price.activation_bytes < free.price.activation_bytes
    assert again.price.seconds > free.price.seconds
    assert free.solution is not None and again.solution is not None
    # what the solver does not see (masks, positions) is the same in both, so it saw the whole price of recomputing
    seen = again.solution.objective_seconds - free.solution.objective_seconds
    assert seen == pytest.approx(again.price.seconds - free.price.seconds, rel=1e-6)
    limit = 0.9 * again.price.memory_bytes
    tight = plan_graph(graph, CLUSTER, mesh, Options(recompute=(BLOCKS["llama"],), memory_limit_bytes=limit))
    assert tight.price.memory_bytes <= limit
    assert check(tight, graph, CLUSTER).ok


@pytest.mark.parametrize("name, share", [("gpt2", 0.6), pytest.param("llama", 0.45, marks=pytest.mark.slow)])
def test_what_the_planner_lets_run_again_gives_the_same_numbers(name: str, share: float) -> None:
    """On one mesh, where memory binds. Llama's limit is one that choosing operators one by one does not meet."""
    case = ZOO[name](layers=4, rows=32)
    captured = V.promoted(capture(case.model, case.args, case.kwargs))
    graph, mesh = captured.graph, Mesh.of(tensor=2)
    limit = share * plan_graph(graph, CLUSTER, mesh).price.memory_bytes
    asked = Options(memory_limit_bytes=limit)
    whole = plan_graph(graph, CLUSTER, mesh, replace(asked, recompute=(BLOCKS[name],)))
    plan = plan_graph(graph, CLUSTER, mesh, asked)
    assert plan.recompute and plan.price.memory_bytes <= limit
    assert plan.price.seconds <= 1.05 * whole.price.seconds
    report = check(plan, graph, CLUSTER)
    assert report.ok, report.failures
    weights, buffers = V.state_of(captured, case.model)
    inputs = V.inputs_of(captured, case.args, case.kwargs)
    state = V.doubled(weights), V.doubled(buffers), V.doubled(inputs)
    reference = V.train(captured, V.one_device(graph), *state)
    assert V.compare("again", V.train(captured, plan, *state), reference).worst < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, searched", [("1f1b", False), ("1f1b", True), ("zb-v", True)]
)
def test_the_planner_lets_operators_of_stages_run_again_where_memory_is_short(schedule: str, searched: bool) -> None:
    """With the stages given; they and their meshes, which are most of the search, are chosen in the sweep."""
    case, cluster = ZOO["llama"](layers=4), load_cluster("local-x4")
    captured = capture(case.model, case.args, case.kwargs)
    wanted = PipelineOptions(4, 2, (schedule,))
    if not searched:
        wanted = replace(wanted, mesh=Mesh.of(data=2), starts=starts_of(captured.graph, ("model.layers.2",)))
    free = plan_pipeline(captured.graph, cluster, 4, wanted).plan
    assert not any(s.recompute for s in free.stages), "recomputing costs time"
    most = max(s.price.memory_bytes for s in free.stages)
    limit = 0.6 * most * len(free.schedule.stages_of_rank[0])
    near = Options(memory_limit_bytes=limit, memory_gap=0.05)  # as asked of most plans, it takes six times as long
    asked = replace(wanted, options=near)
    plan = plan_pipeline(captured.graph, cluster, 4, asked).plan
    assert any(s.recompute and s.make_again for s in plan.stages)
    assert plan.seconds < 1.3 * free.seconds  # 1.34 with whole blocks
    for stage, of_graph in zip(plan.stages, cut(captured.graph, plan.starts), strict=True):
        report = check(stage, of_graph.graph, cluster)
        assert not report.failures, report.failures
        assert report.kept_bytes == stage.kept_bytes, "what each microbatch in flight adds"
        assert report.price.again_bytes == stage.price.again_bytes, "what is there once"
        assert stage.price.activation_bytes == stage.in_flight * report.kept_bytes + report.price.again_bytes
    for held in plan.schedule.stages_of_rank:
        assert sum(plan.stages[s].price.memory_bytes for s in held) <= limit
    assert V.verify_pipeline(captured, case.model, case.args, case.kwargs, plan).worst < 1e-9
    with pytest.raises(InfeasibleError, match="no plan fits"):
        plan_pipeline(captured.graph, cluster, 4, replace(asked, may_recompute=False))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_less_memory_and_fewer_choices_are_never_faster(schedule: str) -> None:
    """What runs again is part of every stage's program, and the cut is searched where memory binds, so that the
    estimate of neither decides."""
    case, cluster = ZOO["llama"](layers=6), load_cluster("local-x4")
    graph = capture(case.model, case.args, case.kwargs).graph
    free = plan_pipeline(graph, cluster, 4, PipelineOptions(4, 2, (schedule,))).plan
    whole = max(s.price.memory_bytes for s in free.stages) * len(free.schedule.stages_of_rank[0])
    last = free.seconds
    for share in (0.6, 0.5, 0.45, 0.4):
        asked = PipelineOptions(4, 2, (schedule,), options=Options(memory_limit_bytes=share * whole))
        seconds = plan_pipeline(graph, cluster, 4, asked).plan.seconds
        assert seconds >= 0.99 * last  # stages are within 1% of their optimum
        last = seconds
        try:
            plain = plan_pipeline(graph, cluster, 4, replace(asked, may_recompute=False)).plan.seconds
        except InfeasibleError:
            continue
        assert seconds <= 1.01 * plain
    assert last < 1.5 * free.seconds
