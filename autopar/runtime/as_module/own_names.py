"""Names that the model and the parallel module both have: ``count``, ``stage``, ``leads``.

A parallel module shows the model's attributes as its own (:mod:`~autopar.runtime.as_module.parallel_module`), but not
those whose names it uses itself: ``pm.plan`` is the plan, whatever the model calls so. A warning says so once, when the
module is made. To set one that it keeps in itself is refused: ``forward`` would never see it.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist

_PACKAGE = __name__.partition(".")[0]


def names_of_both(pm: torch.nn.Module, fields: frozenset[str], model: torch.nn.Module) -> frozenset[str]:
    """Names that the model or its class has, beyond those of every module, and the parallel module has for itself.

    Args:
        fields: attributes of the parallel module that its class may only announce.
    """
    registered = (*model._parameters, *model._buffers, *model._modules)
    # asked anew, since libraries add to torch's class (``smart_apply`` of transformers)
    of_every_module = {*dir(torch.nn.Module), *vars(torch.nn.Module())}
    models = {*dir(type(model)), *vars(model), *registered} - of_every_module
    own = {*dir(type(pm)), *fields}
    return frozenset(name for name in models & own if not name.startswith("__"))


def tell(names: frozenset[str], model: torch.nn.Module) -> None:
    """Warn, on the first rank, of names that are not the model's when they are read of the parallel module."""
    shown = ", ".join(sorted(name for name in names if not name.startswith("_")))
    if not shown or (dist.is_initialized() and dist.get_rank()):
        return
    warnings.warn(
        f"{type(model).__name__} and the parallel module both have attributes called {shown}: of the parallel module "
        "they are its own. Read and set the model's on the model itself; its tensors and submodules of these names are "
        "in named_parameters(), named_buffers() and named_modules() of the parallel module; or rename them",
        stacklevel=2,
    )


def is_set_from_outside(depth: int) -> bool:
    """Whether code beside this package sets an attribute.

    Args:
        depth: frames between that code and the caller of this function.
    """
    name = str(sys._getframe(depth + 1).f_globals.get("__name__", ""))
    return name.partition(".")[0] != _PACKAGE


__all__ = ["is_set_from_outside", "names_of_both", "tell"]
