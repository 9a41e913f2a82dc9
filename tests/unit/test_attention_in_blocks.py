"""Attention with dropout in blocks of queries: the numbers of the call at once, in memory without queries by keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import CASES, SEED, P, attend, both, inputs
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.rules.attention import attention_in_blocks
from autopar.rules.families.sharded_random import bits, threshold_of
from autopar.rules.operator_call import Call, In
from autopar.rules.proving.proof import Case, prove, strategies_of
from autopar.rules.registry import SAMPLES, rule_for
from autopar.rules.saved_tensors import LocalLayout, contiguous, saved_by
from autopar.rules.working_memory import needs_of
from autopar.words.graph import Spec
from autopar.words.meshes import Mesh


def blocks_of(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_in_blocks, "FEWEST_SCORES", 0)
    monkeypatch.setattr(attention_in_blocks, "QUERIES", queries)


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_the_call_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, causal = inputs(name), CASES[name][-1]
    expected = both(tensors, causal)
    for queries in (1, 7, 8):
        blocks_of(queries, monkeypatch)
        mine = both(tensors, causal)
        assert type(attend(tensors, causal).grad_fn).__name__ == "_InBlocksBackward"
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_it_drops_what_torch_would_drop_with_that_mask() -> None:
    """Against torch's own attention, written out with the bits of the mask alone."""
    q, k, v, _ = inputs("plain")
    size = (*q.shape[:-1], k.shape[-2])
    kept = bits(SEED, 5, size, ((),) * len(size), q.device) < threshold_of(P)
    expected = (torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) * kept) @ v / (1 - P)
    torch.testing.assert_close(attend([q, k, v, None], False), expected, rtol=1e-11, atol=1e-12)
    assert abs(float(kept.double().mean()) - (1 - P)) < 0.02


def test_gradients_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def second() -> list[torch.Tensor]:
        q, k, v, _ = inputs("shared keys")
        (of_q,) = torch.autograd.grad(attend([q, k, v, None], False).square().sum(), q, create_graph=True)
        return list(torch.autograd.grad(of_q.square().sum(), (q, k, v)))

    expected = second()
    blocks_of(8, monkeypatch)
    for a, b in zip(second(), expected, strict=True):
        torch.testing.assert_close(a, b)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_has_queries_by_keys(causal: bool) -> None:
    """At the sizes that are used; what a block has is the most that there is."""
    n, tensors = 1536, [torch.randn(1, 2, 1536, 4, requires_grad=True) for _ in range(3)]
    with Largest() as most:
        both([*tensors, None], causal)
    assert most.elements <= 2 * attention_in_blocks.QUERIES * n < 2 * n * n / 10


@pytest.mark.parametrize("name", ["causal", "shared keys", "booleans of keys", "a trained mask"])
def test_compiled_it_is_an_operator_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program calls it that is compiled as a whole: one graph, the same numbers, and nothing of queries by keys is
    kept or made in it."""
    blocks_of(7, monkeypatch)
    tensors, causal = inputs(name), CASES[name][-1]
    expected = both(tensors, causal)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    called = torch.compiler.allow_in_graph(lambda *tensors: attend([*tensors, None][:4], causal))
    run = torch.compile(lambda *tensors: called(*tensors), backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    given = [x for x in tensors if x is not None]
    y = run(*given)
    leaves = [x for x in given if x.requires_grad]
    gradients = torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    for a, b in zip([y, *gradients], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    forward, backward = graphs
    own = torch.ops.autopar
    for graph, op in ((forward, own.attention_in_blocks), (backward, own.attention_in_blocks_backward)):
        assert [n for n in graph.graph.nodes if n.target is op.default]
        assert not [n for n in graph.graph.nodes if "softmax" in str(n.target) or "mm" in str(n.target)]


def test_short_calls_go_at_once() -> None:
    assert type(attend(inputs("plain"), False).grad_fn).__name__ != "_InBlocksBackward"


@pytest.mark.parametrize(
    "mesh", [Mesh.of(data=2), pytest.param(Mesh.of(data=2, tensor=2), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("number", [-2, -1])
def test_every_cut_gives_the_same_numbers(number: int, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward on all ranks, in blocks of two queries."""
    blocks_of(2, monkeypatch)
    monkeypatch.setattr(attention_in_blocks, "MOST_BLOCKS", 1 << 20)
    case = Case(TARGET, SAMPLES[TARGET][number])
    for picked in strategies_of(case, mesh):
        prove(case, picked, mesh)


TARGET = "aten.scaled_dot_product_attention.default"


def test_the_ledger_counts_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept, and what is needed besides: of a call as it is made, so in blocks where it goes in blocks."""
    heads, n, d = 2, 1536, 8
    spec = Spec((1, heads, n, d), "float32")
    args = (In(0), In(1), In(2), None, 0.1, True)
    call = Call(TARGET, args, {}, (spec, spec, spec), (spec,))
    layouts = [LocalLayout(spec.shape, contiguous(spec.shape), spec.dtype, True)] * 3
    found = []
    for fewest in (0, 1 << 60):
        monkeypatch.setattr(attention_in_blocks, "FEWEST_SCORES", fewest)
        for module in ("saved_tensors", "working_memory"):
            monkeypatch.setattr(f"autopar.rules.{module}._known", {})
        monkeypatch.setattr("autopar.rules.saved_tensors._trials", {})
        rule = rule_for(call)
        found.append((saved_by(call, rule, (), Mesh(), layouts), needs_of(call, rule, (), Mesh(), layouts)))
    (kept, needs), (kept_at_once, needs_at_once) = found
    assert kept.ins == (0, 1, 2) and kept.inside_bytes <= 8 * (heads * n + n)
    assert kept_at_once.inside_bytes >= 4 * heads * n * n
    assert 4 * needs.backward_bytes < needs_at_once.backward_bytes
    assert 4 * needs.forward_bytes < needs_at_once.forward_bytes
