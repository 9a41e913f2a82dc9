"""A run on disk: model, optimizer and whatever else a script goes on with, whole at any moment.

A save is a new folder, ``step-00000200`` in the checkpoint's own, that gets its name when everything is in it and on
the disk. So whatever ends a run, and whenever, the last whole save loads. Tensors are written by
``torch.distributed.checkpoint``, each rank its own pieces, by the model's names: they load on another mesh, under
another plan, in a pipeline, or into the plain model in one process. What is each rank's own (states of random number
generators, positions in the data) is a file for each rank.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from autopar.errors import RunError
from autopar.runtime.checkpoints.checkpoint_ranks import CheckpointRanks, cause_of
from autopar.runtime.checkpoints.durable_files import Sum
from autopar.runtime.checkpoints.folder_owner import OWNER, Ownership, own
from autopar.runtime.checkpoints.rank_state import SAMPLERS, RankState
from autopar.runtime.checkpoints.save_in_progress import Saving, size_of
from autopar.runtime.checkpoints.saves_in_folder import (
    Manifest,
    give_name,
    name_of_step,
    next_order,
    read_on,
    remove_left,
    remove_old,
    saves_in,
    which,
)
from autopar.runtime.checkpoints.state_before import StateBefore
from autopar.runtime.checkpoints.stored_shards import ShardsToWrite, read_metadata
from autopar.runtime.checkpoints.training_state import TrainingState
from autopar.runtime.ranks.agent_messages import SAVED, tell_agent
from hardware_profiles.strict import parse_json

MOST_TRIES = 20
"""How often a save is looked for, where another job removes what was found."""
KEPT = 3
"""Saves of a folder that are kept by default."""
_COPIES = StagingOptions(False, False, False, False)
"""Options for copies of values that are written while the run goes on: on the CPU, made at once."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_saves = itertools.count(1)


class Checkpoint:
    """The saves of one run in a folder that all ranks see.

    >>> checkpoint = autopar.Checkpoint("runs/a", model=pm, optimizer=optimizer, scheduler=scheduler)
    >>> start = checkpoint.load() or 0
    >>> for step in range(start, 1000):
    ...     train(step)
    ...     checkpoint.save(step + 1)

    Every rank makes it and calls its methods, at the same places.

    Args:
        folder: made if it is not there.
        model: a parallel module, a pipeline, or any module of one process.
        optimizer: the optimizer of the model's parameters; saved by their names.
        keep: how many saves stay, those that were written last; None for all.
        others: what else has ``state_dict()`` and ``load_state_dict()``: a scheduler, a GradScaler, a data loader that
            knows its position. Each rank saves its own.
        random_state: save the states of the generators of Python, numpy and torch, too.

    Raises:
        RunError: one of these has no state to save.
    """

    def __init__(
        self, folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
        keep: int | None = KEPT, random_state: bool = True, **others: Any,
    ) -> None:  # fmt: skip
        for name, value in others.items():
            if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
                raise RunError(
                    f"Checkpoint: {name} is of type {type(value).__name__}, which has no state_dict() and "
                    "load_state_dict(); give objects that do, such as schedulers"
                )
        if keep is not None and keep < 1:
            raise RunError(f"Checkpoint: keep is {keep}; give 1 or more, or None for all")
        self.ranks = CheckpointRanks(model)
        if self.ranks.run is not None:
            others = {SAMPLERS: self.ranks.run.samplers, **others}
        self.folder, self.keep = Path(folder), keep
        self.training = TrainingState(model, optimizer, self.ranks)
        self.of_rank = RankState(others, optimizer, random_state)
        self.owner: Ownership | None = None
        self.pending: Saving | None = None
        self.room = 0, 0
        """Bytes of this rank's part of the last save, and what was free before."""
        with self.ranks.on_all("made"):
            self.folder.mkdir(parents=True, exist_ok=True)

    # -- saving

    def save(self, step: int, *, wait: bool = True) -> Path:
        """Save what the run has after ``step`` steps.

        The first save makes this job the owner of the folder: another one that saves there is refused, and what earlier
        jobs left unfinished is removed.

        Args:
            step: a number from 0 on; an earlier save of that number is replaced.
            wait: return when it is on the disk. Else values are copied, and written while the run goes on; the next
                call of any method, or :meth:`wait`, ends that first and raises what went wrong. A script that ends
                before that ends when the save is written, and with status 1 if it could not be.

        Returns:
            The folder of the save, which is there when the save is whole.

        Raises:
            RunError: it could not be written, on all ranks; what was saved before is as it was.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise RunError(f"Checkpoint.save: step is {step!r}; give the number of steps done, from 0 on")
        with self.ranks.call("Checkpoint.save"):
            return self._save(step, wait)

    def _save(self, step: int, wait: bool) -> Path:
        self.wait()
        target = self.folder / name_of_step(step)
        unnamed = self._begin(step, target)
        try:
            with self._saved_on_all(target):
                saving = self._saving(unnamed, step, copied=not wait)
            saving.plan = self._planned(saving.shards, target)
            if wait:
                with self._saved_on_all(target):
                    saving.run()
                tell_agent(SAVED, str(step))
        except BaseException:
            self._failed(unnamed)
            raise
        if not wait:
            saving.start()
            self.pending = saving
        return target

    def _saving(self, unnamed: Path, step: int, copied: bool) -> Saving:
        """Return what this rank writes; its own file is written first.

        Args:
            copied: write copies of the tensors, since the run goes on.
        """
        ranks, sums = self.ranks, dict[str, Sum]()
        self.room = size_of(state := self.training.tensors()), shutil.disk_usage(unnamed).free
        self.of_rank.write(unnamed, ranks.rank, sums)
        if copied:
            stager = DefaultStager(_COPIES)
            staged: Any = stager.stage(state)
            state = staged
            stager.close()
        shards = ShardsToWrite(unnamed, state, ranks.rank == 0, sums, copied)
        others, has_optimizer = tuple(sorted(self.of_rank.others)), self.training.optimizer is not None

        def ends(sums: Mapping[str, Sum]) -> None:
            self._name(unnamed, Manifest(step, len(ranks.all), others, has_optimizer, dict(sums)))

        return Saving(unnamed, step, ranks.all, ranks.rank, shards, ends, self._failed, self._cause)

    def wait(self) -> None:
        """End a save that is still being written.

        Raises:
            RunError: it could not be written.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return
        with self.ranks.call("Checkpoint.wait"):
            try:
                with self._saved_on_all(self.folder / name_of_step(pending.step)):
                    pending.join()
                tell_agent(SAVED, str(pending.step))
            except BaseException:
                self._failed(pending.folder)
                raise

    def _begin(self, step: int, target: Path) -> Path:
        """Make the folder in which a save is written, on all ranks."""

        def begin() -> str:
            name = f".{name_of_step(step)}-{_number()}"
            try:
                if self.owner is None or not self.owner.holds():
                    self.owner = own(self.folder, id(self))
                    weakref.finalize(self, self.owner.release, id(self))
                    remove_left(self.folder, self.owner, _number())
                self.owner.busy.add(name)
                (self.folder / name).mkdir()
            except Exception as failed:
                self._failed(self.folder / name)
                raise RunError(f"the checkpoint could not be saved to {target}: {self._cause(failed)}") from failed
            return name

        unnamed = self.folder / self.ranks.of_first(begin)
        with self._saved_on_all(target):
            unnamed.mkdir(exist_ok=True)  # which another machine may not see yet
        return unnamed

    def _planned(self, shards: ShardsToWrite, target: Path) -> SavePlan:
        """Return this rank's part of what all write."""
        ranks, group = self.ranks.all, self.ranks.group
        if group is None:
            with self._saved_on_all(target):
                return shards.plan_all([shards.plan])[0]
        plans: list[Any] | None = [None] * len(ranks) if self.ranks.rank == 0 else None
        merged: list[Any] | None = None
        with self._saved_on_all(target):
            dist.gather_object(shards.plan, plans, dst=ranks[0], group=group)
            if plans is not None:
                merged = shards.plan_all(plans)
        mine: list[Any] = [None]
        with self._saved_on_all(target):
            dist.scatter_object_list(mine, merged, src=ranks[0], group=group)
        plan: SavePlan = mine[0]
        return plan

    def _failed(self, unnamed: Path) -> None:
        """Remove a save that failed, which might take the room of the next one."""
        if self.ranks.rank == 0 and self.owner is not None:
            shutil.rmtree(unnamed, ignore_errors=True)
            self.owner.busy.discard(unnamed.name)
            if not saves_in(self.folder):
                self.owner.release(id(self))

    def _name(self, unnamed: Path, manifest: Manifest) -> None:
        """Name the save, on rank 0, when everything is written on all ranks."""
        assert self.owner is not None
        replace(manifest, order=next_order(self.folder)).write(unnamed)
        if not self.owner.holds():
            raise RunError(f"the folder was given to another job: somebody removed {self.folder / OWNER}")
        give_name(unnamed, self.owner, _number())
        remove_old(self.folder, self.keep, _number())

    # -- loading

    def steps(self) -> list[int]:
        """List the steps of the whole saves as they were written, the newest last."""
        return list(saves_in(self.folder))

    def load(self, step: int | None = None, *, strict: bool = True) -> int | None:
        """Restore model, optimizer and all else from a save; on any number of ranks.

        Args:
            step: the step of the save; by default the one that was written last.
            strict: tensors that only the save has, or only the model or the optimizer, are an error. Else those that
                both have are loaded.

        Returns:
            Its number; None if the folder has none.

        Raises:
            RunError: there is no such save, it is damaged, or it is of another model; on all ranks.
        """
        with self.ranks.call("Checkpoint.load"):
            return self._load_chosen(step, strict)

    def _load_chosen(self, step: int | None, strict: bool) -> int | None:
        """Load a save, and another one where it is removed meanwhile."""
        self.wait()
        tries = 0
        while (chosen := self._chosen(step)) is not None:
            try:
                with read_on(chosen[1]):
                    return self._load(*chosen, strict)
            except RunError:
                gone, tries = not chosen[1].exists(), tries + 1  # the job that saves there has removed or renamed it
                if tries == MOST_TRIES or not self.ranks.any_of(gone):
                    raise
        return None

    def _load(self, step: int, source: Path, strict: bool) -> int:
        """Restore all from a save; where that fails, restore what was before."""
        what, ranks, training, others = f"loaded from {source}", self.ranks, self.training, self.of_rank.others
        with ranks.on_all(what):
            manifest = Manifest.read(source)
            manifest.check(source, ranks.rank, len(ranks.all))
        with ranks.on_all(what):
            metadata = read_metadata(source)
            mine = ranks.rank if manifest.ranks == len(ranks.all) else 0
            of_rank = self.of_rank.read(source, mine)
            before = StateBefore(training.model, training.optimizer, others)
        try:
            training.load(source, metadata, strict, manifest.optimizer, of_rank.get("groups"))
            with ranks.on_all(what):
                self.of_rank.restore(of_rank)
        except BaseException as error:
            lost = before.put_back()
            if lost and isinstance(error, RunError):
                raise RunError(f"{error}{lost}") from error
            raise
        return step

    def _chosen(self, step: int | None) -> tuple[int, Path] | None:
        """Return the save that rank 0 sees, on all ranks."""

        def choose() -> str:
            try:
                found = which(self.folder, step)
            except OSError as wrong:
                raise RunError(f"{self.folder} cannot be read: {cause_of(wrong)}") from wrong
            return json.dumps(None if found is None else [found[0], found[1].name])

        chosen = parse_json(self.ranks.of_first(choose))
        return None if chosen is None else (chosen[0], self.folder / chosen[1])

    # -- what went wrong

    def _saved_on_all(self, target: Path) -> contextlib.AbstractContextManager[None]:
        """Raise a failure of one rank to save on all."""
        return self.ranks.on_all(f"saved to {target}", self._cause)

    def _cause(self, error: BaseException) -> str:
        """Say why this rank could not save."""
        if not (isinstance(error, OSError) and error.errno in _NO_ROOM):
            return cause_of(error)
        size, free = self.room
        kept = "" if self.keep is None else f" (keep={self.keep} saves stay while another one is written)"
        return (
            f"{error.strerror}: this rank's part has {size:,} bytes, and {free:,} were free there; make room, or save "
            f"elsewhere{kept}. What was saved before is as it was"
        )


def _number() -> str:
    """Return a unique number for a folder that has no name yet."""
    return f"{os.getpid()}-{time.time_ns():x}-{next(_saves)}"
