"""The textbook layouts come out because they are cheapest: known answers of Alpa's own tests, and of Llama blocks.

Four devices with latency 0 and unit inverse bandwidth, compute free (contractions must be cut). Collectives are
counted by ``check`` in the emitted program, forward and backward; ``parameter ...`` are gradient synchronizations and
parameter gathers, of which all of one kind count as one, because they are combined in buckets. A sharded loss costs
one more all-reduce of a scalar, which Alpa does not count.
"""

from __future__ import annotations

from dataclasses import replace

import meta_models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture import capture
from autopar.certificate import Report, check
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.plans.plan import StagePlan
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from hardware_profiles import abstract_cluster, load_cluster

CONSTANTS = {"all_reduce": 0.01, "all_gather": 0.1, "reduce_scatter": 0.001, "all_to_all": 0.001}


class Mlp(nn.Module):
    def __init__(self, hidden: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        self.dropout = dropout

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < len(self.layers) - 1:
                x = F.dropout(F.relu(x), self.dropout)
        return F.mse_loss(x, y)


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm1, self.norm2, self.heads = nn.LayerNorm(hidden), nn.LayerNorm(hidden), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b s d] -> [b s d]
        b, s, d = x.shape
        q, k, v = (m(x).view(b, s, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = self.norm1(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d)))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class Bert(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def planned(  # type: ignore[no-untyped-def]
    model: nn.Module, *batch: torch.Tensor, mesh: dict[str, int], alpha: float = 0.0, beta: tuple = (1.0, 0.1),
    **options: object,
):  # fmt: skip
    graph = capture(model, batch).graph
    beta = beta[: len(mesh)]
    cluster = abstract_cluster(mesh, alpha=(alpha,) * len(mesh), beta=beta, constants=CONSTANTS)
    plan = plan_graph(graph, cluster, Mesh(mesh.items()), Options(**options))  # type: ignore[arg-type]
    report = check(plan, graph, cluster)
    assert report.ok, report.failures
    assert plan.solution is not None and plan.solution.gap < (0.01 if options else 1e-9)
    return graph, plan, report


def mlp(
    batch: int, hidden: int, layers: int = 6, dropout: float = 0.0, **rest: object
) -> tuple[Graph, StagePlan, Report]:
    x, y = torch.randn(batch, hidden), torch.randn(batch, hidden)
    return planned(Mlp(hidden, layers, dropout), x, y, **{"mesh": {"x": 4}, **rest})  # type: ignore[arg-type]


def cuts(graph: Graph, plan: StagePlan, target: str) -> list[tuple[str, ...]]:
    return [plan.ops[n.name] for n in graph.nodes if n.kind == "op" and n.target == target]


LINEAR = "aten.linear.default"


def test_large_batch_is_data_parallel() -> None:
    graph, plan, report = mlp(256, 32)
    assert cuts(graph, plan, LINEAR) == [("b",)] * 6
    assert {(c.stored, c.used) for c in plan.params.values()} == {(("I",), ("R",))}
    assert report.collectives == {("x", "parameter all_reduce"): 6, ("x", "all_reduce"): 1}  # the loss is the 1


def test_large_hidden_alternates_column_and_row() -> None:
    graph, plan, report = mlp(32, 256)
    assert cuts(graph, plan, LINEAR) == [("n",), ("k",)] * 3
    assert report.collectives == {("x", "all_reduce"): 5}  # 3 forward, 2 backward, no gradient synchronization


def test_both_at_once_on_two_axes() -> None:
    graph, plan, report = mlp(256, 32, mesh={"x": 2, "y": 2})
    assert cuts(graph, plan, LINEAR) == [("b", "n"), ("b", "k")] * 3
    assert report.collectives == {("y", "all_reduce"): 5, ("x", "parameter all_reduce"): 6, ("x", "all_reduce"): 1}


PARAMETER = [("x", "parameter reduce_scatter"), ("x", "parameter all_gather")]


@pytest.mark.parametrize("lifetime, gathers", [("step", 1), ("use", 2)])
def test_zero(lifetime: str, gathers: int) -> None:
    """ZeRO-2: one reduce-scatter and one all-gather; ZeRO-3: one and two; for each of the six parameters."""
    graph, plan, report = mlp(256, 32, params={"*": f"S0 {lifetime}"})
    assert cuts(graph, plan, LINEAR) == [("b",)] * 6
    assert {c.lifetime for c in plan.params.values()} == {lifetime}
    assert report.collectives == {("x", "all_reduce"): 1, **dict(zip(PARAMETER, (6, 6 * gathers), strict=True))}


def test_zero_comes_as_the_memory_limit_falls() -> None:
    """The fullest moment is the loss's backward: the first gradients are there then, no longer all activations."""
    graph, plain, _ = mlp(256, 32)
    p, pinned = plain.price, {"params": {"*": "S0 step"}}
    assert {c.stored for c in plain.params.values()} == {("I",)}
    one = p.parameter_bytes / 6
    sharded = mlp(256, 32, **pinned)[1].price.memory_bytes
    # room for so many gathered copies; ZeRO-3 keeps two for a while, the one in use and the one fetched ahead
    for room, gathered in ((6, 6), (5, 3), (4, 2), (3, 1), (2, 0)):
        limit = sharded - (6 - room - 0.01) * one
        _, plan, report = mlp(256, 32, memory_limit_bytes=limit, may_recompute=False)
        assert plan.price.memory_bytes <= limit
        assert cuts(graph, plan, LINEAR) == [("b",)] * 6
        assert {c.stored for c in plan.params.values()} == {("S0",)}
        assert sum(c.lifetime == "step" for c in plan.params.values()) == gathered
        assert [report.collectives[k] for k in PARAMETER] == [6, 6 + (6 - gathered)]


def test_both_at_once_with_sharded_state() -> None:
    """Reduce-scatters instead of the gradients' all-reduce: 5 all-reduces, a reduce-scatter, an all-gather a weight."""
    columns, rows = (
        {f"layers.{i}.weight": "S1,S0 step" for i in (0, 2, 4)},
        {f"layers.{i}.weight": "S0,S1 step" for i in (1, 3, 5)},
    )
    graph, plan, report = mlp(256, 32, mesh={"x": 2, "y": 2}, params={**columns, **rows})
    assert cuts(graph, plan, LINEAR) == [("b", "n"), ("b", "k")] * 3
    assert report.collectives == {
        ("y", "all_reduce"): 5, ("x", "all_reduce"): 1,
        ("x", "parameter reduce_scatter"): 6, ("x", "parameter all_gather"): 6,
    }  # fmt: skip


def test_dropout_costs_nothing() -> None:
    _, _, report = mlp(256, 32, dropout=0.1)
    assert report.collectives == {("x", "parameter all_reduce"): 6, ("x", "all_reduce"): 1}


def test_gather_costs_nothing() -> None:
    class Gather(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32, bias=False)

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self.inner(x).gather(1, index).square().mean()

    index = torch.randint(0, 32, (256, 8))
    _, _, report = planned(Gather(), torch.randn(256, 32), index, mesh={"x": 4})
    assert report.collectives == {("x", "parameter all_reduce"): 1, ("x", "all_reduce"): 1}


def test_argmax_elementwise_and_reshape_need_no_communication() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(144), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b 144] -> [b 8]
            return (x * self.scale).view(-1, 8, 18).exp().argmax(-1)

    _, _, report = planned(Head(), torch.randn(16, 144), mesh={"x": 4})
    assert not report.collectives


@pytest.mark.parametrize("layers", [2, 12])
def test_closed_forms(layers: int) -> None:
    # Alpa's numbers less 2 for every HLO parameter (a weight, an input) that is replicated: a constant by which its
    # solver breaks ties (playground/auto_sharding_solver/hlo.py, HloParameter), and no time
    all_reduce = lambda n_bytes: 1 + 1.5 * n_bytes + 0.01  # noqa: E731
    _, plan, _ = mlp(1024, 128, layers, alpha=1.0)
    loss = all_reduce(4)
    assert plan.price.seconds == pytest.approx(layers * all_reduce(128 * 128 * 4) + loss, abs=1e-3)
    assert layers * all_reduce(128 * 128 * 4) == pytest.approx({2: 196614.02 - 4, 12: 1179684.12 - 24}[layers])
    _, plan, _ = mlp(128, 1024, layers, alpha=1.0)
    assert plan.price.seconds == pytest.approx((layers - 1) * all_reduce(128 * 1024 * 4), abs=1e-3)
    assert plan.price.seconds == pytest.approx({2: 786437, 12: 8650767}[layers] - 4, abs=0.2)


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("sizes", [(4, 8), (8, 4)])
def test_closed_form_on_two_axes(layers: int, sizes: tuple[int, int]) -> None:
    """Data parallel over the slow axis and column/row over the fast one (Alpa's ``test_mlp_n_layer_2d_parallel``)."""
    x, y = sizes
    all_reduce = lambda n_bytes, n, beta: 1 + beta * 2 * (n - 1) / n * n_bytes + 0.01  # noqa: E731
    _, plan, _ = mlp(1024, 128, layers, alpha=1.0, beta=(1.0, 0.01), mesh={"x": x, "y": y})
    gradients = layers * all_reduce(128 * 128 * 4 / y, x, 1.0)
    activations = (layers - 1) * all_reduce(1024 * 128 * 4 / x, y, 0.01)
    assert plan.price.seconds == pytest.approx(gradients + activations + all_reduce(4, x, 1.0), abs=1e-3)


def test_bert_with_a_large_batch_is_data_parallel() -> None:
    graph, plan, report = planned(Bert(32, 8), torch.randn(64, 64, 32), torch.randn(64, 64, 32), mesh={"x": 4})
    assert set(cuts(graph, plan, LINEAR)) == {("b",)}
    assert report.collectives["x", "all_reduce"] == 1


def test_bert_with_a_small_batch_is_megatron() -> None:
    graph, plan, report = planned(Bert(128, 8), torch.randn(8, 8, 128), torch.randn(8, 8, 128), mesh={"x": 4})
    one = [("n",)] * 3 + [("k",), ("n",), ("k",)]  # q, k, v by columns, out by rows, fc1 by columns, fc2 by rows
    assert cuts(graph, plan, LINEAR) == one * 2
    assert cuts(graph, plan, "aten.scaled_dot_product_attention.default") == [("h",)] * 2
    assert report.collectives == {("x", "all_reduce"): 7}  # 4 layers - 1


def test_bert_that_is_recomputed_makes_its_forward_collectives_again() -> None:
    """Alpa's 11 all-reduces: 7, and the 4 of the forward once more."""
    batch = torch.randn(8, 8, 128), torch.randn(8, 8, 128)
    whole = {"layers.*.norm*": {"x": "replicate"}}
    graph, plan, report = planned(
        Bert(128, 8), *batch, mesh={"x": 4}, recompute=("layers.*",), constraints=whole, memory_gap=0.0
    )
    assert len(plan.recompute) == 2
    one = [("n",)] * 3 + [("k",), ("n",), ("k",)]
    assert cuts(graph, plan, LINEAR) == one * 2
    assert cuts(graph, plan, ATTENTION) == [("h",)] * 2
    assert report.collectives == {("x", "all_reduce"): 11}
    _, plain, _ = planned(Bert(128, 8), *batch, mesh={"x": 4})
    assert plan.price.activation_bytes < 0.6 * plain.price.activation_bytes
    # free to choose, half an all-reduce less: the last layer ends with a reduce-scatter, which is made twice, and the
    # all-gather of its gradient, which is not
    _, free, report = planned(Bert(128, 8), *batch, mesh={"x": 4}, recompute=("layers.*",))
    assert report.collectives["x", "all_reduce"] == 10
    assert report.collectives["x", "reduce_scatter"] == 2 and report.collectives["x", "all_gather"] == 1
    assert free.price.seconds < plan.price.seconds


# -- Llama


def llama(batch: int, seq: int, hidden: int, **rest: object) -> tuple[Graph, StagePlan]:
    graph = meta_models.llama(
        batch, seq, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=2, num_key_value_heads=4,
        vocab_size=512, max_position_embeddings=seq,
    )  # fmt: skip
    cluster = abstract_cluster({"x": 4}, alpha=(0.0,), beta=(1.0,), constants=CONSTANTS)
    return graph, plan_graph(graph, cluster, Mesh.of(x=4), Options(**rest))  # type: ignore[arg-type]


ATTENTION = "aten.scaled_dot_product_attention.default"


def test_llama_with_few_tokens_cuts_heads_and_vocabulary() -> None:
    graph, plan = llama(2, 16, 128)
    assert set(cuts(graph, plan, ATTENTION)) == {("g",)}
    assert cuts(graph, plan, LINEAR) == [*([("n",)] * 3 + [("k",), ("n",), ("n",), ("k",)]) * 2, ("n",)]
    assert cuts(graph, plan, "aten.cross_entropy_loss.default") == [("v",)]


def llama_8b(seq: int, hides: bool = True, **rest: object) -> tuple[Graph, StagePlan]:
    """Two layers of the shape of Llama-3-8B, batch 1, on the eight H100 of one node."""
    graph = meta_models.llama(
        1, seq, torch.bfloat16, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        vocab_size=128256, max_position_embeddings=seq,
    )  # fmt: skip
    cluster = replace(load_cluster("dgx-h100"), overlap=hides)
    return graph, plan_graph(graph, cluster, Mesh.of(tensor=8), Options(**rest))  # type: ignore[arg-type]


def test_llama_8b_on_one_node_is_megatron_with_sequence_parallelism() -> None:
    """Where reductions of gradients are waited for. Beside a backward, those of a weight that every rank has whole cost
    less than collectives of activations, which nothing hides."""
    graph, plan = llama_8b(1024, hides=False)
    assert llama_8b(1024)[1].price.seconds < plan.price.seconds
    assert cuts(graph, plan, LINEAR) == [*([("n",)] * 3 + [("k",), ("n",), ("n",), ("k",)]) * 2, ("n",)]
    assert cuts(graph, plan, ATTENTION) == [("g",)] * 2
    assert set(cuts(graph, plan, "aten.rsqrt.default")) == {("s",)}
    assert cuts(graph, plan, "aten.cross_entropy_loss.default") == [("v",)]


def test_llama_is_sequence_parallel_when_activations_bind() -> None:
    """128 tokens: latency makes whole norms and all-reduces cheapest, until activations must shrink."""
    many = {"microbatches": 32, "in_flight": 32}  # of one, activations are less than what Adam makes of the embedding
    graph, free = llama_8b(128, **many)
    assert set(cuts(graph, free, "aten.rsqrt.default")) == {("I",)}
    limit = free.price.memory_bytes - 0.3 * free.price.activation_bytes
    graph, tight = llama_8b(128, memory_limit_bytes=limit, **many)
    assert set(cuts(graph, tight, "aten.rsqrt.default")) == {("s",)}
    for plan in (free, tight):  # Megatron's cuts in both
        assert cuts(graph, plan, LINEAR) == [*([("n",)] * 3 + [("k",), ("n",), ("n",), ("k",)]) * 2, ("n",)]
        assert cuts(graph, plan, ATTENTION) == [("g",)] * 2
    assert tight.price.memory_bytes <= limit and tight.price.seconds > free.price.seconds


def test_llama_8b_with_a_long_sequence_is_ulysses() -> None:
    graph, plan = llama_8b(65536)
    assert set(cuts(graph, plan, LINEAR)[:-1]) == {("s",)}
    assert cuts(graph, plan, ATTENTION) == [("g",)] * 2
    swaps = [s for steps in plan.reshard_paths.values() for s in steps if s[0][0][0] == s[1][0][0] == "S"]
    assert len(swaps) >= 2 * 4, "q, k, v and the output of every layer change hands"


def test_llama_with_many_tokens_is_data_parallel_and_then_zero() -> None:
    graph, free = llama(64, 16, 128)
    assert set(cuts(graph, free, ATTENTION)) == {("b",)}
    assert {c.stored for name, c in free.params.items() if "layers" in name} == {("I",)}
    lifetimes = []
    for share in (0.9, 0.75):
        limit = share * free.price.memory_bytes
        plan = llama(64, 16, 128, memory_limit_bytes=limit, may_recompute=False)[1]
        assert plan.price.memory_bytes <= limit
        assert any("S" in c.stored[0] for c in plan.params.values())
        lifetimes.append(sum(c.lifetime == "use" for c in plan.params.values()))
    assert lifetimes[0] < lifetimes[1], "ZeRO-3 takes over from ZeRO-2 as the limit falls"
