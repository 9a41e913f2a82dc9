"""Parameters that are too small for the shards of a pattern: a scalar, a bias of fewer elements than ranks.

A pattern with a wildcard (``"*": "S0 use"``, as ``fully_shard`` of a whole model) applies to whatever can be stored so:
what is too small stays replicated, with a note in the plan. A name that is written out is meant.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from autopar.errors import InfeasibleError, first_few
from autopar.plans.plan import LIFETIMES, MEMORIES, StagePlan
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.placements import REPLICATE, State


class TooSmallError(InfeasibleError):
    """Parameters that no plan on this mesh can store as their names request."""


def stored_and_lifetime(how: str) -> tuple[str, str]:
    """Return ``"S0, I use"`` as ``("S0,I", "use")``; no lifetime is ``""``."""
    words = how.split()
    lifetimes = [word for word in words if word in LIFETIMES]
    return "".join(word for word in words if word not in (*LIFETIMES, *MEMORIES)), "".join(lifetimes[-1:])


def memory_of(how: str) -> str:
    """Return where a parameter is to be stored, ``host`` or ``device``; empty where the pin does not say it."""
    return next((word for word in how.split() if word in MEMORIES), "")


def why_too_small(name: str, shape: Sequence[int], how: str, mesh: Mesh) -> str:
    """Return why a parameter cannot be stored as requested, such as ``on axis 'data' it has no dim 0``."""
    if stored_and_lifetime(how)[0] == REPLICATE:
        return ""
    left = list(shape)
    for p, (axis, size) in zip(State.parse(stored_and_lifetime(how)[0], mesh, f"'{name}'"), mesh, strict=True):
        d = p.dim
        if d is None or size == 1:
            continue
        if d >= len(left):
            return f"on axis '{axis}' it has no dim {d}"
        if left[d] < size:
            return f"on axis '{axis}' dim {d} has {left[d]} left for {size} ranks"
        left[d] = -(-left[d] // size)
    return ""


def asks_for_what_fits(pattern: str) -> bool:
    """Return whether a pattern of ``params=`` has a wildcard, and is not the name of one parameter."""
    return glob.has_magic(pattern)


def note_on_small(graph: Graph, params: Mapping[str, str], stages: Sequence[StagePlan]) -> tuple[str, ...]:
    """Return a note on the parameters that a plan keeps replicated although a pattern shards them."""
    shapes = {node.target: node.out.shape for _, node in graph.of_kind("param")}
    small: dict[str, str] = {}
    for stage in stages:
        for name in stage.params:
            patterns = [pattern for pattern in params if fnmatchcase(name, pattern)]
            if patterns and name in shapes and asks_for_what_fits(patterns[-1]):
                if why_too_small(name, shapes[name], params[patterns[-1]], stage.mesh):
                    small[name] = f"{name} {list(shapes[name])}"
    if not small:
        return ()
    return (
        f"{len(small)} parameter(s) are too small for the pieces that params= asks for by a pattern, and stay whole: "
        + first_few(list(small.values())),
    )
