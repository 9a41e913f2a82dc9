"""What is each rank's own in a save, in a file for each rank: positions in the data, schedulers, random numbers."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.errors import RunError
from autopar.runtime.batches.row_sampler import Samplers
from autopar.runtime.checkpoints.durable_files import Sum, summed
from autopar.runtime.checkpoints.generator_states import generators, set_generators
from autopar.words.trees import PyTree

SAMPLERS = "samplers of the module"
"""Under which the positions of ``pm.sampler(dataset)`` and ``pm.shard(loader)`` are saved."""
_OF_PARAMETERS = frozenset({"params", "param_names"})


class RankState:
    """What a rank has for itself: ``others``, the optimizer's groups, and the states of generators if asked for."""

    def __init__(
        self, others: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, random_state: bool
    ) -> None:
        self.others, self.optimizer, self.random_state = others, optimizer, random_state

    def write(self, folder: Path, rank: int, sums: dict[str, Sum]) -> None:
        """Write the rank's file of a save, and add its checksum to ``sums``.

        Raises:
            RunError: something in it could not be loaded, since that would run code of the file's.
        """
        state: dict[str, Any] = {"others": {name: value.state_dict() for name, value in self.others.items()}}
        if self.optimizer is not None:
            state["groups"] = [
                {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
                for group in self.optimizer.param_groups
            ]
        if self.random_state:
            state["random"] = generators()
        with summed(_file(folder, rank), sums) as file:
            file.write(_plain_bytes(state))

    def read(self, folder: Path, rank: int) -> dict[str, Any]:
        """Return what a rank wrote to a save.

        Raises:
            RunError: it lacks one of ``others``.
        """
        state: dict[str, Any] = torch.load(_file(folder, rank), weights_only=True, map_location="cpu")
        there_are = [name for name in state["others"] if name != SAMPLERS]
        if missing := sorted(set(self.others) - set(state["others"]) - {SAMPLERS}):
            raise RunError(f"it has no {', '.join(missing)}; it has {', '.join(there_are) or 'none'}")
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`read` returned, but for the optimizer's groups."""
        for name, value in self.others.items():
            if name in state["others"]:
                value.load_state_dict(state["others"][name])
        if self.random_state and "random" in state:
            set_generators(state["random"])
        if isinstance(samplers := self.others.get(SAMPLERS), Samplers):
            samplers.go_on_from_here()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.pt"


def _plain_bytes(state: dict[str, Any]) -> bytes:
    def written(value: PyTree) -> bytes:
        file = io.BytesIO()
        torch.save(value, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True, map_location="cpu")
        return file.getvalue()

    try:
        return written(state)
    except pickle.UnpicklingError:
        for name, value in state["others"].items():
            try:
                written(value)
            except pickle.UnpicklingError as error:
                kind = re.search(r"GLOBAL (\S+)", str(error))
                raise RunError(
                    f"the state_dict() of {name} holds {kind[1] if kind else 'an object'}, and loading that would run "
                    "code that a file names: have it hold numbers, strings, tensors, and lists and dicts of such"
                ) from error
        raise
