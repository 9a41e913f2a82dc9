"""What one of two ranks does in the tests of compiled graphs with collectives."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch import config as aot_config
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.runtime.stages.graph_compiler import compile_graph
from autopar.torch_private import FakeTensorMode

aten, of = torch.ops.aten, torch.ops._c10d_functional
Sequenced = list[str]
"""Names of collectives, of waits for them (``wait_tensor``) and of products (``mm``), in their order."""


def starts_early_waits_late(group: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A program in which products overlap with each collective: what inductor would move for memory, or to readers."""

    def run(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = of.all_gather_into_tensor(w, 2, group)
        h = aten.mm(x, v)
        for _ in range(3):
            h = aten.mm(aten.gelu(h), v)
        reduced = of.all_reduce(h, "sum", group)
        k = aten.mm(aten.mul(x, x), v)
        k2 = aten.mm(aten.sin(k), v)
        y = aten.mm(k2, aten.t(of.wait_tensor(gathered)))
        r = of.wait_tensor(reduced)
        scattered = of.reduce_scatter_tensor(aten.cat([y, y]), "sum", 2, group)
        m = aten.mul(aten.add(k2, k), 2.0)
        s = of.wait_tensor(scattered)
        sent = of.all_to_all_single(aten.cat([m, m]), [len(x)] * 2, [len(x)] * 2, group)
        again = of.all_reduce(k2, "sum", group)
        z = aten.mm(aten.cos(m), v)
        a = of.wait_tensor(sent)
        return r, s, a, z, of.wait_tensor(again), aten.add(aten.sum(a), aten.sum(z))

    return run


def rows_of_one_rank_alone(group: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A program whose rows travel: rank 1 has none of its own. Two collectives are alike, and one is of no elements."""
    first = dist.get_rank() == 0
    mine, came = ([1, 2], [1, 0]) if first else ([0, 0], [2, 0])

    def run(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nothing = of.wait_tensor(of.all_reduce(aten.slice(v, 0, 0, 0), "sum", group))
        rows = of.wait_tensor(of.all_to_all_single(aten.mul(x, 2.0), came, mine, group))
        back = of.wait_tensor(of.all_to_all_single(aten.mm(rows, v), mine, came, group))
        total = of.wait_tensor(of.all_reduce(aten.sum(x), "sum", group))
        part = of.wait_tensor(of.all_reduce(aten.slice(v, 0, 0, 2), "sum", group))
        one, two = (of.wait_tensor(of.all_reduce(v, "sum", group)) for _ in range(2))
        of.wait_tensor(of.all_reduce(aten.sin(v), "sum", group))
        return nothing, back, total, part, aten.add(one, two), aten.mm(v, v)

    return run


def compiled_on_ranks(backend: str) -> list[tuple[bool, Sequenced, Sequenced]]:
    """Whether each program gives what its graph gives, and the order in its graph and, of inductor, in its code."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    x, w, v = (torch.randn(n, 8, generator=generator, dtype=torch.float64) + rank for n in (3, 5, 8))
    with torch.no_grad():
        return [
            _compiled(starts_early_waits_late(group), (x, w, v), backend),
            _compiled(rows_of_one_rank_alone(group), (x[: 3 * (1 - rank)], v), backend),
        ]


def _compiled(run: Callable[..., Any], inputs: Sequence[torch.Tensor], backend: str) -> tuple[bool, Any, Any]:
    mode = FakeTensorMode()
    graph = make_fx(run)(*map(mode.from_tensor, inputs))
    expected = graph(*inputs)
    with config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):  # so that code is made
        compiled, code = run_and_get_code(compile_graph, graph, ((), {"backend": backend}))
    results = compiled(list(inputs))
    equal = all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        for a, b in zip(results, expected, strict=True)
    )
    names = [str(n.target).split(".")[1] for n in graph.graph.nodes if n.op == "call_function"]
    kinds = ("all_", "reduce_", "wait_", "mm")
    call = r"^\s*(?:\w+ = )?(?:torch\.ops\._c10d_functional|extern_kernels)\.(\w+?)_?(?:\.default)?\("
    return equal, [name for name in names if name.startswith(kinds)], re.findall(call, "".join(code), re.MULTILINE)
