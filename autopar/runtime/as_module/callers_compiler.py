"""Calls of a parallel module within a ``torch.compile`` of the user's, of the module or of a function around it.

Dynamo leaves the Python of the runtime as it is, and the programs get the same backend and options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from autopar.runtime.variants.run import run_of
from autopar.torch_private import callers_compiler, count_as_compiled, options_of_compiler
from autopar.words.trees import PyTree

Method = TypeVar("Method", bound=Callable[..., Any])
ITSELF = "itself"
"""How a module is compiled whose user has called ``compile``: no ``torch.compile`` around a call changes it."""


def compiled_as_callers(method: Method) -> Method:
    """Wrap a method of a parallel module that the compiler is not to trace.

    The module's programs are compiled with the options of an enclosing ``torch.compile``, if there is one; not if they
    already are, if the user has called ``compile``, or in the middle of a step.
    """

    @torch.compiler.disable
    def run(pm: torch.nn.Module, compiler: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        if callable(compiler):  # not None, of no compiler, nor False, of what was compiled already
            programs, options = run_of(pm), options_of_compiler(compiler)
            if programs.compiled_as not in (options, ITSELF) and not programs.in_step():
                programs.compile(((), options))
                programs.compiled_as = options
        if compiler is not None:
            count_as_compiled()
        return method(pm, *args, **kwargs)

    @torch.compiler.disable(recursive=False)  # this frame alone, which sees the caller's compiler
    @functools.wraps(method)
    def seen(pm: torch.nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return run(pm, callers_compiler(), args, kwargs)

    return seen  # type: ignore[return-value]
