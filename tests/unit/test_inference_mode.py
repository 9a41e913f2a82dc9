"""Models that run forward alone: caches as state of the program, refusals, plans."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from cached_decoder import CachedDecoder, Sizes, greedy, made, prompt_of
from torch import nn

import autopar
from autopar import planfile
from autopar.capture import capture
from autopar.certificate import check, peak_of
from autopar.comparison.in_process_ranks import run_step
from autopar.errors import AutoparError, InfeasibleError, PlanError, RunError
from autopar.lower.emit import lower
from autopar.parallelizing.replanning import for_graph
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.plans.clusters import get_cluster
from autopar.plans.plan import Plan, StagePlan
from autopar.runtime.stages.buffer_versions import outliving
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh

CLUSTER = get_cluster("local-x2")
WIDE = Sizes(dim=64, vocab=200)
HEADS = {"blocks.*.attention.q": {"tensor": "n"}}
ROWS = {"blocks.*.attention.q": {"tensor": "b"}}


def test_tokens_of_a_parallel_module_of_one_rank() -> None:
    model = made(Sizes())
    alone = copy.deepcopy(model)
    tokens, at = prompt_of(Sizes(), 10)
    pm = autopar.parallelize(model, 1, (tokens, at), mode="inference")
    assert torch.equal(greedy(pm, tokens, 64), greedy(alone, tokens, 64))
    assert not any(param.requires_grad for param in pm.parameters())
    assert pm.plan.pins.mode == "inference"
    assert "cache.k" not in " ".join(pm.state_dict()), "caches that are not persistent are not saved"


def _graphs(sizes: Sizes) -> tuple[CachedDecoder, Graph, Graph]:
    model = made(sizes).requires_grad_(False)
    tokens, at = prompt_of(sizes, 10)
    return model, capture(model, (tokens, at)).graph, capture(model, (tokens[:, :1], at[:1])).graph


def _run(graph: Graph, plan: StagePlan, model: nn.Module, buffers: dict[str, Any], *inputs: torch.Tensor) -> Any:
    named = dict(zip((node.target for _, node in graph.of_kind("input")), inputs, strict=True))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    step = run_step(graph, plan, lower(graph, plan), weights, buffers, named, backward=False)
    buffers.update(step.buffers)
    return step.outputs[0][:, -1].argmax(-1)


@pytest.mark.parametrize(("sizes", "cuts", "stored"), [
    (WIDE, HEADS, "S1"), (replace(WIDE, slices=True), ROWS, "S0"), (replace(WIDE, kv_heads=1), HEADS, "R"),
    (replace(WIDE, kv_heads=2, rope=True, experts=4), HEADS, "S1"),
])  # fmt: skip
def test_two_programs_over_one_stored_layout(sizes: Sizes, cuts: Any, stored: str) -> None:
    mesh = Mesh.of(tensor=2)
    model, prefill, decode = _graphs(sizes)
    first = plan_graph(prefill, CLUSTER, mesh, Options(constraints=cuts))
    caches = {name: state.text for name, state in first.buffers.items() if "cache" in name}
    assert set(caches.values()) == {stored}
    pins = {name: choice.stored.text for name, choice in first.params.items()} | caches
    second = plan_graph(decode, CLUSTER, mesh, for_graph(Options(constraints=cuts), decode, pins, mesh))
    assert {name: state.text for name, state in second.buffers.items() if "cache" in name} == caches
    assert not [key for key in second.reshard_paths if "cache" in key or "index_copy" in key]
    assert {n: c.stored for n, c in second.params.items()} == {n: c.stored for n, c in first.params.items()}

    buffers = {name: b.clone() for name, b in model.named_buffers()}
    tokens, at = prompt_of(sizes, 10)
    made_tokens = [_run(prefill, first, model, buffers, tokens, at)]
    for i in range(5):
        made_tokens.append(_run(decode, second, model, buffers, made_tokens[-1][:, None], torch.tensor([10 + i])))
    assert torch.equal(torch.stack(made_tokens, dim=1), greedy(model, tokens, 6))


def test_a_cache_is_kept_as_it_is_written_and_not_gathered() -> None:
    _, _, decode = _graphs(WIDE)
    for cuts, stored in ((HEADS, "S1"), (ROWS, "S0")):
        plan = plan_graph(decode, CLUSTER, Mesh.of(tensor=2), Options(constraints=cuts))
        assert {s.text for name, s in plan.buffers.items() if "cache" in name} == {stored}
        assert not [key for key in plan.reshard_paths if "cache" in key or "index_copy" in key]


class Window(nn.Module):
    """Keeps the last eight inputs, which it shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("last", torch.zeros(4, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.copy_(torch.cat([self.last[:, 1:], self.into(x)[:, None]], dim=1))
        return self.out(self.last.mean(1))


@pytest.mark.parametrize("factor", ["b", "n"])
def test_a_rolling_window_is_state(factor: str) -> None:
    torch.manual_seed(0)
    model = Window().double().eval().requires_grad_(False)
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    graph = capture(model, (x[0],)).graph
    plan = plan_graph(graph, CLUSTER, Mesh.of(tensor=2), Options(constraints={"into": {"tensor": factor}}))
    assert plan.buffers["last"].text == {"b": "S0", "n": "S2"}[factor]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for row in x:
        (name,) = (node.target for _, node in graph.of_kind("input"))
        step = run_step(graph, plan, lower(graph, plan), weights, buffers, {name: row}, backward=False)
        buffers.update(step.buffers)
        torch.testing.assert_close(step.outputs[0], model(row))
    torch.testing.assert_close(buffers["last"], model.last)


def test_in_training_a_written_buffer_stays_whole() -> None:
    tokens, at = prompt_of(WIDE, 10)
    plan = plan_graph(capture(made(WIDE), (tokens, at)).graph, CLUSTER, Mesh.of(tensor=2), Options(constraints=ROWS))
    assert {s.text for name, s in plan.buffers.items() if "cache" in name} == {"R"}


def test_a_plan_of_inference_says_so_and_has_nothing_of_training(tmp_path: Any) -> None:
    model, tokens_at = made(WIDE), prompt_of(WIDE, 10)
    pm = autopar.parallelize(copy.deepcopy(model), 1, tokens_at, mode="inference")
    price = pm.plan.only().price
    assert (price.gradient_bytes, price.optimizer_bytes, price.activation_bytes) == (0, 0, 0)
    assert price.parameter_bytes == sum(p.nbytes for p in model.parameters())
    planfile.save(tmp_path / "plan.json", pm.plan, pm._autopar.captured.graph)
    again = autopar.parallelize(copy.deepcopy(model), 1, tokens_at, mode="inference", plan=tmp_path / "plan.json")
    assert again.plan.pins.mode == "inference"
    with pytest.raises(PlanError, match="made for inference, and mode is 'training'"):
        autopar.parallelize(copy.deepcopy(model), 1, tokens_at, plan=tmp_path / "plan.json")
    of_training = autopar.plan(model, "local-x1", tokens_at, mesh={"data": 1})
    with pytest.raises(PlanError, match="made for training, and mode is 'inference'"):
        autopar.parallelize(copy.deepcopy(model), 1, tokens_at, mode="inference", plan=of_training)
    frozen = copy.deepcopy(model).requires_grad_(False)
    of_frozen: Plan = autopar.plan(frozen, "local-x1", prompt_of(WIDE, 1), mesh={"data": 1})  # one token decides
    pm = autopar.parallelize(copy.deepcopy(model), 1, tokens_at, mode="inference", plan=of_frozen)
    assert pm.plan.pins.mode == "inference"


@pytest.mark.parametrize("slices", [False, True])
def test_what_a_plan_of_inference_claims(slices: bool) -> None:
    sizes = replace(WIDE, slices=slices, kv_heads=2, length=256)
    for graph in _graphs(sizes)[1:]:
        for cuts in (HEADS, ROWS):
            plan = plan_graph(graph, CLUSTER, Mesh.of(tensor=2), Options(constraints=cuts))
            report = check(plan, graph, CLUSTER, types=True)
            assert report.ok, report.failures
            caches = 2 * sizes.layers * sizes.batch * sizes.kv_heads * sizes.length * (sizes.dim // sizes.heads) * 8
            rest = sum(n.out.n_bytes for _, n in graph.of_kind("buffer") if "cache" not in n.target)
            assert plan.price.buffer_bytes == caches // 2 + rest
            counted = peak_of(plan, graph).n_bytes
            assert abs(plan.price.memory_bytes - counted) < 0.05 * counted


def test_the_largest_batch_that_fits_runs_and_one_quarter_more_does_not() -> None:
    def graph_of(batch: int) -> Graph:
        sizes = Sizes(batch=batch, length=512, layers=1)
        with torch.device("meta"):
            model = CachedDecoder(sizes).eval().requires_grad_(False)
            tokens, at = torch.zeros(batch, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        return capture(model, (tokens, at)).graph

    mesh = Mesh.of(tensor=2)
    fits, more = graph_of(16), graph_of(20)
    of_rows = Options(constraints={"blocks.*.attention.*": {"tensor": "b"}})
    limit = plan_graph(fits, CLUSTER, mesh, of_rows).price.memory_bytes
    plan = plan_graph(fits, CLUSTER, mesh, Options(memory_limit_bytes=limit))
    assert peak_of(plan, fits).n_bytes <= limit
    with pytest.raises(InfeasibleError, match="no plan fits"):
        plan_graph(more, CLUSTER, mesh, Options(memory_limit_bytes=limit))
    assert peak_of(plan_graph(more, CLUSTER, mesh, of_rows), more).n_bytes > limit


def test_a_limit_cuts_what_would_be_whole() -> None:
    sizes = Sizes(length=2048, layers=1, kv_heads=2)
    decode = _graphs(sizes)[2]
    whole = {"*": {"tensor": "replicate"}}
    free = plan_graph(decode, CLUSTER, Mesh.of(tensor=2), Options(constraints=whole))
    assert {s.text for name, s in free.buffers.items() if "cache" in name} == {"R"}
    limit = free.price.memory_bytes * 0.7
    tight = plan_graph(decode, CLUSTER, Mesh.of(tensor=2), Options(memory_limit_bytes=limit))
    assert all(s.is_cut for name, s in tight.buffers.items() if "cache" in name)
    assert peak_of(tight, decode).n_bytes <= limit


def test_a_cache_is_written_where_it_lies() -> None:
    model, _, decode = _graphs(WIDE)
    assert {n.target for n in decode.nodes if "index_copy" in n.target} == {"aten.index_copy_.default"}
    trained = capture(made(WIDE), prompt_of(WIDE, 1)).graph
    assert {n.target for n in trained.nodes if "index_copy" in n.target} == {"aten.index_copy.default"}
    assert not outliving(decode), "no copies of caches are made for a call"
    pm = autopar.parallelize(model, 1, prompt_of(WIDE, 1), mode="inference")
    before = {name: b.data_ptr() for name, b in pm.named_buffers()}
    pm(*prompt_of(WIDE, 1))
    assert before == {name: b.data_ptr() for name, b in pm.named_buffers()}


class ReadsOld(nn.Module):
    """Writes to its buffer and returns what was there before, and swaps two others."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 8)
        for name in ("seen", "now", "last"):
            self.register_buffer(name, torch.zeros(4, 8))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old = self.seen.sum(0)
        self.seen.index_copy_(0, at, self.into(x))
        self.last.copy_(self.now)
        self.now.index_copy_(0, at, x)
        return old, self.last * 1.0


def test_old_values_that_are_read_are_not_overwritten() -> None:
    torch.manual_seed(0)
    model = ReadsOld().double()
    alone, at = copy.deepcopy(model), torch.tensor([1])
    pm = autopar.parallelize(model, 1, (torch.randn(1, 8, dtype=torch.float64), at), mode="inference")
    for i in range(4):
        x, at = torch.randn(1, 8, dtype=torch.float64), torch.tensor([i % 3])
        for mine, theirs in zip(pm(x, at), alone(x, at), strict=True):
            torch.testing.assert_close(mine, theirs)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(dict(pm.named_buffers())[name], buffer)


@pytest.mark.parametrize(("options", "said"), [
    ({"mode": "serving"}, "mode is 'serving'; give 'training' or 'inference'"),
    ({"microbatches": 2}, "takes no microbatches=2: leave it out"),
    ({"optimizer": "sgd", "recompute": ["blocks.*"]}, r"takes no recompute=\['blocks.\*'\], optimizer='sgd'"),
    ({"gradient_dtype": torch.float32}, "takes no gradient_dtype=torch.float32"),
])  # fmt: skip
def test_options_of_training_are_refused(options: dict[str, Any], said: str) -> None:
    model = made(Sizes()).train()
    with pytest.raises(AutoparError, match=said):
        autopar.parallelize(model, 1, prompt_of(Sizes(), 10), **{"mode": "inference", **options})
    assert model.training and all(param.requires_grad for param in model.parameters()), "the model is as it was"


def test_what_wants_gradients_is_refused() -> None:
    tokens, at = prompt_of(Sizes(), 10)
    pm = autopar.parallelize(made(Sizes()), 1, (tokens, at), mode="inference")
    alone = "mode='inference', which runs forward alone"
    with pytest.raises(RunError, match=alone):
        pm.train()
    assert not pm.training
    with pytest.raises(RunError, match=alone):
        pm.train_step(tokens, at)
    assert not pm(tokens, at).requires_grad
    pm.head.weight.requires_grad_(True)
    with pytest.raises(RunError, match=r"parameter 'head\.weight' requires grad"):
        pm(tokens, at)
    pm.head.weight.requires_grad_(False)
    weights = autopar.parallelize(nn.Linear(4, 4), 1, torch.randn(2, 4), mode="inference")
    with pytest.raises(RunError, match=r"input .* requires grad"):
        weights(torch.randn(2, 4, requires_grad=True))


def test_persistent_caches_are_saved_and_others_not() -> None:
    pm = autopar.parallelize(Window().eval(), 1, torch.randn(4, 8), mode="inference")
    pm(torch.randn(4, 8))
    assert pm.state_dict()["last"].abs().sum() > 0
