"""Programs under ``torch.compile``: explicit steps (:mod:`.step_program`), whose operators a compiler makes kernels of.

A parameter that is gathered for each use is gathered by functional collectives inside of the step, once for the forward
and again for the backward. The leaf, on which autograd accumulates, stays without memory: its gradient comes out of the
step, and is reduced as always. Parameters that are gathered once a step are gathered before it begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autopar.errors import RunError
from autopar.lower.program import Program
from autopar.lower.steps.handing_over import Take
from autopar.lower.steps.nodes import calls_outside
from autopar.runtime.parameters.narrow_gathers import agree
from autopar.runtime.parameters.redistribution import apply
from autopar.runtime.parameters.state import HeldParam
from autopar.runtime.stages.compiled_order import OneOrder
from autopar.runtime.stages.graph_compiler import CompileArguments, compile_graph
from autopar.runtime.stages.step_program import Gather, StepProgram
from autopar.words.trees import Context


class _Gathered(torch.autograd.Function):
    """The values of a parameter from this rank's piece; its gradient is the leaf's."""

    @staticmethod
    def forward(ctx: Context, leaf: torch.Tensor, piece: torch.Tensor, held_param: HeldParam) -> torch.Tensor:
        x = piece
        if held_param.carrier is not None:  # it comes from the host
            x = x.to(leaf.device, non_blocking=True, copy=True)
        x = x.to(held_param.dtype) if held_param.casts else x
        if held_param.wire is not None:
            agree([held_param.wire], [x])
            x = held_param.wire.sent(x)
        for reshard_step in held_param.reshard_steps:
            x = apply(reshard_step.forward, x, reshard_step)
        x = held_param.received(x)
        if held_param.wire is not None:
            held_param.wire.scale = None  # it has no value outside of the step
        return x.clone(memory_format=torch.contiguous_format) if x is piece else x.contiguous()

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


def compiled(
    program: Program, gathered: Sequence[HeldParam], arguments: CompileArguments, takers: Mapping[str, Take],
    order: OneOrder | None,
) -> StepProgram:  # fmt: skip
    """Return a program that takes the stored shards of ``gathered`` and then its slots, and runs as a step.

    Args:
        gathered: the parameters that it gathers for each use.
        arguments: of ``torch.compile``; the backend ``eager`` calls operators one by one.
        takers: by parameter, what takes its gradient as soon as it is there.
        order: the order of its collectives, which the ranks compare; None if there is one rank.
    """
    names = {slot.name for slot in program.slots}
    assert all(held_param.name in names for held_param in gathered)
    gathers = {held_param.name: _gather_of(held_param) for held_param in gathered}
    backend = arguments[1].get("backend", "inductor")
    compiler = None if backend == "eager" else partial(compile_graph, arguments=arguments)
    return StepProgram(program, gathers, compiler, takers, (lambda _: None) if order is None else order.compare)


def _gather_of(held_param: HeldParam) -> Gather:
    def gather_parameter(leaf: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        return _Gathered.apply(leaf, piece, held_param)  # type: ignore[no-any-return]

    return gather_parameter


def check_compiled(program: Program, options: dict[str, Any]) -> None:
    """Refuse one graph of a program that cannot be one.

    Raises:
        RunError: with the operators at which it breaks.
    """
    reasons = calls_outside(program)
    if options.get("fullgraph") and reasons:
        shown = "; ".join(reasons[:3]) + (f" and {len(reasons) - 3} more" if len(reasons) > 3 else "")
        raise RunError(
            f"compile(fullgraph=True): the program is no single graph, for the compiler does not see into {shown}. "
            "Compile it without fullgraph=True: it is broken up there, and right"
        )


def records_graphs(arguments: CompileArguments) -> bool:
    """Check whether the compiler records CUDA graphs of what it compiles."""
    for value in (*arguments[0], *arguments[1].values()):
        options = value if isinstance(value, dict) else getattr(value, "config", None)
        if value in ("reduce-overhead", "max-autotune") or (options or {}).get("triton.cudagraphs"):
            return True
    return False
