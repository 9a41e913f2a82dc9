"""Bags of embeddings are lookups and their sum; embeddings ``sparse=True`` have the gradients of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.comparison.program_vs_eager import verify
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

ROWS, IDS, OFFSETS = 24, torch.arange(32) * 7 % 24, torch.tensor([0, 3, 3, 10, 12, 20, 25, 31])
MESH = Mesh.of(data=2, tensor=2)


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(ROWS, 8, **options), nn.Linear(8, 4)

    def forward(self, *of_bags: Tensor) -> Tensor:
        return self.head(self.table(*of_bags)).square().mean()


class Rows(nn.Module):
    """Looked up once, twice, or as the weight of a product too."""

    def __init__(self, use: Callable[[nn.Embedding, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.table, self.use = nn.Embedding(ROWS, 8, sparse=True, **options), use

    def forward(self, ids: Tensor) -> Tensor:
        return self.use(self.table, ids).square().mean()


PADDING = int(IDS[4])
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "sums": (lambda: Bags(mode="sum"), (IDS, OFFSETS)),
    "means": (lambda: Bags(mode="mean"), (IDS.int(), OFFSETS.int())),
    "sums by weights": (lambda: Bags(mode="sum"), (IDS, OFFSETS, torch.linspace(-1, 1, 32))),
    "the last offset too": (
        lambda: Bags(mode="mean", include_last_offset=True), (IDS, torch.cat([OFFSETS, torch.tensor([32])]))
    ),
    "padding": (lambda: Bags(mode="mean", padding_idx=PADDING), (IDS, OFFSETS)),
    "padding, counted from the end": (lambda: Bags(mode="sum", padding_idx=PADDING - ROWS), (IDS, OFFSETS)),
    "padding in rows": (lambda: Bags(mode="mean", padding_idx=PADDING), (IDS.view(8, 4),)),
    "the largest": (lambda: Bags(mode="max"), (IDS, OFFSETS)),
    "sparse bags": (lambda: Bags(mode="mean", sparse=True), (IDS, OFFSETS)),
    "sparse bags in rows": (lambda: Bags(mode="sum", sparse=True), (IDS.view(8, 4),)),
    "sparse rows": (lambda: Rows(lambda table, ids: table(ids)), (IDS,)),
    "sparse rows, twice": (lambda: Rows(lambda table, ids: table(ids) * table(ids.flip(0)), padding_idx=1), (IDS,)),
    "sparse rows and a product": (lambda: Rows(lambda table, ids: table(ids) @ table.weight.t()), (IDS,)),
    "sparse rows by function": (
        lambda: Rows(lambda table, ids: functional.embedding(ids, table.weight * 2, sparse=True)), (IDS,)
    ),
}  # fmt: skip


SLOW = ("padding, counted from the end", "padding in rows", "sparse rows by function", "sparse bags in rows")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_the_numbers_of_eager_mode(name: str) -> None:
    make, batch = CASES[name]
    torch.manual_seed(0)
    model = make()
    rows = verify(capture(model, batch), model, batch, {}, MESH, load_cluster("local-x4"), random_plans=1)
    assert len(rows) == 3 and all(row.fine for row in rows)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_with_offsets_are_cut(mode: str) -> None:
    """The table by rows, the ids, and the bags that the layer behind them reads."""
    with torch.device("meta"):
        graph = capture(Bags(mode=mode), (IDS.to("meta"), OFFSETS.to("meta"))).graph
    names = {node.name.split(".")[-1] for node in graph.nodes}
    assert "index_add" in " ".join(names) and "embedding_bag" not in " ".join(names)
    cluster = load_cluster("local-x2")
    lookup = next(node.name for node in graph.nodes if node.target == "aten.embedding.default")
    linear = next(node.name for node in graph.nodes if node.target == "aten.linear.default")
    for constraints in ({lookup: {"data": "v"}}, {lookup: {"data": "b"}, linear: {"data": "b"}}):
        plan = plan_graph(graph, cluster, Mesh.of(data=2), Options(constraints=constraints))
        assert plan.ops[lookup] == (constraints[lookup]["data"],)
