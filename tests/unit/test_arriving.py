"""A tensor that arrives at a stage lives as long as its readers keep it, and its gradient comes all the same."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.pipelines.received_tensors import arriving


def test_nobody_holds_what_autograd_does_not_need() -> None:
    piece = torch.ones(3)
    storage = StorageWeakRef(piece.untyped_storage())
    read, arrived = arriving(piece)
    result = (read + 1.0).sum()  # an addition keeps nothing
    del piece, read
    assert storage.expired()
    assert arrived.gradient is None and arrived.gradient_or_zeros().tolist() == [0.0, 0.0, 0.0]
    result.backward()
    assert arrived.gradient is not None and arrived.gradient.tolist() == [1.0, 1.0, 1.0]


def test_nothing_is_left_when_the_backward_is_over() -> None:
    """Also of functions in Python, of which torch's collector knows nothing: no circle leads through them."""
    read, arrived = arriving(torch.ones(3, dtype=torch.float64))
    result = read.exp()
    kept = StorageWeakRef(result.untyped_storage())
    result.sum().backward()
    del result, read, arrived
    assert kept.expired()
