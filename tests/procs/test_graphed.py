"""Steps recorded as CUDA graphs, under an emulation: a replay runs no Python and has its numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from procs.compiled import Blocks, batch
from procs.graphed import on_ranks, refused, trained

import autopar
from autopar.runtime.ranks.launch import run_local


def test_on_one_device():
    assert trained(None) < 1e-12


def test_on_two_ranks():
    for differences in run_local(on_ranks, 2, timeout=300):
        assert max(differences) < 1e-12


def test_what_is_refused():
    expected = [
        "on GPUs; this module is on cpu", r"called with float64\[5, 6\], int64\[5\] and was recorded with float64\[8",
        "parameter or buffer was replaced, moved or frozen", r"hooks of parameters \(head.weight\)", "a branch on data",
    ]  # fmt: skip
    for text, pattern in zip(refused(), expected, strict=True):
        with pytest.raises(Exception, match=pattern):
            raise RuntimeError(text)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph():
    torch.manual_seed(0)
    model = Blocks().cuda()
    words = [x.cuda() for x in batch(8)]
    pm, plain = (autopar.parallelize(copy.deepcopy(model), 1, tuple(words)) for _ in range(2))
    step = autopar.GraphedStep(pm, *words)
    for k in range(3):
        losses = []
        for run in (step, plain.train_step):
            torch.manual_seed(k)
            losses.append(run(words[0] + k, words[1]))
        torch.testing.assert_close(*losses)
        for a, b in zip(pm.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
