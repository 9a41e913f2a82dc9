"""No pinned problem has a better plan than the free one: neither what pins leave nor what they say makes it slower."""

from __future__ import annotations

from functools import cache
from typing import Any

import meta_models
import pytest
import torch
from unit.test_portfolio import benchmark

from autopar.errors import InfeasibleError
from autopar.planner.inter_op.candidates import PipelineOptions
from autopar.planner.inter_op.stage_pins import starts_of
from autopar.planner.inter_op.stage_search import plan_pipeline
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.plans.prices import bytes_together
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

SEQUENCE, ROWS = 1024, 8
COLUMNS, ROWS_OF = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
MEGATRON = {
    f"*{name}:*": {"data": "b", "tensor": factor}
    for names, factor in ((COLUMNS, "n"), (ROWS_OF, "k")) for name in names
}  # fmt: skip
"""Tensor parallelism as in Megatron: cut by columns, then by rows."""


@cache
def llama() -> Graph:
    """A Llama of four layers, whose activations are many for its few words."""
    return meta_models.llama(
        ROWS, SEQUENCE, torch.bfloat16, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, vocab_size=1024,
        max_position_embeddings=SEQUENCE,
    )  # fmt: skip


@cache
def gpt2() -> Graph:
    """A GPT-2 of eight blocks with many words."""
    return meta_models.gpt2(2, SEQUENCE, torch.bfloat16, vocab_size=51200, n_embd=512, n_layer=8, n_head=8)


@pytest.mark.parametrize("recompute", [(), ("model.layers.*",)])
def test_the_residual_is_a_piece_where_that_is_better(recompute: tuple[str, ...]) -> None:
    """The additions of a residual were decided with the pending sums before them, where those were pinned, and so were
    whole on every rank of tensor parallelism."""
    mesh, cluster = Mesh.of(data=2, tensor=4), load_cluster("dgx-h100")
    pieces = {**MEGATRON, "model.layers.*:add*": {"tensor": "s"}}
    asked = Options(constraints=pieces, recompute=recompute, may_recompute=False)
    pinned = plan_graph(llama(), cluster, mesh, asked)
    limit = 1.02 * pinned.price.memory_bytes
    free = plan_graph(
        llama(), cluster, mesh,
        Options(constraints=MEGATRON, recompute=recompute, may_recompute=False, memory_limit_bytes=limit),
    )  # fmt: skip
    assert free.price.memory_bytes <= limit
    assert free.price.seconds <= 1.01 * pinned.price.seconds


@pytest.mark.parametrize("make, limit", [(llama, None), (llama, 0.75), (gpt2, 0.93)])
def test_no_random_pins_have_a_better_plan(make: Any, limit: float | None) -> None:
    pins, mesh, cluster = benchmark("pins"), Mesh.of(data=2, tensor=2), load_cluster("dgx-h100")
    most = plan_graph(make(), cluster, mesh, Options(memory_limit_bytes=pins.PLENTY)).price.memory_bytes
    found = pins.compare(make(), cluster, mesh, limit and limit * most, 6)
    assert found.seconds < float("inf") and found.behind == []
    assert found.searched + found.slower >= 3, "most pins can be"
    assert limit is not None or found.fastest >= found.seconds * (1 - 1e-6)


def cut_by_hand(limit: float) -> Any:
    """The plan of GPT-2 in four given stages on two groups, and what each group's fullest device has."""
    graph = gpt2()
    starts = starts_of(graph, [f"transformer.h.{k}" for k in (2, 4, 6)])
    asked = PipelineOptions(
        8, groups=2, mesh=Mesh.of(tensor=2), starts=starts, schedules=("interleaved-1f1b:2",), may_recompute=False,
        options=Options(memory_limit_bytes=limit),
    )  # fmt: skip
    plan = plan_pipeline(graph, load_cluster("dgx-h100"), 4, asked).plan
    return plan, [bytes_together([plan.stages[s].price for s in of]) for of in plan.schedule.stages_of_rank]


def test_stages_of_given_cuts_share_memory_by_need() -> None:
    """Each had an equal part of its group's: too little for the stage with the words, though the other had plenty."""
    free, needed = cut_by_hand(1e15)
    sharing = free.schedule.stages_of_rank[1]
    largest = max(free.stages[s].price.memory_bytes for s in sharing)
    assert 2 * largest > 1.2 * max(needed), "equal parts are too little"
    fitting, _ = cut_by_hand(1.01 * max(needed))
    assert fitting.seconds == pytest.approx(free.seconds)
    with pytest.raises(InfeasibleError, match=r"shares .* the others of its group"):
        cut_by_hand(0.1 * max(needed))
