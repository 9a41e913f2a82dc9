"""Programs under ``torch.compile`` (:mod:`autopar.lower.compilable`), and the parameters that they gather themselves.

A parameter that is gathered for each use is gathered by functional collectives inside of the compiled graph, once for
the forward and again for the backward. The leaf, on which autograd accumulates, stays without memory: its gradient
comes out of the graph, and is reduced as always. Parameters that are gathered once a step are gathered before the graph
begins.

A parallel module that is called within a ``torch.compile`` of the user's, of the module itself or of a function around
it, is compiled as that one asks (:func:`compiled_as_callers`): Dynamo leaves the Python of the runtime as it is, and
the programs, which :meth:`~autopar.runtime.as_module.parallel_module.ParallelModule.compile` compiles, get the same
backend and options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from autopar.errors import RunError
from autopar.lower.compilable import Gather, breaks, compilable
from autopar.lower.program import Program
from autopar.runtime.parameters.redistribution import apply
from autopar.runtime.parameters.state import HeldParam
from autopar.runtime.stages.compiled_order import OneOrder
from autopar.torch_private import callers_compiler, options_of_compiler
from autopar.words.trees import Context, PyTree

CompileArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of ``torch.compile``."""

Method = TypeVar("Method", bound=Callable[..., Any])


ITSELF = "itself"
"""How a module is compiled whose user has called ``compile``: no ``torch.compile`` around a call changes it."""


class _Gathered(torch.autograd.Function):
    """The values of a parameter from this rank's piece; its gradient is the leaf's."""

    @staticmethod
    def forward(ctx: Context, leaf: torch.Tensor, piece: torch.Tensor, held_param: HeldParam) -> torch.Tensor:
        x = piece.to(held_param.dtype) if held_param.casts else piece
        for reshard_step in held_param.reshard_steps:
            x = apply(reshard_step.forward, x, reshard_step)
        return x.clone(memory_format=torch.contiguous_format) if x is piece else x.contiguous()

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


def compiled(
    program: Program, gathered: Sequence[HeldParam], arguments: CompileArguments, order: OneOrder | None
) -> Any:
    """Compile a program that takes the stored shards of ``gathered`` and then its slots.

    Args:
        gathered: the parameters that it gathers for each use.
        order: the order of its collectives, which the ranks compare; None if there is one rank.
    """
    names = {slot.name for slot in program.slots}
    assert all(held_param.name in names for held_param in gathered)
    module = compilable(program, {held_param.name: _gather_of(held_param) for held_param in gathered})
    if order is None:
        return torch.compile(module, *arguments[0], **arguments[1])
    return order.watched(torch.compile(module, *arguments[0], **order.backend(arguments[1])))


def _gather_of(held_param: HeldParam) -> Gather:
    def gather_parameter(leaf: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        return _Gathered.apply(leaf, piece, held_param)  # type: ignore[no-any-return]

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


def compile_programs(pm: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
    """Compile the programs of a parallel module, that which runs now and those that are kept for other calls.

    Raises:
        RunError: the whole graph is asked for, and a program is none.
    """
    if pm.seeds.mode == "torch":
        raise RunError(
            "programs that draw as torch does in eager mode (random='torch') are not compiled, since the host follows "
            "torch's generator through each call: parallelize with random='sharded', the default"
        )
    kept = pm.programs.kept if pm.programs is not None else ()
    of_all = [fields["stages"].values() if "stages" in fields else [fields["stage"]]
              for fields in (pm.kept_program(), *kept)]  # fmt: skip
    stages = [stage for those in of_all for stage in those]
    for stage in stages:
        check_compiled(stage.program, kwargs)
    for stage in stages:
        stage.compile(args, kwargs)


def compiled_as_callers(method: Method) -> Method:
    """Wrap a method of a parallel module that the compiler is not to trace.

    The module's programs are compiled with the options of an enclosing ``torch.compile``, if there is one.
    """

    @torch.compiler.disable
    def run(pm: Any, compiler: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        if callable(compiler):  # not None, of no compiler, nor False, of what was compiled already
            _compile_as(pm._autopar, options_of_compiler(compiler))
        return method(pm, *args, **kwargs)

    @torch.compiler.disable(recursive=False)  # this frame alone, which sees the caller's compiler
    @functools.wraps(method)
    def seen(pm: Any, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return run(pm, callers_compiler(), args, kwargs)

    return seen  # type: ignore[no-any-return]


def _compile_as(pm: Any, options: dict[str, Any]) -> None:
    """Compile the programs as a caller asks.

    Not if they already are, if the user has called ``compile``, or in the middle of a step.
    """
    if pm.compiled_as in (options, ITSELF) or pm.in_step():
        return
    compile_programs(pm, (), options)
    pm.compiled_as = options


def records_graphs(arguments: CompileArguments) -> bool:
    """Check whether the compiler records CUDA graphs of what it compiles."""
    for value in (*arguments[0], *arguments[1].values()):
        options = value if isinstance(value, dict) else getattr(value, "config", None)
        if value in ("reduce-overhead", "max-autotune") or (options or {}).get("triton.cudagraphs"):
            return True
    return False
