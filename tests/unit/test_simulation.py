"""Many ranks in one process: sizes and strides of tensors in pieces are those that torch's own simulation gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from autopar.rules.simulation import simulation


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
