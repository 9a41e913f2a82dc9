"""What one rank does in the tests of compiled programs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from procs.cases import whole
from procs.habits import difference
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import RunError
from autopar.lower.steps import printing
from autopar.lower.steps.order import is_start, overlapped
from autopar.lower.steps.printing import StepFunctions
from autopar.runtime.parameters import gathering
from autopar.runtime.stages.compiled_order import OneOrder

CUTS: dict[str, dict[str, Any]] = {
    "tensor": {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}}},
    "again": {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}}, "recompute": ["blocks.*"]},
    "zero": {"constraints": {"*": {"data": "b"}}, "params": {"*.weight": "S0 use", "*.bias": "S0 step"}},
    "zero again": {
        "constraints": {"*": {"data": "b"}}, "params": {"*.weight": "S0 use"}, "recompute": ["blocks.*"],
    },
    "data": {"constraints": {"*": {"data": "b"}}, "params": {"*": "I step"}},
    "swapped": {"constraints": {"*up": {"data": "n"}, "*down": {"data": "b"}}},
    "uneven": {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}, "head": {"data": "n"}}},
}  # fmt: skip
AROUND = ("tensor", "zero")
"""Cuts of which the calls are made through ``torch.compile(pm)``; of the others ``pm.compile`` was called."""


class Block(nn.Module):
    """A norm with running statistics, dropout, and two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.up(self.norm(x)).relu()))


class Blocks(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 5)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.head(self.blocks(x))
        return nn.functional.cross_entropy(out, y), out


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, generator=generator).double(), torch.randint(0, 5, (rows,), generator=generator)


AS_INDUCTOR = "inductor's graphs"
"""Names a backend: what inductor makes kernels of is run operator by operator."""
_in_graphs: list[list[str]] = []
"""The collectives of each graph that :data:`AS_INDUCTOR` made here, in their order."""
_in_steps: list[list[str]] = []
"""Those of each step that was built here."""


def run_inductors_graphs(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend that has inductor's decompositions and passes, and no kernels, which a compiler takes minutes for."""

    def run_operators(graph: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        _in_graphs.append(collectives(graph.graph.nodes))

        def run(args: Any) -> Any:
            return torch.fx.Interpreter(graph).boxed_run([*args])

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_fx(gm, inputs, inner_compile=run_operators)


def collectives(nodes: Iterable[torch.fx.Node]) -> list[str]:
    found = [n for n in nodes if "_c10d_functional" in str(n.target) and "wait" not in str(n.target)]
    return [str(node.target).removesuffix("_.default").removesuffix(".default") for node in found]


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Note the steps that are built."""
    build = StepFunctions.__init__

    def note(self: StepFunctions, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        _in_steps.append(collectives(self.collectives))

    with mock.patch.object(StepFunctions, "__init__", note):
        yield


def check_order() -> None:
    """All ranks have steps with the same collectives in the same order, or they would wait for each other."""
    for mine in (_in_steps, _in_graphs):
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        assert all(of_rank == everyone[0] for of_rank in everyone), everyone
        mine.clear()


def spread(cut: str | None, **options: Any) -> Any:
    if cut is None:
        return autopar.parallelize(Blocks(), 1, batch(), **options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    return autopar.parallelize(Blocks(), mesh, batch(), **CUTS[cut], **options)


def step(pm: Any, rows: int) -> list[torch.Tensor]:
    """Loss, output and gradients."""
    pm.zero_grad()
    torch.manual_seed(rows)
    loss, out = pm(*batch(rows))
    (loss + out.square().mean()).backward()
    return [loss.detach(), out.detach(), *(whole(p.grad).clone() for p in pm.parameters() if p.grad is not None)]


def differences(cut: str | None, backend: Any, steps_alone: bool = False) -> tuple[float, list[int]]:
    """Steps, another number of rows, a frozen parameter and eval mode, compiled as one graph and not compiled.

    Args:
        steps_alone: two steps of one shape, and no more.

    Returns:
        the worst difference, and how many steps were built for each part.
    """
    pm = spread(cut)
    plain = copy.deepcopy(pm)
    through: Any = pm
    if backend == AS_INDUCTOR:
        backend = run_inductors_graphs
    if cut in AROUND:
        through = torch.compile(pm, backend=backend, fullgraph=True)
    else:
        pm.compile(backend=backend, fullgraph=True)
    worst, parts = 0.0, []

    def compare(what: Any) -> None:
        nonlocal worst
        before = len(_in_steps)
        mine, theirs = what(through), what(plain)
        worst = max(worst, *(difference(whole(a), whole(b)) for a, b in zip(mine, theirs, strict=True)))
        parts.append(len(_in_steps) - before)

    with noted():
        compare(lambda m: step(m, 8))
        compare(lambda m: step(m, 8))
        if steps_alone:
            return worst, parts
        compare(lambda m: step(m, 5))
        for m in (pm, plain):
            m.blocks[0].up.weight.requires_grad_(False)
        compare(lambda m: step(m, 8))
        for m in (pm, plain):
            m.eval()
        with torch.no_grad():
            compare(lambda m: m(*batch()))
        compare(lambda m: list(m.buffers()))
    return worst, parts


def of_all(cuts: list[str], backend: str, steps_alone: bool = False) -> list[tuple[float, list[int]]]:
    found = []
    for cut in cuts:
        found.append(differences(cut, backend, steps_alone))
        check_order()
    return found


def gathers() -> int:
    """Gathers in a step of small parameters that are gathered for each use."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    pm = autopar.parallelize(Blocks(), mesh, batch(), constraints={"*": {"data": "b"}}, params={"*": "S0 use"})
    pm.compile(backend="eager")
    step(pm, 8)
    (of_form,) = pm._autopar.stage.run_program.forms.values()
    return sum("gather_parameters" in node.meta["call"] for node in of_form.functions.collectives)


def _with_two_exchanged(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """An order in which one of two unlike collectives begins after the other, where nothing forbids that."""
    order = overlapped(nodes)
    for one, other in itertools.pairwise(filter(is_start, order)):
        a, b = order.index(one), order.index(other)
        unlike = one.target is not other.target or one.meta["val"].shape != other.meta["val"].shape
        if unlike and not any(one in n.all_input_nodes for n in order[a : b + 1]):
            return [*order[:a], *order[a + 1 : b + 1], one, *order[b + 1 :]]
    return order


def in_another_order(compares: bool) -> tuple[float, str]:
    """A program that rank 1 runs in another order than rank 0. Seconds until this rank has an error, and the error.

    Args:
        compares: the ranks compare the order before they run.
    """
    pm = spread("zero again")
    pm.compile(backend="eager")
    start = time.monotonic()
    alone = contextlib.nullcontext() if compares else mock.patch.object(OneOrder, "agree", lambda *_: None)
    exchanged = mock.patch.object(printing, "overlapped", _with_two_exchanged)
    by_itself = mock.patch.object(gathering, "UNIT_BYTES", 1)  # each parameter is gathered alone
    with exchanged if dist.get_rank() else contextlib.nullcontext(), alone, by_itself:
        try:
            step(pm, 5)
        except (RuntimeError, RunError) as error:
            return time.monotonic() - start, str(error)
    return time.monotonic() - start, ""


def compiled_in_vain() -> tuple[float, str]:
    """Rank 1 cannot compile its program, and rank 0 waits for it. Seconds until this rank has an error, and the
    error."""
    pm = spread("tensor")

    def refuse(*args: Any) -> Any:
        raise ValueError("no compiler on this machine")

    pm.compile(backend=refuse if dist.get_rank() else "eager")
    start = time.monotonic()
    try:
        step(pm, 8)
    except Exception as error:
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return time.monotonic() - start, ""


def in_stages(schedule: str, backend: str) -> tuple[float, int]:
    """A pipeline whose stages are compiled as one graph each, and one that is not: steps, and eval mode.

    Returns:
        the worst difference, and how many steps were built.
    """
    options: dict[str, Any] = {"stages": 2, "schedule": schedule, "microbatches": 2}
    compiled: dict[str, Any] = {"compile": {"backend": backend, "fullgraph": True}}
    pm, plain = (autopar.parallelize(Blocks(), 2, batch(), **options, **more) for more in (compiled, {}))
    results = []
    _in_steps.clear()
    with noted():
        for m in (pm, plain):
            torch.manual_seed(5)
            losses = [m.train_step(*batch(8)) for _ in range(2)]
            gradients = [whole(p.grad).clone() for p in m.parameters()]
            m.eval()
            with torch.no_grad():
                results.append([*losses, *gradients, *m(*batch(8)), *m.buffers()])
    return max(difference(whole(a), whole(b)) for a, b in zip(*results, strict=True)), len(_in_steps)
