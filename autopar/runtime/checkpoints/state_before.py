"""The state of a run before a load, restored if the load fails."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from autopar.runtime.checkpoints.generator_states import generators, set_generators


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return a module's tensors by their names; none of a stage that has none, which torch refuses."""
    return get_model_state_dict(model) if model.state_dict() else {}


def set_model_state(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Restore what :func:`model_state` returned, or a part of it."""
    if state:
        set_model_state_dict(model, state, options=StateDictOptions(strict=False))


class StateBefore:
    """Copies of what model, optimizer, generators and all else hold, on the CPU."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: Mapping[str, Any]
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.state = model_state(model)
        self.tensors = [_copied(value) for value in self.state.values() if isinstance(value, torch.Tensor)]
        self.of_params: dict[Any, dict[str, Any]] = {}
        self.groups: list[dict[str, Any]] = []
        if optimizer is not None:
            self.of_params = {param: dict(values) for param, values in optimizer.state.items()}
            for values in self.of_params.values():
                self.tensors += [_copied(value) for value in values.values() if isinstance(value, torch.Tensor)]
            self.groups = [dict(group) for group in optimizer.param_groups]
        self.others = {name: (value, copy.deepcopy(value.state_dict())) for name, value in others.items()}
        self.generators = generators()

    @torch.no_grad()
    def put_back(self) -> str:
        """Restore model, optimizer, generators and all else as they were.

        Returns:
            What of them could not take back its own state, in words; else empty.
        """
        for tensor, before in self.tensors:
            tensor.copy_(before)
        set_model_state(self.model, self.state)
        if self.optimizer is not None:
            self.optimizer.state.clear()
            self.optimizer.state.update(self.of_params)
            for group, before in zip(self.optimizer.param_groups, self.groups, strict=True):
                group.clear()
                group.update(before)
        lost = []
        for name, (value, before) in self.others.items():
            try:
                value.load_state_dict(before)
            except Exception as error:
                lost.append(f"; and {name}, given back the state that it had, raises {type(error).__name__}: {error}")
        set_generators(self.generators)
        return "".join(lost)


def _copied(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a tensor, and a copy of it."""
    value = value.detach()
    local = value.to_local() if isinstance(value, DTensor) else value
    return local, local.to("cpu", copy=True)
