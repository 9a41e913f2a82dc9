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
from autopar.runtime.parameters.gathering import Unit, gathered_together
from autopar.runtime.parameters.narrow_gathers import agree
from autopar.runtime.parameters.redistribution import apply
from autopar.runtime.parameters.state import HeldParam
from autopar.runtime.stages.compiled_order import OneOrder
from autopar.runtime.stages.graph_compiler import CompileArguments, compile_graph
from autopar.runtime.stages.step_program import Gather, StepProgram
from autopar.words.trees import Context


class _Gathered(torch.autograd.Function):
    """The values of parameters from this rank's pieces; their gradients are those of the leaves."""

    @staticmethod
    def forward(ctx: Context, unit: Unit, *leaves_and_pieces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = len(unit.held_params)
        values = _values(unit, leaves_and_pieces[:n], leaves_and_pieces[n:])
        ctx.mark_non_differentiable(
            *(x for x, want in zip(values, ctx.needs_input_grad[1 : n + 1], strict=True) if not want)
        )
        return values

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *grads, *(None for _ in grads))


def _values(
    unit: Unit, leaves: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gather the parameters of a unit, by functional collectives."""
    held_params = unit.held_params
    sent = [_on_device(*each) for each in zip(held_params, leaves, pieces, strict=True)]
    wires = [held_param.wire for held_param in held_params if held_param.wire is not None]
    if wires:  # of all or none
        agree(wires, sent)
        sent = [wire.sent(x) for wire, x in zip(wires, sent, strict=True)]
    if unit.together and len(held_params) > 1:
        arrived = gathered_together(held_params, sent)
    else:
        arrived = list(sent)
        for k, held_param in enumerate(held_params):
            for reshard_step in held_param.reshard_steps:
                arrived[k] = apply(reshard_step.forward, arrived[k], reshard_step)
    values = [held_param.received(x) for held_param, x in zip(held_params, arrived, strict=True)]
    for wire in wires:
        wire.scale = None  # it has no value outside of the step
    return tuple(
        x.clone(memory_format=torch.contiguous_format) if x is piece else x.contiguous()
        for x, piece in zip(values, pieces, strict=True)
    )


def _on_device(held_param: HeldParam, leaf: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Return a piece on the device, in the format of the program."""
    if held_param.carrier is not None:  # it comes from the host
        piece = piece.to(leaf.device, non_blocking=True, copy=True)
    return piece.to(held_param.dtype) if held_param.casts else piece


def compiled(
    program: Program, units: Sequence[Unit], arguments: CompileArguments, takers: Mapping[str, Take],
    order: OneOrder | None,
) -> StepProgram:  # fmt: skip
    """Return a program that takes the stored shards of the parameters of ``units``, then its slots; it runs as a step.

    Args:
        units: the parameters that it gathers for each use, those that are gathered together.
        arguments: of ``torch.compile``; the backend ``eager`` calls operators one by one.
        takers: by parameter, what takes its gradient as soon as it is there.
        order: the order of its collectives, which the ranks compare; None if there is one rank.
    """
    gathers = [(tuple(held_param.name for held_param in unit.held_params), _gather_of(unit)) for unit in units]
    backend = arguments[1].get("backend", "inductor")
    compiler = None if backend == "eager" else partial(compile_graph, arguments=arguments)
    return StepProgram(program, gathers, compiler, takers, (lambda _: None) if order is None else order.compare)


def _gather_of(unit: Unit) -> Gather:
    def gather_parameters(*leaves_and_pieces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _Gathered.apply(unit, *leaves_and_pieces)  # type: ignore[no-any-return]

    return gather_parameters


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
