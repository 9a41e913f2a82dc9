"""The state dict of a parallel module: its tensors by the model's names, and where its random operators stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.as_module.submodules import Elements, place
from autopar.runtime.parameters.dtensor_fixes import note_state
from autopar.runtime.stages.seeds import Seeds

EXTRA = "_extra_state"
"""Under which torch keeps what is no tensor of the model; checkpoints know it."""


class SpreadState(Elements):
    """What a parallel module saves and loads."""

    _autopar_seeds: Seeds
    """Where the seeds of random operators come from."""

    def _autopar_draws(self) -> bool:
        """Whether the program has random operators."""
        raise NotImplementedError

    def _autopar_ranks(self) -> tuple[Any, int]:
        """The process group of all ranks that hold a part, and the first of them."""
        raise NotImplementedError

    def _autopar_tied_names(self) -> Mapping[str, str]:
        """``{name: first name}`` of tied parameters of which a rank may hold one name only."""
        return {}

    def _autopar_parameter_order(self) -> Sequence[str]:
        """The first names of the whole model's parameters, in its order."""
        return [name for name, _ in self.named_parameters()]

    def get_extra_state(self) -> torch.Tensor:
        """Where dropout stands: the state of torch's generator, uint8 [bytes]."""
        return self._autopar_seeds.state()

    def set_extra_state(self, state: Any) -> None:
        """Have dropout go on from there (:meth:`~autopar.runtime.stages.seeds.Seeds.go_on`)."""
        if isinstance(state, torch.Tensor):  # and nothing that stands for it
            self._autopar_seeds.go_on(state)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model; of a program with random operators also where these stand (``_extra_state``), so that a
        resumed run draws what an uninterrupted one would. A rank that was seeded otherwise than the first one, by which
        all draw, does not have it. ``full_state_dict`` has only what the model has.
        """
        state = super().state_dict(*args, **kwargs)
        if not self._autopar_draws() or not self._autopar_seeds.alike:
            state.pop(kwargs.get("prefix", args[1] if len(args) > 1 else "") + EXTRA, None)
        of_stage = getattr(self, "_autopar_leads", None) is not None
        for name, value in state.items():
            if isinstance(value, DTensor) and not isinstance(value, torch.nn.Parameter):
                note_state(value, name, of_stage)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module; a whole tensor, or a DTensor in another placement, is placed as what it replaces.

        Raises:
            RunError: with ``assign``, a tensor of another dtype: the program was made for the one that there is.
        """
        if not isinstance(state_dict, Mapping):
            raise RunError(f"load_state_dict: expected a dict of tensors by name, got {type(state_dict).__name__}")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        state_dict.setdefault(prefix + EXTRA, self.get_extra_state())  # of a model's own state dict
        place(self, state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


__all__ = ["EXTRA", "SpreadState"]
