"""Structure that is given as integers in a tensor and read by Python: trees, edges, orders.

The program has the structure of the example and checks at every call that it is the same; what follows from more than
given integers is refused and never guessed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.comparison import compare_with_eager
from autopar.errors import CaptureError, RunError

PARENTS = torch.tensor([2, 2, 6, 5, 5, 6, -1])
EDGES = torch.tensor([[0, 1], [1, 2], [3, 2]])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def tree(self, x: torch.Tensor, parents: Any) -> torch.Tensor:
        h: dict[int, torch.Tensor] = {}
        for n in range(len(parents)):
            kids = [k for k in range(n) if parents[k] == n]
            below = sum((h[k] for k in kids), torch.zeros_like(x[n]))
            h[n] = torch.tanh(self.a(x[n]) + self.b(below))
        return h[len(parents) - 1].square().mean()


class Listed(Two):
    def forward(self, x: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        return self.tree(x, parents.tolist())


class AsNumpy(Two):
    def forward(self, x: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        return self.tree(x, parents.cpu().numpy().tolist())


class OneByOne(Two):
    def forward(self, x: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        return self.tree(x, [p.item() for p in parents])


class Recursive(Two):
    def node(self, x: torch.Tensor, kids: dict[int, list[int]], n: int) -> torch.Tensor:
        below = sum((self.node(x, kids, k) for k in kids[n]), torch.zeros_like(x[n]))
        return torch.tanh(self.a(x[n]) + self.b(below))

    def forward(self, x: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        kids: dict[int, list[int]] = {n: [] for n in range(len(parents))}
        root = 0
        for k, p in enumerate(parents.tolist()):
            if p < 0:
                root = k
            else:
                kids[p].append(k)
        return self.node(x, kids, root).square().mean()


class AlongEdges(Two):
    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        out = list(h.unbind(0))
        for i, j in edges.tolist():
            out[j] = out[j] + self.b(h[i])
        return torch.stack(out).square().mean()


class InOrder(Two):
    def forward(self, x: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        for i, k in enumerate(sorted(range(len(parents)), key=parents.tolist().__getitem__)):
            h = h + self.b(x[k]) * i
        return h.square().mean()


@pytest.mark.parametrize("kind", [Listed, AsNumpy, OneByOne, Recursive, AlongEdges, InOrder])
def test_the_structure_of_the_example(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(7, 8)
    structure = EDGES if kind is AlongEdges else PARENTS
    captured = capture(model, (x, structure))
    assert compare_with_eager(captured, model, (torch.randn(7, 8), structure), {}).same


def test_another_structure_is_an_error() -> None:
    model, x = Listed(), torch.randn(7, 8)
    pm: Any = autopar.parallelize(copy.deepcopy(model), 1, (x, PARENTS))
    assert float(pm(x, PARENTS)) == pytest.approx(float(model(x, PARENTS)), rel=1e-6)
    with pytest.raises(RunError, match=r"test_structure_in_data\.py"):
        pm(x, torch.tensor([1, 6, 6, 5, 5, 6, -1]))


class OfFloats(Two):
    """Asks each of them: the answers are those of the example, and are checked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        for v in x.mean(1).tolist():
            if v > 0:
                h = self.b(h)
        return h.square().mean()


class OfBools(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        for positive in (x.mean(1) > 0).tolist():
            if positive:
                h = self.b(h)
        return h.square().mean()


@pytest.mark.parametrize("kind", [OfFloats, OfBools])
def test_numbers_of_data_in_a_list_are_asked_one_by_one(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(3, 8) + torch.tensor([[1.0], [-1.0], [1.0]])
    captured = capture(model, (x,))
    assert compare_with_eager(captured, model, (x,), {}).same
    assert [way.kwargs["answer"] for way in captured.graph.ways] == [True, False, True]


class OfWhatItComputes(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = self.a(x).mean(0).topk(2).indices.tolist()
        return (self.b(x) if best[0] == 3 else self.a(x)).square().mean()


def test_a_list_that_follows_from_what_is_computed_is_refused_and_not_guessed() -> None:
    with pytest.raises(CaptureError, match=r"(?s)branches, at test_structure_in_data\.py:\d+, .*x\[i\]\.item\(\)"):
        capture(OfWhatItComputes(), (torch.randn(3, 8),))
