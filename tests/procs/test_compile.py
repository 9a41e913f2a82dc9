"""Programs run under ``torch.compile`` as one graph, with the same losses, outputs, gradients and buffers."""

from __future__ import annotations

import pytest
from procs.compiled import CUTS, differences

from autopar.runtime.launch import run_local

PARTS = [(0, 1), (0, 0), (0, 1), (0, 1), (0, 1), (0, 0)]
"""Breaks and graphs: of the first step, another one, one with other rows, with a frozen parameter, in eval mode."""


@pytest.mark.parametrize("cut", CUTS)
def test_one_graph_on_two_ranks(cut):
    for worst, parts in run_local(differences, 2, cut, "aot_eager", timeout=300):
        assert worst < 1e-12 and parts == PARTS


@pytest.mark.slow  # gcc compiles each kernel
@pytest.mark.parametrize("cut", ["tensor", "zero again"])
def test_kernels_of_inductor_on_two_ranks(cut):
    for worst, parts in run_local(differences, 2, cut, "inductor", timeout=300):
        assert worst < 1e-12 and parts == PARTS


@pytest.mark.slow
def test_one_device():
    worst, parts = differences(None, "inductor")
    assert worst < 1e-12 and parts == PARTS
