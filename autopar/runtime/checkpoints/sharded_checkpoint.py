"""A run on disk: model, optimizer and whatever else a script goes on with, whole at any moment.

A save is a new folder, ``step-00000200`` in the checkpoint's own, that gets its name when everything is in it and on
the disk. So whatever ends a run, and whenever, the last whole save loads. Tensors are written by
``torch.distributed.checkpoint``, each rank its own pieces, by the model's names: they load on another mesh, under
another plan, in a pipeline, or into the plain model in one process. What is each rank's own (states of random number
generators, positions in the data) is a file for each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from autopar.errors import RunError, first_few
from autopar.runtime.as_module.parallel_module import SpreadModule
from autopar.runtime.as_module.parallel_state_dict import EXTRA
from autopar.runtime.batches.own_rows import samplers_of
from autopar.runtime.checkpoints.durable_files import on_disk, sync_folder
from autopar.runtime.checkpoints.generator_states import generators, set_generators
from autopar.runtime.ranks.agent_messages import SAVED, tell_agent
from autopar.runtime.ranks.agree import everywhere, share
from autopar.runtime.ranks.groups import group_of_members
from autopar.runtime.ranks.store_meeting import looks, said_by
from autopar.torch_private import default_store, default_timeout_seconds
from hardware_profiles.strict import parse_json, read_text

FORMAT = 1
"""Version of ``checkpoint.json``."""
STEP = re.compile(r"step-(\d{8,})")
UNFINISHED = re.compile(r"\.(step|removed)-.*")
MANIFEST = "checkpoint.json"
SAMPLERS = "samplers of the module"
"""Under which the positions of ``pm.sampler(dataset)`` and ``pm.shard(loader)`` are saved."""
KEPT = 3
"""Saves of a folder that are kept by default."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
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
        optimizer: of the model's parameters; saved by their names.
        keep: how many saves stay, the newest; None for all.
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
        if isinstance(model, SpreadModule):
            others = {SAMPLERS: samplers_of(model), **others}
        self.folder, self.model, self.optimizer, self.others = Path(folder), model, optimizer, others
        self.keep, self.random_state = keep, random_state
        self.ranks = _ranks_of(model)
        self.alone = len(self.ranks) == 1
        if not self.alone:
            said_by(tuple(self.ranks), None)  # a rank that is alone here hears it, and does not wait in new_group
        self.group = None if self.alone else group_of_members(self.ranks, "gloo")
        self.rank = 0 if self.alone else self.ranks.index(dist.get_rank())
        self.pending: _Pending | None = None
        with self._on_all("made"):
            self.folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            self._tidy()

    # -- saving

    def save(self, step: int, *, wait: bool = True) -> Path:
        """Save what the run has after ``step`` steps.

        Args:
            step: a number from 0 on; an earlier save of that number is replaced.
            wait: return when it is on the disk. Else values are copied, and written while the run goes on; the next
                call of any method, or :meth:`wait`, ends that first and raises what went wrong.

        Returns:
            The folder of the save, which is there when the save is whole.

        Raises:
            RunError: it could not be written, on all ranks; what was saved before is as it was.
        """
        if not isinstance(step, int) or step < 0:
            raise RunError(f"Checkpoint.save: step is {step!r}; give the number of steps done, from 0 on")
        self.wait()
        target = self.folder / f"step-{step:08d}"
        unfinished = self.folder / f".step-{step:08d}-{_number()}"
        if self.group is not None:
            unfinished = self.folder / share(self.group, unfinished.name, None)
        with self._on_all(f"saved to {target}"):
            unfinished.mkdir(exist_ok=True)
            with on_disk(unfinished / f"rank-{self.rank:05d}.pt") as file:
                torch.save(self._of_rank(), file)
        state = self._state()
        if wait:
            with self._on_all(f"saved to {target}"):
                dcp.save(state, checkpoint_id=unfinished, process_group=self.group, no_dist=self.alone)
            with self._on_all(f"saved to {target}"):
                if self.rank == 0:
                    self._name(unfinished, target, step)
            tell_agent(SAVED, str(step))
        else:
            with self._on_all(f"saved to {target}"):
                writing: Any = dcp.async_save(
                    state, checkpoint_id=unfinished, process_group=self.group, no_dist=self.alone
                )
            self.pending = _Pending(self, writing, unfinished, target, step)
        return target

    def wait(self) -> None:
        """End a save that is still being written.

        Raises:
            RunError: it could not be written.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            with self._on_all(f"saved to {pending.target}"):
                pending.join()
            tell_agent(SAVED, str(pending.step))

    def _name(self, unfinished: Path, target: Path, step: int) -> None:
        """Everything is written on all ranks: rank 0 gives the save its name."""
        manifest = {"format": FORMAT, "step": step, "ranks": len(self.ranks), "others": sorted(self.others)}
        with on_disk(unfinished / MANIFEST) as file:
            file.write(json.dumps(manifest).encode())
        sync_folder(unfinished)
        if target.exists():
            target.rename(self.folder / f".removed-{target.name}-{_number()}")
        unfinished.rename(target)
        sync_folder(self.folder)
        self._tidy()

    def _tidy(self) -> None:
        """Remove what broken saves left, and the oldest whole ones."""
        for entry in self.folder.iterdir():
            if UNFINISHED.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        for step in self.steps()[: -self.keep] if self.keep is not None else []:
            old = self.folder / f"step-{step:08d}"
            gone = self.folder / f".removed-{old.name}-{_number()}"
            with contextlib.suppress(OSError):
                old.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": get_model_state_dict(self.model, options=_FLAT)}
        if self.optimizer is not None and self.optimizer.state:  # else torch would make one by a step of its own
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
        return state

    def _of_rank(self) -> dict[str, Any]:
        state: dict[str, Any] = {"others": {name: value.state_dict() for name, value in self.others.items()}}
        if self.random_state:
            state["random"] = generators()
        return state

    # -- loading

    def steps(self) -> list[int]:
        """The numbers of the whole saves, the newest last."""
        if not self.folder.is_dir():
            return []
        named = [(STEP.fullmatch(entry.name), entry) for entry in self.folder.iterdir()]
        return sorted(int(match[1]) for match, entry in named if match and (entry / MANIFEST).is_file())

    def load(self, step: int | None = None) -> int | None:
        """Have model, optimizer and all else be as in a save; on any number of ranks.

        On another number of ranks than saved it, what each rank saved of its own is taken from the first.

        Args:
            step: of which save; by default the newest.

        Returns:
            Its number; None if the folder has none.

        Raises:
            RunError: there is no such save, or it is of another model.
        """
        self.wait()
        chosen = self._chosen(step)
        if chosen is None:
            return None
        source = self.folder / f"step-{chosen:08d}"
        with self._on_all(f"loaded from {source}"):
            manifest = parse_json(read_text(source / MANIFEST))
            if manifest.get("format") != FORMAT:
                raise RunError(f"it is of format {manifest.get('format')}, this autopar reads {FORMAT}")
            there = set(dcp.FileSystemReader(source).read_metadata().state_dict_metadata)
        self._load_model(source, there)
        if self.optimizer is not None and any(key.startswith("optimizer.") for key in there):
            self._load_optimizer(source, there)
        with self._on_all(f"loaded from {source}"):
            mine = self.rank if manifest["ranks"] == len(self.ranks) else 0
            own_file = source / f"rank-{mine:05d}.pt"
            of_rank = torch.load(own_file, weights_only=True, map_location="cpu")
            missing = sorted(set(self.others) - set(of_rank["others"]) - {SAMPLERS})
            if missing:
                there_are = [name for name in of_rank["others"] if name != SAMPLERS]
                raise RunError(f"it has no {', '.join(missing)}; it has {', '.join(there_are) or 'none'}")
            for name, value in self.others.items():
                if name in of_rank["others"]:
                    value.load_state_dict(of_rank["others"][name])
            if self.random_state and "random" in of_rank:
                set_generators(of_rank["random"])
        return chosen

    def _chosen(self, step: int | None) -> int | None:
        """The save that rank 0 sees, on all ranks."""
        error, text = None, ""
        if self.rank == 0:
            steps = self.steps()
            if step is not None and step not in steps:
                error = RunError(f"{self.folder} has no save of step {step}; it has {first_few(list(map(str, steps)))}")
            text = json.dumps(step if step is not None else steps[-1] if steps else None)
        if self.group is not None:
            text = share(self.group, text, error)
        elif error is not None:
            raise error
        chosen: int | None = parse_json(text)
        return chosen

    def _load_model(self, source: Path, there: set[str]) -> None:
        state = get_model_state_dict(self.model, options=_FLAT)
        with self._on_all(f"loaded from {source}"):
            missing = [name for name in state if f"model.{name}" not in there and not name.endswith(EXTRA)]
            if missing:
                have = len([key for key in there if key.startswith("model.")])
                raise RunError(
                    f"it is of another model: {len(missing)} of {len(state)} tensors are not among its {have}: "
                    f"{first_few(missing)}"
                )
            state = {name: value for name, value in state.items() if f"model.{name}" in there}
            dcp.load({"model": state}, checkpoint_id=source, process_group=self.group, no_dist=self.alone)
            set_model_state_dict(self.model, state, options=StateDictOptions(strict=False))

    def _load_optimizer(self, source: Path, there: set[str]) -> None:
        assert self.optimizer is not None
        state = get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
        with self._on_all(f"loaded from {source}"):
            never_stepped = self._never_stepped(there)
            without = tuple(f"state.{name}." for name in never_stepped)
            stored = {name: value for name, value in state.items() if not name.startswith(without)}
            missing = [name for name in stored if f"optimizer.{name}" not in there]
            if missing:
                raise RunError(f"it is of another optimizer: it has no {first_few(missing)}")
            dcp.load({"optimizer": stored}, checkpoint_id=source, process_group=self.group, no_dist=self.alone)
            set_optimizer_state_dict(self.model, self.optimizer, {**state, **stored}, options=_FLAT)
            for param in never_stepped.values():  # torch has made them one, as of a step
                self.optimizer.state.pop(param, None)

    def _never_stepped(self, there: set[str]) -> dict[str, torch.nn.Parameter]:
        """The optimizer's parameters that had no state in a save, as those have none that got no gradient so far: of a
        head that the model does not read, say."""
        assert self.optimizer is not None
        grouped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        in_groups = {key.rpartition(".")[0] for key in there if key.startswith("optimizer.param_groups.")}
        with_state = {key.rpartition(".")[0] for key in there if key.startswith("optimizer.state.")}
        return {
            name: param for name, param in self.model.named_parameters()
            if id(param) in grouped and f"optimizer.param_groups.{name}" in in_groups
            and f"optimizer.state.{name}" not in with_state
        }  # fmt: skip

    @contextlib.contextmanager
    def _on_all(self, what: str) -> Iterator[None]:
        """What fails here on one rank is raised on all, as one error that says what could not be done."""

        def told(error: Exception) -> Exception:
            return RunError(f"the checkpoint could not be {what}: {_cause(error)}")

        if self.group is not None:
            with everywhere(self.group, told):
                yield
            return
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
                yield
        except Exception as error:
            raise told(error) from error


class _Pending:
    """A save that is being written while the run goes on; a thread of rank 0 names it when all have written."""

    def __init__(self, checkpoint: Checkpoint, writing: Any, unfinished: Path, target: Path, step: int) -> None:
        self.checkpoint, self.writing, self.target, self.step = checkpoint, writing, target, step
        self.name = lambda: checkpoint._name(unfinished, target, step)
        self.error: Exception | None = None
        self.store = None
        if not checkpoint.alone:
            self.store = dist.PrefixStore(f"autopar/checkpoint/{unfinished.name}", default_store())
        self.thread = threading.Thread(target=self._end)
        self.thread.start()

    def _end(self) -> None:
        try:
            self.writing.result()
            if self.store is not None:
                self.store.add("written", 1)
                if self.checkpoint.rank == 0:
                    self._wait_for_all(self.store)
            if self.checkpoint.rank == 0:
                self.name()
        except Exception as error:
            self.error = error
            if self.store is not None:
                with contextlib.suppress(dist.DistError, RuntimeError):
                    self.store.set("failed", str(self.checkpoint.rank))

    def _wait_for_all(self, store: Any) -> None:
        end = time.monotonic() + default_timeout_seconds()
        for _ in looks():
            if store.add("written", 0) >= len(self.checkpoint.ranks):
                return
            if store.check(["failed"]):
                raise RunError(f"rank {store.get('failed').decode()} could not write its part")
            if time.monotonic() > end:
                raise RunError("not all ranks have written their parts in time")

    def join(self) -> None:
        """Wait until this rank has done its part; on rank 0 the save has its name then.

        Raises:
            Exception: what went wrong here.
        """
        self.thread.join()
        if self.error is not None:
            raise self.error


# --- helpers ---------------------------------------------------------------------------------------------------------


def _ranks_of(model: torch.nn.Module) -> list[int]:
    """The ranks that hold a part of a module; one for a plain one in a process without a group."""
    if isinstance(model, SpreadModule):
        return list(dist.get_process_group_ranks(model._autopar_ranks()[0]))
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RunError(
            f"Checkpoint: {dist.get_world_size()} ranks run, and the model is a plain {type(model).__name__}: give the "
            "parallel module, or save and load the plain one in one process"
        )
    return [0]


def _number() -> str:
    """Of a folder that has no name yet: no other one has it."""
    global _saves
    _saves += 1
    return f"{os.getpid()}-{time.time_ns():x}-{_saves}"


def _cause(error: BaseException) -> str:
    """What went wrong, of the errors that the ranks of a collective save or load report together."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, *_) = next(iter(failures.items()))
        return f"on rank {rank}: {type(inner).__name__}: {inner}"
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


__all__ = ["Checkpoint"]
