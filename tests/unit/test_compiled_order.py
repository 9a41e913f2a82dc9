"""What collectives a compiled graph has, and what is said of two that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.runtime.stages import compiled_order
from autopar.runtime.stages.compiled_order import collectives_of, difference
from autopar.torch_private import backend_named


def test_collectives_are_named_by_their_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group has another name on each rank; the axes along which its ranks differ are the same."""
    ranks_of = {"left": [0, 1], "low": [0, 2], "all": [0, 1, 2, 3], "others": [0, 7]}
    monkeypatch.setattr(compiled_order, "group_names", lambda: {name: name for name in ranks_of})
    monkeypatch.setattr(compiled_order.dist, "get_process_group_ranks", lambda name: ranks_of[name])
    of = torch.ops._c10d_functional

    def run(x: torch.Tensor) -> torch.Tensor:
        for name in ("left", "low", "all"):
            x = of.wait_tensor(of.all_reduce(x * 2, "sum", name))
        return of.wait_tensor(of.all_gather_into_tensor(x, 2, "others"))

    graph = make_fx(run, tracing_mode="fake")(torch.ones(2)).graph
    places = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    assert collectives_of(graph.nodes, ("data", "tensor"), places) == (
        "all_reduce float32[2] sum along tensor", "all_reduce float32[2] sum along data",
        "all_reduce float32[2] sum along data, tensor", "all_gather_into_tensor float32[4] among ranks [0, 7]",
    )  # fmt: skip


def test_the_first_difference_is_named() -> None:
    a, b = ("one", "two", "three"), ("one", "three", "two")
    assert not difference([(0, a), (1, a), (5, a)])
    assert "ranks 0 and 5 differ in the order of their collectives: at place 2, of 3 and 3" in difference(
        [(0, a), (1, a), (5, b)]
    )
    assert "rank 2 has two, rank 3 nothing more" in difference([(2, a), (3, a[:1])])


def test_the_backend_and_its_options() -> None:
    """Mode and options of inductor's are in it, as where torch is called with its name."""
    backend, others = backend_named({"mode": "max-autotune-no-cudagraphs", "fullgraph": True})
    assert backend.config["max_autotune"] and others == {"fullgraph": True}
    own: Any = print
    assert backend_named({"backend": own, "dynamic": False}) == (own, {"dynamic": False})
    named, _ = backend_named({"backend": "aot_eager"})
    assert callable(named)
