"""Trials of one rank's call: what is tried once serves wherever the same pieces come up, a ring is tried in part."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.certificate import check
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.rules import saved_tensors, working_memory
from autopar.rules.attention import ring_attention
from autopar.rules.local_calls import local_call
from autopar.rules.operator_call import call_of
from autopar.rules.proving.proof import Case, strategies_of
from autopar.rules.registry import SAMPLES, rules_of
from autopar.rules.saved_tensors import LocalLayout, Saved, contiguous, saved_by
from autopar.rules.strategy import grads_of, strategy_named
from autopar.rules.working_memory import Needs, needs_of
from autopar.torch_private import FakeTensorMode
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import local_shape
from hardware_profiles import load_cluster


class Attention(nn.Module):
    """Attention whose three inputs have gradients."""

    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.causal, self.dropout = causal, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x * self.weight, x + self.weight, x - self.weight
        return nn.functional.scaled_dot_product_attention(q, k, v, None, self.dropout, self.causal).sum()


def graph_of(causal: bool, rows: int = 2, dropout: float = 0.0, length: int = 64) -> Graph:
    with torch.device("meta"):
        return capture(Attention(causal, dropout), (torch.zeros(rows, 2, length, 4),)).graph


def observed(graph: Graph, target: str, mesh: Mesh, names: tuple[str, ...]) -> tuple[Saved, Needs]:
    """What is kept of a call, and what it needs, on one rank."""
    rules = rules_of(graph)
    i = next(i for i, node in enumerate(graph.nodes) if node.target == target)
    node, rule = graph.nodes[i], rules[i]
    assert rule is not None
    strategy = strategy_named(graph, node, rule, [rule.cuttable[0] if name == ROWS else name for name in names])
    grads, _ = grads_of(graph, node)
    ins = []
    for ref, state, grad in zip(node.refs, strategy.ins, grads, strict=True):
        spec = graph.spec(ref)
        shape = local_shape(spec.shape, state, mesh)
        ins.append(LocalLayout(shape, contiguous(shape), spec.dtype, grad))
    asked = call_of(node, graph.spec), rule, strategy.options, mesh, ins
    return saved_by(*asked), needs_of(*asked)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (saved_tensors, working_memory):
        monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(saved_tensors, "_trials", {})


ROWS = "the batch"
MESH_OF_FOUR = Mesh.of(data=2, tensor=2)
ATTENTION, PRODUCT = "aten.scaled_dot_product_attention.default", "aten.mul.Tensor"


@pytest.mark.parametrize(("causal", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.1)])
@pytest.mark.parametrize(
    ("mesh", "names"), [(Mesh.of(data=8), ("ring",)), (Mesh.of(data=8, tensor=2), ("ring", "q"))]
)
def test_a_ring_needs_what_its_first_steps_need(
    causal: bool, dropout: float, mesh: Mesh, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(causal, dropout=dropout)
    forget(monkeypatch)
    monkeypatch.setattr(ring_attention, "TRIED_STEPS", 8)
    of_all_steps = observed(graph, ATTENTION, mesh, names)
    forget(monkeypatch)
    monkeypatch.undo()
    forget(monkeypatch)
    assert ring_attention.TRIED_STEPS < 8
    assert observed(graph, ATTENTION, mesh, names) == of_all_steps


@pytest.mark.parametrize(
    ("causal", "mesh", "ways"),
    [
        (False, Mesh.of(data=8), {"data": "ring"}),
        (True, Mesh.of(data=8), {"data": "ring"}),
        (True, Mesh.of(data=2), {"data": "ring"}),
        (True, Mesh.of(data=3), {"data": "ring"}),
        (True, Mesh.of(data=6, tensor=2), {"data": "ring", "tensor": "q"}),
    ],
)
def test_a_certificate_counts_the_steps_of_a_ring_that_it_does_not_make(
    causal: bool, mesh: Mesh, ways: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels and messages of all steps: what makes some of them says the same as what makes all."""
    graph, cluster = graph_of(causal, dropout=0.0, length=96), load_cluster("dgx-h100-x2")
    plan = plan_graph(graph, cluster, mesh, Options(constraints={"*:scaled_dot_product_attention": ways}))
    some = check(plan, graph, cluster)
    monkeypatch.setattr(ring_attention, "TRIED_STEPS", mesh.size_of["data"])
    every = check(plan, graph, cluster)
    assert some.failures == every.failures == []
    assert (some.kept_bytes, some.collectives) == (every.kept_bytes, every.collectives)
    assert some.price.compute_seconds == pytest.approx(every.price.compute_seconds, rel=1e-9)
    assert some.price.activation_seconds == pytest.approx(every.price.activation_seconds, rel=1e-9)
    assert every.collectives["data", "send_recv"] > 3 * (mesh.size_of["data"] - 1) - 1


def test_equal_pieces_of_different_meshes_and_batches_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    few = observed(graph_of(False, rows=4), PRODUCT, Mesh.of(data=2), (ROWS,))
    tried = len(saved_tensors._trials)
    many = observed(graph_of(False, rows=8), PRODUCT, Mesh.of(data=2, tensor=2), (ROWS, ROWS))
    assert many == few
    assert len(saved_tensors._trials) == tried
    other = observed(graph_of(False, rows=8), PRODUCT, Mesh.of(data=2), (ROWS,))
    assert other != few
    assert len(saved_tensors._trials) > tried


def test_equal_calls_of_different_graphs_have_one_rule() -> None:
    first, again, larger = (rules_of(graph_of(True, rows)) for rows in (2, 2, 4))
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert not any(a is b for a, b in zip(first, larger, strict=True) if a is not None and len(a.inputs) == 3)


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(saved_tensors.LOWERED_ALIKE))
def test_lowerings_are_tried_without_values_as_on_the_cpu(target: str) -> None:
    """What lowerings keep and need of operators that choose their kernel by the device."""
    tried = 0
    for number, (mesh, step) in product(range(len(SAMPLES[target])), ((Mesh.of(data=2), 1), (MESH_OF_FOUR, 7))):
        case = Case(target, SAMPLES[target][number])
        for options in strategies_of(case, mesh)[::step]:
            local = local_call(case.call, case.rule, options, mesh)
            if not local.distributed:
                continue
            ins = []
            for position, spec in enumerate(case.call.ins):
                shape = local_shape(spec.shape, State(option.ins[position] for option in options), mesh)
                grad = case.grads[position]
                ins.append(LocalLayout(shape, contiguous(shape), spec.dtype, grad))
            for observe in (saved_tensors._watched, working_memory._counting(())):
                with FakeTensorMode():
                    on_cpu = observe(local, ins, mesh.size_of, "cpu")
                assert observe(local, ins, mesh.size_of, "meta") == on_cpu
                tried += 1
    assert tried > 8
