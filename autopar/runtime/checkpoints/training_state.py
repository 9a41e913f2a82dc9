"""Tensors of a model and its optimizer by the model's names: as a save has them, and restored from one.

A save may have been made on other ranks, and of a stage of a pipeline each rank knows some names.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from autopar.errors import RunError, first_few
from autopar.runtime.checkpoints.checkpoint_ranks import CheckpointRanks
from autopar.runtime.checkpoints.state_before import model_state, set_model_state
from autopar.runtime.checkpoints.stored_shards import PlainValues, ShardReader, shapes
from autopar.runtime.variants.run import EXTRA

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
SHOWN = 6
"""Differences between a save and a model that a message shows."""


class TrainingState:
    """A model, and the optimizer of its parameters.

    Args:
        optimizer: None if that is not saved.
        ranks: those that hold the model.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, ranks: CheckpointRanks
    ) -> None:
        self.model, self.optimizer, self.ranks = model, optimizer, ranks

    def tensors(self) -> dict[str, Any]:
        """Return what is saved: each rank's part."""
        state: dict[str, Any] = {"model": model_state(self.model)}
        if self.optimizer is not None and self.optimizer.state:  # else torch would make one by a step of its own
            state["optimizer"] = self._optimizer_state()
        return state

    def load(
        self, source: Path, metadata: Metadata, strict: bool, had_optimizer: bool | None,
        groups: Sequence[Mapping[str, Any]] | None,
    ) -> None:  # fmt: skip
        """Restore model and optimizer from a save.

        Args:
            had_optimizer: it was saved with one; None if that is not known.
            groups: what the groups of parameters held beside these, for an optimizer without state.

        Raises:
            RunError: it is of another model or optimizer, or of no optimizer; on all ranks.
        """
        self._load_model(source, metadata, strict)
        if self.optimizer is None:
            return
        if _under("optimizer.", shapes(metadata)):
            self._load_optimizer(source, metadata, strict)
            return
        with self.ranks.on_all(f"loaded from {source}"):
            self._load_groups(strict, had_optimizer, groups)

    def _load_model(self, source: Path, metadata: Metadata, strict: bool) -> None:
        state = model_state(self.model)
        there, ours = _under("model.", shapes(metadata)), {n: v for n, v in state.items() if not n.endswith(EXTRA)}
        known = self.ranks.known_to_all(ours)
        if self.ranks.run is not None:  # a stage may know one name of a tied parameter
            known |= set(self.ranks.run.tied_names())
        with self.ranks.on_all(f"loaded from {source}"):
            missing = [name for name in ours if name not in there] if strict else []
            unexpected = [name for name in there if name not in known and not name.endswith(EXTRA)] if strict else []
            problem = _unlike("model", "tensors", ours, there, missing, unexpected)
            if problem:
                raise RunError(problem)
            self._read(source, metadata, "model", {name: value for name, value in state.items() if name in there})
            set_model_state(self.model, state)

    def _load_optimizer(self, source: Path, metadata: Metadata, strict: bool) -> None:
        assert self.optimizer is not None
        there = _under("optimizer.", shapes(metadata))
        with self.ranks.on_all(f"loaded from {source}"):
            state = self._optimizer_state()
            mine = tuple(f"state.{name.rpartition('.')[0]}." for name in _under("param_groups.", state))
            if any(name.startswith(mine) and name not in state for name in there):
                state = self._state_anew()
        known = self.ranks.known_to_all(state)
        with self.ranks.on_all(f"loaded from {source}"):
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

    def _load_groups(
        self, strict: bool, had_optimizer: bool | None, groups: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Restore an optimizer that has no state yet, or keeps none."""
        assert self.optimizer is not None
        if had_optimizer is False and strict:
            raise RunError(
                "it was saved without an optimizer, and this Checkpoint has one: load(strict=False) leaves the "
                "optimizer as it is"
            )
        if not had_optimizer or groups is None:
            return
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
