"""Python values that a program was captured with: set on the parallel module, checked at each call, captured again.

The model that was parallelized is the owner of its numbers and flags. What is set on the parallel module, or on a part
of it, goes there; what was changed there is an error at the next call, or (``on_change="recapture"``) the module gets
another program (:mod:`autopar.runtime.variants.program_cache`).
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.python.frozen_values import show
from autopar.capture.python.guards import Guards, refusal
from autopar.errors import RunError
from autopar.runtime.as_module.own_names import is_of_every_module
from autopar.runtime.variants.module_calls import ModuleCall
from autopar.runtime.variants.program_cache import check_autocast


def assigned(pm: Any, path: str, name: str, value: Any) -> bool:
    """Whether an attribute is one that a program of ``pm`` was captured with; then it is set on the model.

    With ``on_change="recapture"`` any plain attribute that the model has is set there, too: another program may read
    it.

    Raises:
        RunError: the model is gone, so the program cannot be made anew.
    """
    programs = pm.__dict__.get("_autopar_programs")
    guards: list[Guards] = [pm._autopar_captured.guards]
    if programs is not None:
        guards.extend(fields["_autopar_captured"].guards for fields in programs.kept)
    follows = programs is not None and programs.values
    read = next((r for g in guards if (r := g.read(path, name)) is not None), None)
    owner = next((o for g in guards if (o := g.owner(path)) is not None), None)
    if read is None:
        model = pm._autopar_model_ref() if follows else None
        if model is not None and not isinstance(value, torch.Tensor | torch.nn.Module):
            part = dict(model.named_modules()).get(path)
            if part is not None and name in vars(part) and not is_of_every_module(name):
                setattr(part, name, value)
        return False
    if owner is not None:
        setattr(owner, name, value)
    elif value is not read.value and value != read.value:
        raise RunError(
            f"{read.label} was {show(read.value)} when the model was captured, and is part of the program; the model "
            f"is gone, so it cannot be {value!r} now: keep the model beside the parallel module, or set it before "
            "parallelize"
        )
    return True


def check_values(pm: Any, call: ModuleCall) -> None:
    """Have the program be one of the call's shapes, and compute with the values that the model has.

    Raises:
        RunError: it was captured with others, and they cannot or shall not be captured again; or modules or parameters
            of the model were replaced.
    """
    original, programs = pm._autopar_original, pm._autopar_programs
    if original is not None:
        original.at_call(pm)
    pm._autopar_captured.guards.tell_of_gradient_mode()
    if programs is not None:
        programs.follow(pm, call)
    else:
        check_autocast(pm._autopar_captured)
        if not pm._autopar_captured.guards.same():
            raise RunError(refusal(pm._autopar_captured.guards.changes()))


__all__ = ["assigned", "check_values"]
