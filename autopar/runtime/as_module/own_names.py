"""Names of the parallel module's own: those that users are told of, and a prefix for all others.

A parallel module shows the model's attributes as its own (:mod:`~autopar.runtime.as_module.parallel_module`), so what
it keeps for itself has a prefix that no model uses: a model's ``count``, ``stage`` or ``_seed`` is read and set as on
the model. A few names are for users (``plan``, ``train_step``, ``shard``): of these ``pm.plan`` is the plan, whatever
the model calls so. A warning says so once, when the module is made.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist

PREFIX = "_autopar_"
"""Of attributes and methods of parallel modules, and of what stands for submodules, that are not for users."""
_PACKAGE = __name__.partition(".")[0]
_IN_MODULES = frozenset(vars(torch.nn.Module()))


def is_of_every_module(name: str) -> bool:
    """Whether models have a name as torch gives it, or as a library has put it into torch's class since."""
    return name in _IN_MODULES or hasattr(torch.nn.Module, name)


def names_of_both(pm: torch.nn.Module, model: torch.nn.Module) -> frozenset[str]:
    """Names that the model or its class has, beyond those of every module, and the parallel module has for users."""
    registered = (*model._parameters, *model._buffers, *model._modules)
    both = {*dir(type(model)), *vars(model), *registered} & {*dir(type(pm))}
    return frozenset(name for name in both if not name.startswith("__") and not is_of_every_module(name))


def tell(names: frozenset[str], model: torch.nn.Module) -> None:
    """Warn, on the first rank, of names that are not the model's when they are read of the parallel module."""
    if not names or (dist.is_initialized() and dist.get_rank()):
        return
    warnings.warn(
        f"{type(model).__name__} and the parallel module both have attributes called {', '.join(sorted(names))}: of "
        "the parallel module they are its own. Read and set the model's on the model itself; its tensors and "
        "submodules of these names are in named_parameters(), named_buffers() and named_modules() of the parallel "
        "module; or rename them",
        stacklevel=2,
    )


def is_setting(pm: torch.nn.Module, name: str) -> bool:
    """Whether a parallel module has an attribute of this name that users set, such as ``gradient_dtype``."""
    own = getattr(type(pm), name, None)
    return isinstance(own, property) and own.fset is not None


def is_set_from_outside(depth: int) -> bool:
    """Whether code beside this package sets an attribute.

    Args:
        depth: frames between that code and the caller of this function.
    """
    name = str(sys._getframe(depth + 1).f_globals.get("__name__", ""))
    return name.partition(".")[0] != _PACKAGE


__all__ = ["PREFIX", "is_of_every_module", "is_set_from_outside", "is_setting", "names_of_both", "tell"]
