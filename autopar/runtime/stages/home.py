"""The module whose stored parameters and buffers a rank's stages read, and what all of its stages share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.runtime.parameters.state import whole_of
from autopar.runtime.parameters.user_module import UserModule
from autopar.runtime.ranks.failures import Failures
from autopar.runtime.stages.seeds import Seeds


class Home:
    """Where the parameters and buffers of stages are registered.

    Attributes:
        module, kind: the user's, and its class.
        user: the module as its user wrote it.
        device: this rank's.
        seeds: of random operators.
        failures: those of its steps, on the ranks that run it together; None on one device.
        leads: for a pipeline, whether this rank is the first of its group; None if every rank has a part of all.
        gradient_dtype: in which gradients are added up over ranks; None for their own.
        layouts_change: buckets of calls store parameters each in its own way.
        layout: how often they were moved from one way to another.
        inference: the model runs forward alone.
        written: buffers that a program of this rank writes.
    """

    device: torch.device
    seeds: Seeds
    failures: Failures | None = None
    leads: bool | None = None
    gradient_dtype: torch.dtype | None = None
    layouts_change = False
    layout = 0
    inference = False

    def __init__(self, model: torch.nn.Module) -> None:
        self.module, self.kind = model, type(model)
        self.signature = inspect.signature(model.forward)
        self.user = UserModule(model)
        self.written: set[str] = set()

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield what this rank stores, by name."""
        return self.module.named_parameters(remove_duplicate=remove_duplicate)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield what this rank stores."""
        return self.module.parameters()

    def registered(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by all their names."""
        return {**dict(self.module.named_parameters(remove_duplicate=False)),
                **dict(self.module.named_buffers(remove_duplicate=False))}  # fmt: skip

    def in_state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the model's state dict."""
        named = self.registered()
        return {name: named[name] for name in self.module.state_dict() if name in named}

    def owner_of(self, name: str) -> tuple[torch.nn.Module, str]:
        """Return the module and the key under which a parameter or buffer is registered."""
        return self.user.owner_of(name)

    # -- of all ranks

    def ranks(self) -> tuple[Any, int]:
        """Return the process group of all ranks that hold a part, and the first of them."""
        raise NotImplementedError

    def rank_numbers(self) -> list[int]:
        """Return the ranks that hold a part of the model."""
        return list(range(dist.get_world_size()))

    def tied_names(self) -> Mapping[str, str]:
        """Return ``{name: first name}`` of tied parameters of which a rank may hold one name only."""
        return {}

    def parameter_order(self) -> Sequence[str]:
        """Return the first names of the whole model's parameters, in its order."""
        return list(dict.fromkeys(self.user.names.values()))

    def whole_values(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers, whole, on this rank's device, where all ranks call it.

        Tied ones are one tensor.
        """
        values: dict[str, torch.Tensor] = {}
        same: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor in self.registered().items():
                if id(tensor) not in same:
                    whole = whole_of(tensor.detach())
                    same[id(tensor)] = whole if isinstance(tensor, DTensor) else whole.clone()
                values[name] = same[id(tensor)]
        return values

    def full_state(self, all_ranks: bool) -> dict[str, torch.Tensor] | None:
        """Return the state dict of the model on one device, on the CPU of the first rank; None on others.

        Args:
            all_ranks: give it to every rank.
        """
        keep = all_ranks or dist.get_rank() == self.ranks()[1]
        seen: dict[int, torch.Tensor] = {}
        state: dict[str, torch.Tensor] = {}
        for name, value in self.in_state_dict().items():
            if id(value) not in seen:
                whole = whole_of(value.detach())
                seen[id(value)] = whole.to("cpu", copy=True) if keep else whole.new_empty(0)
            state[name] = seen[id(value)]
        return state if keep else None
