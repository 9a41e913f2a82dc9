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
import io
import json
import os
import pickle
import re
import shutil
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from autopar.errors import RunError, first_few
from autopar.runtime.batches.row_sampler import Samplers
from autopar.runtime.checkpoints.durable_files import Sum, summed
from autopar.runtime.checkpoints.folder_owner import OWNER, Ownership, own
from autopar.runtime.checkpoints.generator_states import generators, set_generators
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
from autopar.runtime.checkpoints.state_before import StateBefore, model_state, set_model_state
from autopar.runtime.checkpoints.stored_shards import PlainValues, ShardReader, ShardsToWrite, read_metadata, shapes
from autopar.runtime.ranks.agent_messages import SAVED, tell_agent
from autopar.runtime.ranks.agree import everywhere, share
from autopar.runtime.ranks.groups import group_of_members
from autopar.runtime.ranks.store_meeting import any_of, from_all, said_by
from autopar.runtime.variants.run import EXTRA, is_parallel, run_of
from autopar.words.trees import PyTree
from hardware_profiles.strict import parse_json

MOST_TRIES = 20
"""How often a save is looked for, where another job removes what was found."""
SAMPLERS = "samplers of the module"
"""Under which the positions of ``pm.sampler(dataset)`` and ``pm.shard(loader)`` are saved."""
KEPT = 3
"""Saves of a folder that are kept by default."""
SHOWN = 6
"""Differences between a save and a model that a message shows."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_COPIES = StagingOptions(False, False, False, False)
"""Options for copies of values that are written while the run goes on: on the CPU, made at once."""
_OF_PARAMETERS = frozenset({"params", "param_names"})
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_saves = 0


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
        self.run = run_of(model) if is_parallel(model) else None
        if self.run is not None:
            others = {SAMPLERS: self.run.samplers, **others}
        self.folder, self.model, self.optimizer, self.others = Path(folder), model, optimizer, others
        self.keep, self.random_state = keep, random_state
        self.ranks = _ranks_of(model)
        self.alone = len(self.ranks) == 1
        if not self.alone:
            said_by(tuple(self.ranks), None)  # a rank that is alone here hears it, and does not wait in new_group
        self.group = None if self.alone else group_of_members(self.ranks, "gloo")
        self.rank = 0 if self.alone else self.ranks.index(dist.get_rank())
        self.owner: Ownership | None = None
        self.pending: Saving | None = None
        self.room = 0, 0
        """Bytes of this rank's part of the last save, and what was free before."""
        with self._on_all("made"):
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
        with self._together("Checkpoint.save"):
            return self._save(step, wait)

    def _save(self, step: int, wait: bool) -> Path:
        self.wait()
        target = self.folder / name_of_step(step)
        what = f"saved to {target}"
        unnamed = self._begin(step, what)
        try:
            with self._on_all(what):
                saving = self._saving(unnamed, step, copied=not wait)
            saving.plan = self._planned(saving.shards, what)
            if wait:
                with self._on_all(what):
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
        sums: dict[str, Sum] = {}
        self.room = size_of(state := self._state()), shutil.disk_usage(unnamed).free
        with summed(unnamed / f"rank-{self.rank:05d}.pt", sums) as file:
            file.write(_plain_bytes(self._of_rank()))
        if copied:
            stager = DefaultStager(_COPIES)
            staged: Any = stager.stage(state)
            state = staged
            stager.close()
        shards = ShardsToWrite(unnamed, state, self.rank == 0, sums, copied)
        others, has_optimizer = tuple(sorted(self.others)), self.optimizer is not None

        def ends(sums: Mapping[str, Sum]) -> None:
            self._name(unnamed, Manifest(step, len(self.ranks), others, has_optimizer, dict(sums)))

        return Saving(unnamed, step, self.ranks, self.rank, shards, ends, self._failed, self._cause)

    def wait(self) -> None:
        """End a save that is still being written.

        Raises:
            RunError: it could not be written.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return
        with self._together("Checkpoint.wait"):
            try:
                with self._on_all(f"saved to {self.folder / name_of_step(pending.step)}"):
                    pending.join()
                tell_agent(SAVED, str(pending.step))
            except BaseException:
                self._failed(pending.folder)
                raise

    def _begin(self, step: int, what: str) -> Path:
        """Make the folder in which a save is written, on all ranks."""
        error: BaseException | None = None
        name = f".{name_of_step(step)}-{_number()}"
        if self.rank == 0:
            try:
                if self.owner is None or not self.owner.holds():
                    self.owner = own(self.folder, id(self))
                    weakref.finalize(self, self.owner.release, id(self))
                    remove_left(self.folder, self.owner, _number())
                self.owner.busy.add(name)
                (self.folder / name).mkdir()
            except Exception as failed:
                error = RunError(f"the checkpoint could not be {what}: {self._cause(failed)}")
                self._failed(self.folder / name)
        if self.group is not None:
            name = share(self.group, name, error)
        elif error is not None:
            raise error
        unnamed = self.folder / name
        with self._on_all(what):
            unnamed.mkdir(exist_ok=True)  # which another machine may not see yet
        return unnamed

    def _planned(self, shards: ShardsToWrite, what: str) -> SavePlan:
        """Return this rank's part of what all write."""
        if self.group is None:
            with self._on_all(what):
                return shards.plan_all([shards.plan])[0]
        plans: list[Any] | None = [None] * len(self.ranks) if self.rank == 0 else None
        merged: list[Any] | None = None
        with self._on_all(what):
            dist.gather_object(shards.plan, plans, dst=self.ranks[0], group=self.group)
            if plans is not None:
                merged = shards.plan_all(plans)
        mine: list[Any] = [None]
        with self._on_all(what):
            dist.scatter_object_list(mine, merged, src=self.ranks[0], group=self.group)
        plan: SavePlan = mine[0]
        return plan

    def _failed(self, unnamed: Path) -> None:
        """Remove a save that failed, which might take the room of the next one."""
        if self.rank == 0 and self.owner is not None:
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

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": model_state(self.model)}
        if self.optimizer is not None and self.optimizer.state:  # else torch would make one by a step of its own
            state["optimizer"] = self._optimizer_state()
        return state

    def _of_rank(self) -> dict[str, Any]:
        """Return what is each rank's own."""
        state: dict[str, Any] = {"others": {name: value.state_dict() for name, value in self.others.items()}}
        if self.optimizer is not None:
            state["groups"] = [
                {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
                for group in self.optimizer.param_groups
            ]
        if self.random_state:
            state["random"] = generators()
        return state

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
        with self._together("Checkpoint.load"):
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
                if tries == MOST_TRIES or not (gone if self.alone else any_of(tuple(self.ranks), gone)):
                    raise
        return None

    def _load(self, step: int, source: Path, strict: bool) -> int:
        """Restore all from a save; where that fails, restore what was before."""
        what = f"loaded from {source}"
        with self._on_all(what):
            manifest = Manifest.read(source)
            manifest.check(source, self.rank, len(self.ranks))
        with self._on_all(what):
            metadata = read_metadata(source)
            mine = self.rank if manifest.ranks == len(self.ranks) else 0
            of_rank = torch.load(source / f"rank-{mine:05d}.pt", weights_only=True, map_location="cpu")
            there_are = [name for name in of_rank["others"] if name != SAMPLERS]
            if missing := sorted(set(self.others) - set(of_rank["others"]) - {SAMPLERS}):
                raise RunError(f"it has no {', '.join(missing)}; it has {', '.join(there_are) or 'none'}")
            before = StateBefore(self.model, self.optimizer, self.others)
        try:
            self._load_model(source, metadata, strict)
            if self.optimizer is not None:
                self._load_optimizer(source, metadata, strict, manifest, of_rank)
            with self._on_all(what):
                for name, value in self.others.items():
                    if name in of_rank["others"]:
                        value.load_state_dict(of_rank["others"][name])
                if self.random_state and "random" in of_rank:
                    set_generators(of_rank["random"])
                if isinstance(samplers := self.others.get(SAMPLERS), Samplers):
                    samplers.go_on_from_here()
        except BaseException as error:
            lost = before.put_back()
            if lost and isinstance(error, RunError):
                raise RunError(f"{error}{lost}") from error
            raise
        return step

    def _chosen(self, step: int | None) -> tuple[int, Path] | None:
        """Return the save that rank 0 sees, on all ranks."""
        error, text = None, ""
        if self.rank == 0:
            try:
                found = which(self.folder, step)
                text = json.dumps(None if found is None else [found[0], found[1].name])
            except RunError as wrong:
                error = wrong
            except OSError as wrong:
                error = RunError(f"{self.folder} cannot be read: {_cause(wrong)}")
        if self.group is not None:
            text = share(self.group, text, error)
        elif error is not None:
            raise error
        chosen = parse_json(text)
        return None if chosen is None else (chosen[0], self.folder / chosen[1])

    def _load_model(self, source: Path, metadata: Metadata, strict: bool) -> None:
        state = model_state(self.model)
        there, ours = _under("model.", shapes(metadata)), {n: v for n, v in state.items() if not n.endswith(EXTRA)}
        known = self._known_to_all(ours)
        if self.run is not None:  # a stage may know one name of a tied parameter
            known |= set(self.run.tied_names())
        with self._on_all(f"loaded from {source}"):
            missing = [name for name in ours if name not in there] if strict else []
            unexpected = [name for name in there if name not in known and not name.endswith(EXTRA)] if strict else []
            problem = _unlike("model", "tensors", ours, there, missing, unexpected)
            if problem:
                raise RunError(problem)
            self._read(source, metadata, "model", {name: value for name, value in state.items() if name in there})
            set_model_state(self.model, state)

    def _load_optimizer(
        self, source: Path, metadata: Metadata, strict: bool, manifest: Manifest, of_rank: dict[str, Any]
    ) -> None:
        assert self.optimizer is not None
        there = _under("optimizer.", shapes(metadata))
        if not there:
            with self._on_all(f"loaded from {source}"):
                self._load_groups(manifest, of_rank, strict)
            return
        with self._on_all(f"loaded from {source}"):
            state = self._optimizer_state()
            mine = tuple(f"state.{name.rpartition('.')[0]}." for name in _under("param_groups.", state))
            if any(name.startswith(mine) and name not in state for name in there):
                state = self._state_anew()
        known = self._known_to_all(state)
        with self._on_all(f"loaded from {source}"):
            never_stepped = self._never_stepped(there)
            without = tuple(f"state.{name}." for name in never_stepped)
            ours = {name: value for name, value in state.items() if not name.startswith(without)}
            missing = [name for name in ours if name not in there] if strict else []
            unexpected = [name for name in there if name.startswith("state.") and name not in known] if strict else []
            problem = _unlike("optimizer", "values", ours, there, missing, unexpected)
            if problem:
                raise RunError(problem)
            stored = {name: value for name, value in ours.items() if name in there}
            self._read(source, metadata, "optimizer", stored)
            if state:
                set_optimizer_state_dict(self.model, self.optimizer, {**state, **stored}, options=_FLAT)
            for param in never_stepped.values():  # torch has made them one, as of a step
                self.optimizer.state.pop(param, None)

    def _load_groups(self, manifest: Manifest, of_rank: dict[str, Any], strict: bool) -> None:
        """Restore an optimizer that has no state yet, or keeps none."""
        assert self.optimizer is not None
        if manifest.optimizer is False and strict:
            raise RunError(
                "it was saved without an optimizer, and this Checkpoint has one: load(strict=False) leaves the "
                "optimizer as it is"
            )
        if not manifest.optimizer or "groups" not in of_rank:
            return
        groups = of_rank["groups"]
        if len(groups) != len(self.optimizer.param_groups):
            raise RunError(
                f"it is of another optimizer: it has {len(groups)} groups of parameters, this one has "
                f"{len(self.optimizer.param_groups)}"
            )
        self.optimizer.state.clear()
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(values)

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state by names of parameters; empty for a stage of a pipeline that has none."""
        assert self.optimizer is not None
        if not self.model.state_dict():
            return {}
        state: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
        return state

    def _state_anew(self) -> dict[str, Any]:
        """Return the optimizer's state as a step makes it, for all parameters: a save has some that this lacks."""
        assert self.optimizer is not None
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        gradients = [param.grad for param in params]
        try:
            self.optimizer.state.clear()
            for param in params:
                param.grad = None
            return self._optimizer_state()
        finally:
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient

    def _read(self, source: Path, metadata: Metadata, kind: str, state: dict[str, Any]) -> None:
        """Read this rank's part of a state into its tensors; no rank waits for another one."""
        with warnings.catch_warnings(), _torchs_errors():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what is meant
            dcp.load({kind: state}, storage_reader=ShardReader(source, metadata), planner=PlainValues(), no_dist=True)

    def _known_to_all(self, names: Iterable[str]) -> set[str]:
        """Return the names of all ranks: a stage of a pipeline has some."""
        if self.group is None or self.run is None or self.run.leads is None:
            return set(names)
        return {name for text in from_all(self.group, json.dumps([*names])) for name in parse_json(text)}

    def _never_stepped(self, there: Mapping[str, Any]) -> dict[str, torch.nn.Parameter]:
        """Return the optimizer's parameters that had no state in a save.

        Those that never got a gradient have none, such as of a head that the model does not read.
        """
        assert self.optimizer is not None
        grouped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        in_groups = {key.rpartition(".")[0] for key in there if key.startswith("param_groups.")}
        with_state = {key.rpartition(".")[0] for key in there if key.startswith("state.")}
        return {
            name: param for name, param in self.model.named_parameters()
            if id(param) in grouped and f"param_groups.{name}" in in_groups and f"state.{name}" not in with_state
        }  # fmt: skip

    def _cause(self, error: BaseException) -> str:
        """Say why this rank could not save."""
        if not (isinstance(error, OSError) and error.errno in _NO_ROOM):
            return _cause(error)
        size, free = self.room
        kept = "" if self.keep is None else f" (keep={self.keep} saves stay while another one is written)"
        return (
            f"{error.strerror}: this rank's part has {size:,} bytes, and {free:,} were free there; make room, or save "
            f"elsewhere{kept}. What was saved before is as it was"
        )

    def _together(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Enclose what all ranks call: where only some do, and others go on, all of them hear it within seconds."""
        if self.run is not None:
            return self.run.all_call(what)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _on_all(self, what: str) -> Iterator[None]:
        """Raise a failure of one rank on all, as one error that says what could not be done."""

        def told(error: Exception) -> Exception:
            cause = self._cause if what.startswith("saved") else _cause
            return RunError(f"the checkpoint could not be {what}: {cause(error)}")

        if self.group is not None:
            with everywhere(self.group, told):
                yield
            return
        try:
            yield
        except Exception as error:
            raise told(error) from error


# --- helpers ---------------------------------------------------------------------------------------------------------


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


def _number() -> str:
    """Return a unique number for a folder that has no name yet."""
    global _saves
    _saves += 1
    return f"{os.getpid()}-{time.time_ns():x}-{_saves}"


def _under(prefix: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in names.items() if name.startswith(prefix)}


def _unlike(
    kind: str, things: str, ours: Mapping[str, Any], there: Mapping[str, tuple[int, ...] | None],
    missing: Sequence[str], unexpected: Sequence[str],
) -> str:  # fmt: skip
    """Say in what a save is of another model or optimizer than this one; empty if it is of this one."""
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(ours)} {things} are not among its {len(there)}: {first_few(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} of its {len(there)} {things} are not in this {kind}: "
                        f"{first_few(unexpected)}")  # fmt: skip
    for name, value in ours.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if name in there and shape != there[name] and shape is not None:
            had = "no tensor" if there[name] is None else f"of shape {there[name]}"
            problems.append(f"{name} is {had} in the save, and of shape {shape} here")
    if not problems:
        return ""
    more = "; load(strict=False) loads what both have" if missing or unexpected else ""
    return f"it is of another {kind}: {'; '.join(problems[:SHOWN])}{', ...' if len(problems) > SHOWN else ''}{more}"


@contextlib.contextmanager
def _torchs_errors() -> Iterator[None]:
    """Turn what torch raises around an error, which is no ``Exception``, into the error itself."""
    try:
        yield
    except CheckpointException as error:
        inner, *_ = next(iter(error.failures.values()))
        raise inner from error


def _cause(error: BaseException) -> str:
    """Say what went wrong."""
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


def _plain_bytes(state: dict[str, Any]) -> bytes:
    """Return the bytes of a file of a rank's own state.

    Raises:
        RunError: something in it could not be loaded, since that would run code of the file's.
    """

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
