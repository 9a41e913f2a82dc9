"""Activation checkpointing inside a model is ``recompute`` in its plan: the same numbers, and less kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager import train_eager
from kept import kept_bytes
from procs.in_turn import marked
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from autopar import planfile
from autopar.capture import Captured, capture
from autopar.certificate import check
from autopar.comparison import program_vs_eager as V
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.memory.recompute import segments_of
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.plan_completion import complete
from autopar.planner.intra_op.random_plans import random_plan
from autopar.plans.memory_decisions import memory
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.stage_graphs import cut
from autopar.rules.registry import rules_of
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

MESH = Mesh.of(data=2)
CLUSTER = load_cluster("dgx-h100")
Run = Callable[..., Any]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Three blocks; ``run`` runs one of them."""

    def __init__(self, run: Run = lambda f, x: f(x), dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.run = run

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x))).pow(2).mean()


class Sequence(Net):
    def body(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(nn.Sequential(*self.blocks), 3, x, use_reentrant=False)


class Wrapped(Net):
    def __init__(self, how: CheckpointImpl, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.blocks = nn.ModuleList(checkpoint_wrapper(b, how) for b in self.blocks)


def nothing(*_: Any, **__: Any) -> Any:
    return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def nested(block: nn.Module, x: Tensor) -> Tensor:
    inner = functools.partial(checkpoint, block, use_reentrant=False)
    return checkpoint(lambda y: inner(y), x, use_reentrant=False)


CASES: dict[str, Callable[..., nn.Module]] = {
    "plain": functools.partial(Net, functools.partial(checkpoint, use_reentrant=False)),
    "reentrant": functools.partial(Net, functools.partial(checkpoint, use_reentrant=True)),
    "arguments": functools.partial(Net, lambda f, x: checkpoint(f, x, scale=0.5, use_reentrant=False)),
    "selective": functools.partial(Net, lambda f, x: checkpoint(
        f, x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, nothing))),
    "inside another": functools.partial(Net, nested),
    "in sequence": Sequence,
    "wrapped": functools.partial(Wrapped, CheckpointImpl.NO_REENTRANT),
    "wrapped, reentrant": functools.partial(Wrapped, CheckpointImpl.REENTRANT),
}  # fmt: skip


def captured_of(model: nn.Module) -> tuple[Captured, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    captured = capture(model, (x,))
    weights, buffers = V.state_of(captured, model)
    return captured, V.doubled(weights), V.doubled(buffers), V.doubled({"x": x})


def alone(captured: Captured, again: tuple[tuple[str, str], ...]) -> StagePlan:
    return complete(
        captured.graph, rules_of(captured.graph), pricer(CLUSTER, Mesh.of(one=1)), {}, {}, {},
        memory=memory(recompute=again),
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", marked(CASES, ("reentrant", "arguments", "in sequence", "wrapped"))
)
def test_regions_run_again(name: str) -> None:
    torch.manual_seed(0)
    captured, weights, buffers, inputs = captured_of(CASES[name]())
    rules = rules_of(captured.graph)
    again = segments_of(captured.graph, rules, ())
    modules = {n.name: n.module for n in captured.graph.nodes}
    count = 2 if name == "in sequence" else 3  # torch never runs the last of a sequence again
    assert [modules[first].rsplit(".", 1)[-1] for first, _ in again] == ["norm"] * count
    double = V.promoted(captured)
    values = {**weights, **buffers, **inputs}
    kept = [kept_bytes(double, alone(double, segments), values) for segments in ((), again)]
    assert kept[1] < 0.65 * kept[0]
    assert plan_graph(captured.graph, CLUSTER, MESH).recompute == again
    reference = V.train(double, V.one_device(double.graph), weights, buffers, inputs)
    plan = random_plan(double.graph, rules, pricer(CLUSTER, MESH), 0, recompute=again)
    assert V.compare(name, V.train(double, plan, weights, buffers, inputs), reference).worst < 1e-9
    assert check(plan, double.graph, CLUSTER).ok


@pytest.mark.slow
def test_as_in_eager_mode() -> None:
    """Gradients of the model itself, checkpointing and all; where eager mode has none, there are none."""
    for name in CASES:
        torch.manual_seed(0)
        model = CASES[name]().double()
        x = torch.randn(4, 16, dtype=torch.float64)
        captured = capture(model, (x,))
        weights, buffers = V.state_of(captured, model)
        plan = alone(captured, segments_of(captured.graph, rules_of(captured.graph), ()))
        mine = V.train(captured, plan, weights, buffers, {"x": x})
        assert V.compare(name, mine, train_eager(captured, model, (x,), {})).worst < 1e-9, name


def test_dropout_is_drawn_again() -> None:
    torch.manual_seed(0)
    captured, *state = captured_of(CASES["plain"](dropout=0.3))
    double = V.promoted(captured)
    rules = rules_of(double.graph)
    again = segments_of(double.graph, rules, ())
    reference = V.train(double, V.one_device(double.graph), *state)
    for seed in range(2):
        plan = random_plan(double.graph, rules, pricer(CLUSTER, MESH), seed, recompute=again)
        assert V.compare(str(seed), V.train(double, plan, *state), reference).worst < 1e-9


def test_reentrant_without_a_gradient_coming_in() -> None:
    """As in eager mode the parameters inside get none, and that is told."""

    class First(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(x) + checkpoint(self.blocks[0], x, use_reentrant=True)).pow(2).mean()

    model, x = First().double(), torch.randn(4, 16, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"use_reentrant=True in '<model>' at test_checkpointing.py:\d+: none of its"):
        captured = capture(model, (x,))
    weights, buffers = V.state_of(captured, model)
    mine = V.train(captured, V.one_device(captured.graph), weights, buffers, {"x": x})
    assert set(mine.gradients) == {"first.weight", "first.bias", "head.weight", "head.bias"}
    assert V.compare("", mine, train_eager(captured, model, (x,), {})).worst < 1e-9


def test_users_patterns_are_added() -> None:
    class Half(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            x = checkpoint(self.blocks[1].norm, x, use_reentrant=False)
            return checkpoint(self.blocks[2], x, use_reentrant=False)

    graph = captured_of(Half())[0].graph
    modules = {n.name: n.module for n in graph.nodes}

    def found(*patterns: str) -> list[str]:
        again = plan_graph(graph, CLUSTER, MESH, Options(recompute=patterns)).recompute
        return [f"{modules[first]} to {modules[last]}" for first, last in again]

    own = ["blocks.1.norm to blocks.1.norm", "blocks.2.norm to blocks.2.down"]
    assert found() == own
    assert found("blocks.0") == ["blocks.0.norm to blocks.0.down", *own]
    assert found("*.norm") == ["blocks.0.norm to blocks.0.norm", *own]
    assert found("blocks") == ["blocks.0.norm to blocks.2.down"]


def test_in_a_plan_file_and_in_eval_mode(tmp_path: Any) -> None:
    model = CASES["plain"]()
    captured = captured_of(model)[0]
    plan = plan_graph(captured.graph, CLUSTER, MESH)
    assert len(plan.recompute) == 3
    read = planfile.loads(planfile.dumps(Plan.alone(plan, "dgx-h100"), captured.graph, None), captured.graph)
    assert read.recompute == plan.recompute
    with torch.no_grad():
        assert not plan_graph(captured_of(model)[0].graph, CLUSTER, MESH).recompute


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers(reentrant: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, use_cache=False)  # fmt: skip
        return LlamaForCausalLM(config).train()

    model, ids = make(), torch.arange(16).view(2, 8)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    captured = capture(model, (), {"input_ids": ids, "labels": ids})
    rules = rules_of(captured.graph)
    again = segments_of(captured.graph, rules, ())
    assert again == segments_of(
        capture(make(), (), {"input_ids": ids, "labels": ids}).graph, rules, ["model.layers.*"]
    )  # fmt: skip
    double = V.promoted(captured)
    weights, buffers = V.state_of(captured, model)
    state = V.doubled(weights), V.doubled(buffers), V.inputs_of(captured, (), {"input_ids": ids, "labels": ids})
    reference = V.train(double, V.one_device(double.graph), *state)
    plan = random_plan(double.graph, rules, pricer(CLUSTER, MESH), 1, recompute=again)
    assert V.compare("", V.train(double, plan, *state), reference).worst < 1e-9


def test_in_a_pipeline() -> None:
    """Stages run again what they have of the regions, wherever the cut is, and nothing else."""
    captured = captured_of(CASES["plain"]())[0]
    graph = captured.graph
    inner = next(n.name for n in graph.nodes if n.module == "blocks.1.up" and n.kind == "op")
    first, second = cut(graph, [inner])
    assert len(segments_of(first.graph, rules_of(first.graph), ())) == 2
    assert len(segments_of(second.graph, rules_of(second.graph), ())) == 2
    cluster = load_cluster("local-x4")
    asked = PipelineOptions(2, 2, ("1f1b",), options=Options(memory_limit_bytes=2**30))
    plan = plan_pipeline(graph, cluster, 4, asked).plan
    assert sum(len(stage.recompute) for stage in plan.stages) >= 3
