"""``Accelerator``: accelerate's, whose models are parallel modules.

>>> accelerator = Accelerator()                          # from autopar.integrations
>>> model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import convert_outputs_to_fp32

from autopar.errors import AutoparError
from autopar.integrations.first_call import ParallelOnFirstCall
from autopar.integrations.one_process import as_one_process
from autopar.runtime.checkpoints.full_state_dict import full_state_dict
from autopar.runtime.checkpoints.generator_states import generators, set_generators
from autopar.runtime.checkpoints.saving import save
from autopar.words.trees import PyTree

STATE = "autopar_state.pt"
"""The file of :meth:`Accelerator.save_state`."""


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator on several ranks; models are parallelized at their first call in training.

    The other arguments are accelerate's.

    Args:
        parallel: options of :func:`autopar.parallelize` for every model, such as ``{"constraints": ...}``; ``mesh`` is
            the number of ranks by default.
    """

    def __init__(self, *args: PyTree, parallel: Mapping[str, Any] | None = None, **kwargs: PyTree) -> None:
        as_one_process(cpu=bool(kwargs.get("cpu")))
        self._parallel = dict(parallel or {})
        super().__init__(*args, **kwargs)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,  # noqa: ARG002
    ) -> torch.nn.Module:
        """Return a model that is parallelized when it is first called in training."""
        if isinstance(model, ParallelOnFirstCall):
            if model not in self._models:
                self._models.append(model)
            return model
        if device_placement if device_placement is not None else self.device_placement:
            model = model.to(self.device)
        prepared = ParallelOnFirstCall(
            model, lambda: [optimizer.optimizer for optimizer in self._optimizers], self._parallel, self._around
        )
        prepared.train(model.training)
        if self.native_amp:
            prepared.forward = convert_outputs_to_fp32(prepared.forward)  # type: ignore[method-assign]
        self._models.append(prepared)
        return prepared

    def _around(self) -> contextlib.AbstractContextManager[Any]:
        return self.autocast() if self.native_amp else contextlib.nullcontext()

    def unwrap_model(self, model: torch.nn.Module, *args: PyTree, **kwargs: PyTree) -> torch.nn.Module:
        """Return a model that was prepared here unchanged: it has the attributes and methods of the model."""
        return model if isinstance(model, ParallelOnFirstCall) else super().unwrap_model(model, *args, **kwargs)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:  # noqa: ARG002
        """Return whole tensors by the model's names, on every rank; all ranks call it."""
        if isinstance(model, ParallelOnFirstCall) and model.is_parallel:
            return full_state_dict(model.now, all_ranks=True)  # type: ignore[arg-type]
        return model.state_dict()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object as accelerate does, on the first rank; all ranks call it if it has sharded tensors."""
        if safe_serialization:
            super().save(obj, f, safe_serialization=True)
        else:
            save(obj, f)

    def save_state(self, output_dir: str | None = None, *_: object, **__: object) -> str:
        """Save models, optimizers, schedulers, registered objects and random states in one file.

        Any number of ranks can load it. All ranks call it.

        Raises:
            AutoparError: no folder is given.
        """
        if output_dir is None:
            raise AutoparError("save_state: pass the folder; names that count up are not kept here")
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save(
            {
                "models": [model.state_dict() for model in self._models],
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                "others": [x.state_dict() for x in (*self._schedulers, *self._custom_objects)],
                "random": generators(),
            },
            folder / STATE,
        )
        return str(folder)

    def load_state(self, input_dir: str | None = None, *_: object, **__: object) -> None:
        """Load the file of :meth:`save_state`, before the first call or later; all ranks call it.

        Raises:
            AutoparError: no folder is given.
        """
        if input_dir is None:
            raise AutoparError("load_state: pass the folder")
        there = torch.load(Path(input_dir) / STATE, map_location="cpu", weights_only=False)
        for model, state in zip(self._models, there["models"], strict=True):
            model.load_state_dict(state)
        for optimizer, state in zip(self._optimizers, there["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for x, state in zip((*self._schedulers, *self._custom_objects), there["others"], strict=True):
            x.load_state_dict(state)
        set_generators(there["random"])
