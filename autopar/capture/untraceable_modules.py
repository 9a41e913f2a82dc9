"""Modules that cannot be traced (scripted, compiled), or not within minutes: refused before anything is tried."""

from __future__ import annotations

import torch

from autopar.errors import CaptureError

MOST_IN_CONTAINER = 4096
"""Modules in one list, sequence or dict of them: a model of so many layers takes some minutes to capture and plan."""
MOST_MODULES = 200_000
"""Modules of a model in all."""
MOST_OPERATORS = 25_000
"""Operators of a forward: so many take a minute to capture and a gigabyte of memory."""


def check_modules(model: torch.nn.Module) -> None:
    """Refuse what ``torch.export`` cannot trace, and models of too many modules.

    Raises:
        CaptureError: with the path of the module, the number and what to do.
    """
    for number, (path, module) in enumerate(model.named_modules()):
        where = f"its module '{path}'" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{where} is a {type(module).__name__} of torch.jit, whose code is compiled and cannot be traced; pass "
                "the module before torch.jit.script or torch.jit.trace, and compile what parallelize gives: "
                "parallelize(..., compile=True)"
            )
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise CaptureError(
                f"{where} was compiled by torch.compile or its compile(), and what is traced is the model itself: pass "
                "that, and compile what parallelize gives, by parallelize(..., compile=True) or torch.compile of it"
            )
        if len(module._modules) > MOST_IN_CONTAINER:
            raise CaptureError(
                f"{where} holds {len(module._modules):,} modules, at most {MOST_IN_CONTAINER:,} are captured; stack "
                "equal ones into one module with larger weights, or use fewer"
            )
        if number >= MOST_MODULES:
            raise CaptureError(f"the model has more than {MOST_MODULES:,} modules, the most that are captured")


def check_operators(n: int) -> None:
    """Refuse a forward of too many operators.

    Raises:
        CaptureError: with the number and what to do.
    """
    if n > MOST_OPERATORS:
        raise CaptureError(
            f"the forward has more than {MOST_OPERATORS:,} operators, the most that are captured; a loop in it is "
            "traced turn by turn: write it with operators on whole tensors, or give shorter example inputs"
        )
