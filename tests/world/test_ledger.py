"""What the ledger of memory says a plan keeps is what autograd keeps in the emitted program, to the byte.

The ledger tries operators one by one; ``check`` runs the whole program under autograd's hooks and counts storages.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from kept import Made
from torch import Tensor, nn
from zoo import ZOO

from autopar import planfile
from autopar.capture import Captured, capture
from autopar.certificate import check
from autopar.comparison import program_vs_eager as V
from autopar.errors import PlanError
from autopar.lower.emit import lower
from autopar.lower.freed_tensors import Backwards, Freed
from autopar.planner.inter_op.simulating.phases import phases
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.memory.recompute import segments_of
from autopar.planner.intra_op.memory.walked_ledger import ledger
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.plan_completion import complete
from autopar.planner.intra_op.random_plans import random_plan
from autopar.plans.memory_decisions import memory
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.stage_graphs import cut, hot_ops
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from hardware_profiles import load_cluster

CLUSTER = load_cluster("dgx-h100")
ONE = Mesh.of(one=1)
MESH = Mesh.of(data=2, tensor=2)
BLOCKS = {"gpt2": "*.h.*", "llama": "*.layers.*", "t5": "*.block.*", "resnet": "*layer?"}


@functools.cache
def captured_of(name: str, dropout: float = 0.0) -> tuple[Captured, nn.Module, dict[str, Tensor]]:
    case = ZOO[name](dropout=dropout) if dropout else ZOO[name]()
    captured = capture(case.model, case.args, case.kwargs)
    return captured, case.model, V.inputs_of(captured, case.args, case.kwargs)


def drawn(
    captured: Captured, seed: int, again: bool = False, gather_again: bool = False, make_again: bool = False
) -> StagePlan:
    """A random plan; with blocks that run again where the model has blocks to name."""
    graph, rules = captured.graph, rules_of(captured.graph)
    patterns = [p for p in BLOCKS.values() if again and any(_matches(p, node.module) for node in graph.nodes)]
    segments = segments_of(graph, rules, patterns[:1])
    return random_plan(
        graph, rules, pricer(CLUSTER, MESH), seed, recompute=segments, gather_again=gather_again, make_again=make_again
    )


def _matches(pattern: str, module: str) -> bool:
    from fnmatch import fnmatchcase

    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[: k + 1]), pattern) for k in range(len(parts)))


def agrees(plan: StagePlan, captured: Captured) -> None:
    report = check(plan, captured.graph, CLUSTER, tolerance=1.0)
    assert report.kept_bytes == plan.kept_bytes > 0
    assert report.price.again_bytes == plan.price.again_bytes
    assert not report.failures, report.failures


@pytest.mark.parametrize("name", ["gpt2 with dropout", "mlp"])
def test_bytes_on_one_device(name: str) -> None:
    captured, _, _ = captured_of(name.split()[0], 0.1 if "dropout" in name else 0.0)
    agrees(complete(captured.graph, rules_of(captured.graph), pricer(CLUSTER, ONE), {}, {}, {}), captured)


@pytest.mark.parametrize("again, gather_again", [(True, False), (False, True)], ids=["recomputed", "gathered again"])
def test_bytes_of_random_plans(again: bool, gather_again: bool) -> None:
    captured, _, _ = captured_of("gpt2", 0.1)
    plan = drawn(captured, 1, again, gather_again)
    assert bool(plan.recompute) == again and bool(plan.gather_again) == gather_again
    agrees(plan, captured)


class Chain(nn.Module):
    """Pointwise results that products read: one is made from another, and a norm's serves two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b, self.c = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        y = self.norm(x)
        gate = torch.nn.functional.silu(self.a(y))
        inner = torch.nn.functional.dropout(gate * self.b(y), 0.2, True)
        return (x + self.c(inner)).square().mean()


def test_results_of_segments_made_again_are_not_kept_and_give_the_same_numbers() -> None:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(8, 16)
    captured = V.promoted(capture(model, (x,)))
    graph = captured.graph
    norm, silu, mul, drop = (
        next(n.name for n in graph.nodes if word in n.target) for word in ("layer_norm", "silu", "mul.", "dropout")
    )
    state = tuple(map(V.doubled, (*V.state_of(captured, model), V.inputs_of(captured, (x,), {}))))
    reference = V.train(captured, V.one_device(graph), *state)
    for mesh in (ONE, Mesh.of(t=2)):
        rules, priced = rules_of(graph), pricer(CLUSTER, mesh)
        plain = plan_graph(graph, CLUSTER, mesh)
        chosen = {i: strategy_named(graph, n, rules[i], plain.ops[n.name]) for i, n in graph.of_kind("op")}
        params = {i: plain.params[n.target] for i, n in graph.of_kind("param")}
        plan = complete(
            graph, rules, priced, chosen, params, dict(enumerate(plain.outputs)),  # type: ignore[arg-type]
            memory=memory(recompute=[(norm, norm), (silu, silu), (mul, drop)], make_again=[norm, silu, mul, drop]),
        )  # fmt: skip
        assert set(plan.make_again) == {norm, silu, drop}, "the product is an inner matter of its segment"
        assert plan.kept_bytes < plain.kept_bytes
        report = check(plan, graph, CLUSTER)
        assert report.ok, report.failures
        parts = phases(graph, plan, priced)
        assert parts.forward_seconds + parts.backward_seconds + parts.step_seconds == pytest.approx(plan.price.seconds)
        assert V.compare("again", V.train(captured, plan, *state), reference).worst < 1e-12


class SlicedLate(nn.Module):
    """A pointwise result that one operator reads early and another late, where its gradient is cut already."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 64)
        self.c = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.silu(self.a(x))
        wide = torch.cos(torch.sin(self.b(torch.exp(y))))
        return (self.c(wide) + y).square().mean()


def test_a_slice_of_a_result_made_again_is_memory_of_its_own_and_asks_for_nothing() -> None:
    torch.manual_seed(0)
    model, x = SlicedLate(), torch.randn(8, 16)
    captured = V.promoted(capture(model, (x,)))
    graph, mesh = captured.graph, Mesh.of(t=2)
    rules = rules_of(graph)
    silu, exp, sin, cos, add = (
        next(n.name for n in graph.nodes if word in n.target) for word in ("silu", "exp.", "sin.", "cos.", "add.")
    )
    chosen = {
        i: strategy_named(graph, node, rules[i], ("b",) if node.name == add else State.of("I"))  # type: ignore[arg-type]
        for i, node in graph.of_kind("op")
    }
    plan = complete(
        graph, rules, pricer(CLUSTER, mesh), chosen, {}, {},
        memory=memory(recompute=[(silu, silu), (exp, exp), (sin, cos)], make_again=[silu]),
    )  # fmt: skip
    assert plan.reshard_paths[silu] == ((State.of("I"), State.of("S0")),) and plan.make_again == (silu,)
    agrees(plan, captured)


def test_make_again_names_what_segments_make(tmp_path) -> None:  # type: ignore[no-untyped-def]
    captured, _, _ = captured_of("gpt2", 0.1)
    plan = drawn(captured, 5, make_again=True)
    path = tmp_path / "plan.json"
    planfile.save(path, Plan.alone(plan, "dgx-h100"), captured.graph)
    assert planfile.load(path, captured.graph).make_again == plan.make_again
    outside = next(n.name for _, n in captured.graph.of_kind("op") if n.needs_grad and n.name not in plan.make_again)
    wrong = replace(plan, memory=memory(make_again=[outside]))
    with pytest.raises(PlanError, match=f"make_again: '{outside}' is not made by what is recomputed"):
        lower(captured.graph, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("decision", ["keep", "recompute", "gather again", "make again"])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_bytes_of_every_model(name: str, decision: str, seed: int) -> None:
    captured, _, _ = captured_of(name)
    agrees(drawn(captured, seed, *(decision == d for d in ("recompute", "gather again", "make again"))), captured)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO))
def test_bytes_of_stages(name: str) -> None:
    """Both halves of every model, with random placements where they meet: what arrives is kept by its reader."""
    captured, _, _ = captured_of(name)
    hot = hot_ops(captured.graph)
    stages = cut(captured.graph, [captured.graph.nodes[hot[len(hot) // 2]].name])
    for stage in stages:
        graph = stage.graph
        plan = random_plan(graph, rules_of(graph), pricer(CLUSTER, MESH), 0, gather_again=True)
        report = check(plan, graph, CLUSTER, tolerance=1.0)
        assert report.kept_bytes == plan.kept_bytes
        assert not report.failures, report.failures


def test_a_false_claim_of_activation_bytes_is_caught() -> None:
    captured, _, _ = captured_of("mlp")
    plan = complete(captured.graph, rules_of(captured.graph), pricer(CLUSTER, ONE), {}, {}, {})
    wrong = replace(plan, price=replace(plan.price, activation_bytes=plan.price.activation_bytes - 4))
    (failure,) = check(wrong, captured.graph, CLUSTER).failures
    assert f"the plan says {plan.kept_bytes - 4}, autograd holds {plan.kept_bytes}" in failure


def test_bytes_of_a_real_forward() -> None:
    """Real tensors in one process: what lives after the forward is what the ledger says, and the model's outputs."""
    captured, model, inputs = captured_of("gpt2")
    graph = captured.graph
    plan = complete(graph, rules_of(graph), pricer(CLUSTER, ONE), {}, {}, {})
    weights, buffers = V.state_of(captured, model)
    known = {**weights, **buffers, **inputs}
    program = lower(graph, plan)
    values = [known.get(slot.name, torch.tensor(0)) for slot in program.slots]
    values = [v.detach().requires_grad_(s.needs_grad) for v, s in zip(values, program.slots, strict=True)]
    with Made() as made:
        outputs = program.runnable(*values)
        for value in values:  # results that are views of weights
            made.found.pop(value.untyped_storage()._cdata, None)
        alive = made.live_bytes
    outside = sum(x.untyped_storage().nbytes() for x in outputs if isinstance(x, Tensor))
    assert alive == plan.kept_bytes + outside


class TwoReaders(nn.Module):
    """The sum of two products of one tensor, which a plan can gather once for both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        return (self.a(y) * self.b(y)).mean()


def test_a_copy_gathered_again_is_not_kept_and_gives_the_same_numbers() -> None:
    torch.manual_seed(0)
    model, x = TwoReaders(), torch.randn(8, 16)
    captured = V.promoted(capture(model, (x,)))
    graph, rules, mesh = captured.graph, rules_of(captured.graph), Mesh.of(t=2)
    tanh = next(node.name for node in graph.nodes if "tanh" in node.target)
    for seed in range(200):
        plain = random_plan(graph, rules, pricer(CLUSTER, mesh), seed)
        path = plain.reshard_paths.get(tanh, ())
        if any(a == State.of("S0") and b in (State.of("R"), State.of("I")) for a, b in path):
            break
    chosen = {
        i: strategy_named(graph, node, rules[i], plain.ops[node.name]) for i, node in graph.of_kind("op")
    }  # fmt: skip
    params = {i: plain.params[node.target] for i, node in graph.of_kind("param")}
    outputs = dict(enumerate(plain.outputs))
    plan = complete(graph, rules, pricer(CLUSTER, mesh), chosen, params, outputs, memory=memory(gather_again=[tanh]))  # type: ignore[arg-type]
    assert plan.reshard_paths == plain.reshard_paths
    assert plan.gather_again == (tanh,)
    assert plan.kept_bytes < plain.kept_bytes
    gathered, before = check(plan, graph, CLUSTER), check(plain, graph, CLUSTER)
    assert gathered.ok, gathered.failures
    more = gathered.collectives - before.collectives
    assert sum(more.values()) == 1, "one gather for both readers"
    parts = phases(graph, plan, pricer(CLUSTER, mesh))
    assert parts.forward_seconds + parts.backward_seconds + parts.step_seconds == pytest.approx(plan.price.seconds)
    state = tuple(map(V.doubled, (*V.state_of(captured, model), V.inputs_of(captured, (x,), {}))))
    reference = V.train(captured, V.one_device(graph), *state)
    assert V.compare("again", V.train(captured, plan, *state), reference).worst < 1e-12


class OneMore(Freed):
    """A tensor and one, given up until the backward."""

    def __init__(self, whole: Tensor, piece: Tensor) -> None:
        super().__init__(whole)
        self.piece: Tensor | None = piece

    def again(self) -> None:
        assert self.piece is not None
        self.put(self.piece + 1)

    def let_go(self) -> None:
        self.piece = None


def test_what_a_copy_is_filled_from_goes_with_the_last_reader_that_keeps_no_graph() -> None:
    leaf = torch.ones(4, requires_grad=True)
    piece = leaf + 2
    whole = piece + 1
    readers = whole.sin(), whole.cos()
    copy = OneMore(whole, piece.detach())
    copy.until_backward(whole.grad_fn, [Backwards(reader) for reader in readers])
    for reader, keeps in ((readers[0], True), (readers[0], False), (readers[1], False)):
        assert copy.piece is not None
        reader.sum().backward(retain_graph=keeps)
    assert copy.piece is None and leaf.grad is not None
    four = torch.full((4,), 4.0)
    assert torch.allclose(leaf.grad, 2 * four.cos() - four.sin())


def test_what_a_copy_without_readers_is_filled_from_goes_with_the_backward_of_its_maker() -> None:
    """The graph lives on, and the hooks in it."""
    leaf = torch.ones(4, requires_grad=True)
    whole = leaf + 1
    result = whole.sum()  # its backward asks for no values
    copy = OneMore(whole, leaf.detach())
    copy.until_backward(whole.grad_fn, [])
    result.backward()
    assert copy.piece is None and result.grad_fn is not None


def test_copies_that_no_backward_asks_for_are_not_gathered_again_nor_paid_for() -> None:
    """A copy of which only slices are read, which are memory of their own, is freed and never filled."""
    captured, _, _ = captured_of("gpt2", 0.1)
    graph, rules = captured.graph, rules_of(captured.graph)
    plan = drawn(captured, 1, gather_again=True)
    chosen = {i: strategy_named(graph, n, rules[i], plan.ops[n.name]) for i, n in graph.of_kind("op")}  # type: ignore[arg-type]
    holds = ledger(graph, rules, plan.mesh, chosen, plan.reshard_paths, plan.memory)
    gathered, before = (check(p, graph, CLUSTER, tolerance=1.0) for p in (plan, replace(plan, memory={})))
    more = gathered.collectives - before.collectives
    assert 0 < len(holds.steps_again) == sum(more.values())


def test_gather_again_in_a_plan_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    captured, _, _ = captured_of("gpt2")
    plan = drawn(captured, 0, gather_again=True)
    path = tmp_path / "plan.json"
    planfile.save(path, Plan.alone(plan, "dgx-h100"), captured.graph)
    assert planfile.load(path, captured.graph).gather_again == plan.gather_again
    path.write_text(path.read_text().replace('"gather again": [', '"gather again": ["nothing", '))
    with pytest.raises(PlanError, match="'nothing' is no tensor of the model"):
        planfile.load(path, captured.graph)


@pytest.mark.slow
@pytest.mark.parametrize("make_again", [False, True], ids=["gathered again", "made again"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "resnet", "vit", "bert"])
def test_same_numbers_when_copies_are_freed(name: str, make_again: bool) -> None:
    captured, model, inputs = captured_of(name, 0.1 if name in ("gpt2", "t5") else 0.0)
    captured = V.promoted(captured)
    weights, buffers = V.state_of(captured, model)
    state = V.doubled(weights), V.doubled(buffers), V.doubled(inputs)
    reference = V.train(captured, V.one_device(captured.graph), *state)
    for seed in range(3):
        plan = drawn(captured, seed, gather_again=True, make_again=make_again)
        assert plan.gather_again or make_again
        assert check(plan, captured.graph, CLUSTER).ok
        assert V.compare(str(seed), V.train(captured, plan, *state), reference).worst < 1e-9
