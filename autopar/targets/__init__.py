"""Other trainers: what each can express, how its files are written and read, and plans within that.

==================== ===================================================================================================
:mod:`.target`       the record of a trainer, what it is given to write, and what reading one of its files gives
:mod:`.trainers`     the records, a file or a folder each; adding a trainer adds one and touches nothing else
:mod:`.engines`      engines that serve models, a folder each, and what serving plans become there
:mod:`.space`        which words of a layout a trainer can say, and all layouts that it has for a model and a cluster
:mod:`.search`       the fastest layouts of a trainer, and what the restriction to them costs
:mod:`.restriction`  what the restriction to a trainer costs, and which of its choices costs it
:mod:`.model_facts`  what trainers ask of a model; :mod:`.stages`: which blocks the stages of a plan hold
:mod:`.host_shares`  what a plan keeps on the host, as shares
:mod:`.field_lists`  the fields of a trainer, as data beside its modules; :mod:`.strict_yaml`: its yaml as plain values
:mod:`.exporting`    from a plan to the folder that a person runs; :mod:`.starting`: the scripts that start it
:mod:`.pricing`      from a trainer's own file to seconds and bytes, and the changes that would help most
==================== ===================================================================================================

Layouts, in the words of :mod:`autopar.planner.layouts.layout_words`, are what all trainers have in common.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from autopar.errors import PlanError, closest
from autopar.targets.target import Target

__all__ = ["TARGETS", "register", "target_named", "targets"]

TARGETS: dict[str, Target] = {}
"""Records that were registered, by name."""


def register(target: Target) -> Target:
    """Make a trainer known that is described in a module of one's own, and return its record."""
    TARGETS[target.name] = target
    return target


@cache
def _own() -> dict[str, Target]:
    """Return the records of autopar's own trainers by name."""
    package = importlib.import_module("autopar.targets.trainers")
    found: dict[str, Target] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        target = getattr(importlib.import_module(f"{package.__name__}.{name}"), "TARGET", None)
        if isinstance(target, Target):
            found[target.name] = target
    return found


def targets() -> dict[str, Target]:
    """Return the records of all trainers by name."""
    return {**_own(), **TARGETS}


def target_named(name: str) -> Target:
    """Return the record of a trainer, or raise a PlanError with the known names."""
    known = targets()
    if name not in known:
        raise PlanError(f"no trainer '{name}' is known to export to; {closest(name, known)}")
    return known[name]
