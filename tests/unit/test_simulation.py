"""Many ranks in one process: sizes and strides of tensors in pieces are those that torch's own simulation gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from autopar.rules.proving.many_ranks import many_ranks
from autopar.rules.proving.simulation import simulation
from autopar.words.meshes import Mesh


def numbers(values: Any) -> list[Any]:
    """Of each value, what every rank has."""
    return [getattr(v.node, "_local_ints", v) if isinstance(v, torch.SymInt) else v for v in values]


def layouts(rows: list[int]) -> list[Any]:
    pieces = {rank: torch.arange(6.0 * n).reshape(n, 6) for rank, n in enumerate(rows)}
    x = LocalTensor(pieces)
    tensors = [x, x.t(), x[1:, 2:4], x.t().narrow(0, 1, 3), x.detach(), (x + 1).unsqueeze(0), x.sum()]
    return [
        (t.dim(), numbers(t.shape), numbers(t.stride()), *numbers([t.storage_offset()]), t.is_contiguous())
        for t in tensors
    ]


@pytest.mark.parametrize("rows", [[4, 4], [4, 3], [2, 2, 1]])
def test_layouts_are_those_of_torch(rows: list[int]) -> None:
    before = LocalTensor.__dict__["__torch_dispatch__"]
    with simulation(len(rows)):
        mine = layouts(rows)
    assert LocalTensor.__dict__["__torch_dispatch__"] is before
    with LocalTensorMode(len(rows)):
        assert mine == layouts(rows)
    assert len(set(rows)) == 1 or any(isinstance(n, dict) for _, shape, *_ in mine for n in shape)


aten = torch.ops.aten
DECIDED_BY_SIZES = {
    "view": lambda x: aten.view.default(x, [x.shape[0], 8, 3]).transpose(1, 2).contiguous(),
    "view, expanded gradient": lambda x: aten.view.default(x, [x.shape[0], 8, 3]),
    "view of method": lambda x: x.view(x.shape[0], 8, 3).transpose(1, 2).contiguous(),
    "repeat_interleave": lambda x: aten.repeat_interleave.self_int(x, 3, 2).transpose(1, 2).contiguous(),
    "expand": lambda x: aten.expand.default(x.sum((1, 2), keepdim=True), [x.shape[0], 4, 5]),
    "largest, and where": lambda x: x.max(1).values,
    "mean": lambda x: x.mean(),
    "constant": lambda x: x * torch.ones_like(x),
    "slices": lambda x: x[:, 1:3] * x[..., : x.shape[0], None, 0],
    "numbers of places": lambda x: x[torch.arange(x.shape[0]), 1:, x.new_zeros(x.shape[0], dtype=torch.int64)],
}


@pytest.mark.parametrize("name", DECIDED_BY_SIZES)
def test_gradients_where_one_piece_has_length_one(name: str) -> None:
    """Torch decides how to bring a gradient to another shape by comparing sizes, and here ranks would disagree."""
    operator = DECIDED_BY_SIZES[name]
    pieces = {rank: torch.randn(n, 4, 6, dtype=torch.float64) for rank, n in enumerate([2, 2, 1])}
    with many_ranks(Mesh.of(tensor=3)):
        x = LocalTensor(pieces)
        x.requires_grad_()
        operator(x).sum().backward()
        assert x.grad is not None
        gradients = {rank: x.grad._local_tensors[rank] for rank in pieces}
    for rank, on_rank in pieces.items():
        alone = on_rank.clone().requires_grad_()
        operator(alone).sum().backward()
        torch.testing.assert_close(gradients[rank], alone.grad)


def test_what_is_written_is_written_on_every_rank() -> None:
    pieces = {rank: torch.zeros(n, 4) for rank, n in enumerate([2, 2, 1])}
    with many_ranks(Mesh.of(tensor=3)), torch.no_grad():
        x = LocalTensor(pieces)
        assert aten.add_.Tensor(x, x.new_ones(x.shape[0], 1)) is x
        assert x[:, :1].mul_(x.shape[0]).shape[1] == 1
        assert x.masked_fill_(x.sum(1, keepdim=True) > 4, 7.0) is x
    assert [piece.tolist() for piece in pieces.values()] == [[[7.0] * 4] * 2] * 2 + [[[1.0] * 4]]


def test_numbers_are_drawn_and_tensors_written_by_the_simulation() -> None:
    """Ranks have random states of their own, and what is written to stays the tensor that it was."""
    with many_ranks(Mesh.of(tensor=3)):
        x = LocalTensor({rank: torch.zeros(n, 4) for rank, n in enumerate([2, 2, 1])})
        view = x.narrow(1, 1, 2)
        assert view.add_(1.0) is view
        drawn = torch.rand_like(x)._local_tensors
        assert drawn[2].equal(drawn[0][:1]), "every rank goes on from the same state"
        written = [x._local_tensors[rank] for rank in range(3)]
    for piece in written:
        assert piece[:, 1:3].eq(1).all() and piece.sum() == 2 * len(piece)
