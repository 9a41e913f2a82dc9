"""Copies that are gathered for operators that run again in the backward, as the integer program counts them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.planner.intra_op.building.flows import pieces_for_copies
from autopar.planner.intra_op.memory.recompute import patterns_in
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from hardware_profiles import load_cluster

IN_FLIGHT = 16
SHARES = (0.4, 0.25, 0.22, 0.21)
"""Of the memory that the fastest plan wants."""
MESH = Mesh.of(data=2, tensor=4)


class Block(nn.Module):
    """A norm and two products, between which a sequence that is cut is gathered and cut again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(nn.functional.silu(self.wide(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int = 2048, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model, x = Stack().to(torch.bfloat16), torch.zeros(2, 4096, 2048, dtype=torch.bfloat16)
    return capture(model, (x,)).graph


def test_what_runs_again_is_chosen_no_worse_than_it_is_asked(graph: Graph) -> None:
    """With sixteen microbatches in flight, a copy that were kept of each would leave no room: that which a segment
    gathers is there only while the segment runs again. And less memory never makes a plan faster."""
    cluster = load_cluster("dgx-h100")
    chosen = Options(microbatches=32, in_flight=IN_FLIGHT, memory_gap=0.06)
    asked = replace(chosen, recompute=patterns_in(graph, ("blocks.*",)), may_recompute=False)
    free = plan_graph(graph, cluster, MESH, chosen)
    seconds = [free.price.seconds]
    for share in SHARES:
        limit = share * free.price.memory_bytes
        by_hand, found = (
            plan_graph(graph, cluster, MESH, replace(options, memory_limit_bytes=limit)) for options in (asked, chosen)
        )
        assert found.price.memory_bytes <= limit and found.recompute
        assert found.price.seconds <= 1.02 * by_hand.price.seconds, share
        seconds.append(found.price.seconds)
    assert seconds == sorted(seconds)


def test_copies_are_gathered_again_only_of_what_is_made_in_pieces() -> None:
    """A reader that gathers its copy again needs a producer that makes pieces along the same axis: rows 1 and 2 of
    it, which are a shard and a sum; what is made whole is kept whole."""
    made_as = [State.of("S0", "R"), State.of("S0", "S1"), State.of("S0", "P")]
    wanted = [State.of("S0", "R"), State.of("S0", "R"), State.of("S0", "S1")]
    (condition,) = pieces_for_copies(MESH, 7, made_as, 3, wanted, (False, True, False))
    assert (condition.item, condition.rows, condition.of_item, condition.of_rows) == (3, (1,), 7, (1, 2))
    assert not pieces_for_copies(MESH, 7, made_as, 3, wanted, (False, False, True)), "cut as it is made"
    assert not pieces_for_copies(MESH, 7, made_as[1:], 3, wanted, (False, True, False)), "never whole"
