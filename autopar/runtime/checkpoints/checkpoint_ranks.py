"""The ranks that save and load a model together: what fails on one of them fails on all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.ranks.agree import everywhere, share
from autopar.runtime.ranks.groups import group_of_members
from autopar.runtime.ranks.store_meeting import any_of, from_all, said_by
from autopar.runtime.variants.run import is_parallel, run_of
from hardware_profiles.strict import parse_json


def cause_of(error: BaseException) -> str:
    """Say what went wrong."""
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


class CheckpointRanks:
    """The ranks that hold a part of a model; one for a plain module.

    Attributes:
        run: of a parallel module.
        all: their numbers.
        rank: this one's place among them.
        group: their process group; None where there is one.

    Raises:
        RunError: several ranks run, and the model is a plain module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.run = run_of(model) if is_parallel(model) else None
        self.all = tuple(_ranks_of(model))
        self.group: dist.ProcessGroup | None = None
        if len(self.all) > 1:
            said_by(self.all, None)  # a rank that is alone here hears it, and does not wait in new_group
            self.group = group_of_members(list(self.all), "gloo")
        self.rank = 0 if self.group is None else self.all.index(dist.get_rank())

    def call(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Enclose what all ranks call: where only some do, and others go on, all of them hear it within seconds."""
        return contextlib.nullcontext() if self.run is None else self.run.all_call(what)

    @contextlib.contextmanager
    def on_all(self, what: str, cause: Callable[[BaseException], str] = cause_of) -> Iterator[None]:
        """Raise a failure of one rank on all, as one error that says what could not be done, and its cause."""

        def told(error: Exception) -> Exception:
            return RunError(f"the checkpoint could not be {what}: {cause(error)}")

        if self.group is not None:
            with everywhere(self.group, told):
                yield
            return
        try:
            yield
        except Exception as error:
            raise told(error) from error

    def of_first(self, make: Callable[[], str]) -> str:
        """Return what the first rank makes, on all; a RunError of the first is raised on all, too."""
        error, text = None, ""
        if self.rank == 0:
            try:
                text = make()
            except RunError as wrong:
                error = wrong
        if self.group is not None:
            return share(self.group, text, error)
        if error is not None:
            raise error
        return text

    def any_of(self, says: bool) -> bool:
        """Return whether any rank passes True."""
        return says if self.group is None else any_of(self.all, says)

    def known_to_all(self, names: Iterable[str]) -> set[str]:
        """Return the names of all ranks: a stage of a pipeline has some."""
        if self.group is None or self.run is None or self.run.leads is None:
            return set(names)
        return {name for text in from_all(self.group, json.dumps([*names])) for name in parse_json(text)}


def _ranks_of(model: torch.nn.Module) -> list[int]:
    """List the ranks that hold a part of a module; one for a plain one in a process without a group."""
    if is_parallel(model):
        return list(dist.get_process_group_ranks(run_of(model).ranks()[0]))
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RunError(
            f"Checkpoint: {dist.get_world_size()} ranks run, and the model is a plain {type(model).__name__}: give the "
            "parallel module, or save and load the plain one in one process"
        )
    return [0]
