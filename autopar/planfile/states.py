"""Placements in a plan file, for tensors of the model."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import MeshError
from autopar.planfile.file_errors import FileErrors
from autopar.words.meshes import Mesh
from autopar.words.placements import State, kinds_listed
from autopar.words.shards import fits


def read_state(path: str, text: str, mesh: Mesh, shape: Sequence[int], kinds: str, bad: FileErrors) -> State | None:
    """Return the state that a text names for a tensor of this shape; None, and a failure, if it cannot be.

    ``kinds`` are the allowed first letters of placements.
    """
    try:
        state = State.parse(text, mesh, f"{bad.part}{path}")
    except MeshError as error:
        bad.say(str(error))
        return None
    for placement, (axis, _) in zip(state, mesh, strict=True):
        if placement.kind not in kinds:
            allowed = kinds_listed(kinds)
            bad.add(path, f"'{placement}' on axis '{axis}' is not possible here; use {allowed}")
            return None
    if not fits(shape, state, mesh):
        bad.add(
            path,
            f"a tensor of shape {tuple(shape)} cannot be cut as {text} on mesh {mesh.text}; shard "
            "another dim, or keep it whole",
        )
        return None
    return state
