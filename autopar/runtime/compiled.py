"""Programs under ``torch.compile`` (:mod:`autopar.lower.compilable`), and the parameters that they gather themselves.

A parameter that is gathered for each use is gathered by functional collectives inside of the compiled graph, once for
the forward and again for the backward. The leaf, on which autograd accumulates, stays without memory: its gradient
comes out of the graph, and is reduced as always. Parameters that are gathered once a step are gathered before the graph
begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import RunError
from autopar.lower.compilable import Gather, breaks, compilable
from autopar.lower.program import Program
from autopar.runtime.hops import apply
from autopar.runtime.state import HeldParam

CompileArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of ``torch.compile``."""


class _Gathered(torch.autograd.Function):
    """The values of a parameter from this rank's piece; its gradient is the leaf's."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, piece: torch.Tensor, held: HeldParam) -> torch.Tensor:
        x = piece.to(held.dtype) if held.casts else piece
        for hop in held.hops:
            x = apply(hop.forward, x, hop)
        return x.clone(memory_format=torch.contiguous_format) if x is piece else x.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


def compiled(program: Program, gathered: Sequence[HeldParam], arguments: CompileArguments) -> Any:
    """``torch.compile`` of a program, which runs on the stored pieces of ``gathered`` and then on its slots.

    Args:
        gathered: the parameters that it gathers for each use.
    """
    names = {slot.name for slot in program.slots}
    assert all(held.name in names for held in gathered)
    return torch.compile(
        compilable(program, {held.name: _gather_of(held) for held in gathered}), *arguments[0], **arguments[1]
    )


def _gather_of(held: HeldParam) -> Gather:
    def gather_parameter(leaf: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        return _Gathered.apply(leaf, piece, held)  # type: ignore[no-any-return]

    return gather_parameter


def check_compiled(program: Program, options: dict[str, Any]) -> None:
    """Refuse one graph of a program that cannot be one.

    Raises:
        RunError: with the operators at which it breaks.
    """
    reasons = breaks(program)
    if options.get("fullgraph") and reasons:
        shown = "; ".join(reasons[:3]) + (f" and {len(reasons) - 3} more" if len(reasons) > 3 else "")
        raise RunError(
            f"compile(fullgraph=True): the program is no single graph, for the compiler does not see into {shown}. "
            "Compile it without fullgraph=True: it is broken up there, and right"
        )


def compile_programs(pm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compile the programs of a parallel module, that which runs now and those that are kept for other calls.

    Raises:
        RunError: the whole graph is asked for, and a program is none.
    """
    kept = pm._programs.kept if pm._programs is not None else ()
    of_all = [fields["_stages"].values() if "_stages" in fields else [fields["_stage"]]
              for fields in (pm._kept_program(), *kept)]  # fmt: skip
    stages = [stage for those in of_all for stage in those]
    for stage in stages:
        check_compiled(stage.program, kwargs)
    for stage in stages:
        stage.compile(args, kwargs)


__all__ = ["CompileArguments", "compile_programs", "compiled"]
