"""Models whose inputs are no tensors with dims: node numbers in a list, a number, nothing at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar


class OfNodes(nn.Module):
    """A layer of a graph, called with the numbers of nodes, as GraphSAGE is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def forward(self, nodes: list[int]) -> torch.Tensor:
        return self.table(torch.LongTensor(nodes)).square().sum()


class OfNothing(nn.Module):
    """A picture that is optimized itself, as in style transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Parameter(torch.linspace(0.0, 1.0, 12).reshape(3, 4))

    def forward(self) -> torch.Tensor:
        return (self.picture - 0.5).square().sum()


class OfANumber(nn.Module):
    """A field that is asked at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 4)

    def forward(self, time: torch.Tensor, name: str = "sin") -> torch.Tensor:
        value = self.linear(time.reshape(1))
        return (value.sin() if name == "sin" else value.cos()).sum()


CALLS: dict[Any, list[tuple[Any, ...]]] = {
    OfNodes: [([1, 2, 3],), ([4, 5, 6],), ([7, 8],), ([1, 2, 3],)],
    OfNothing: [(), ()],
    OfANumber: [(torch.tensor(0.1),), (torch.tensor(0.2),), (torch.tensor(0.1), "cos")],
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_model_without_tensor_inputs_is_called_and_trained(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind().double() if kind is not OfANumber else kind()
    eager = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, CALLS[kind][0])
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (pm, eager))
    for call in CALLS[kind]:
        for each, optimizer in ((pm, mine), (eager, theirs)):
            optimizer.zero_grad()
            each(*call).backward()
            optimizer.step()
        torch.testing.assert_close(pm(*call), eager(*call))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
