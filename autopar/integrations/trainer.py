"""``Trainer``: that of transformers, whose model is a parallel module.

>>> from autopar.integrations import Trainer             # in place of: from transformers import Trainer
>>> Trainer(model=model, args=args, train_dataset=rows).train()

The trainer sees one process, so ``per_device_train_batch_size`` is that of the whole batch. Checkpoints are those of a
run on one device: either kind of run resumes the other's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState

from autopar.integrations.accelerator import Accelerator
from autopar.integrations.first_call import ParallelOnFirstCall
from autopar.integrations.one_process import tell_ranks, without_launcher
from autopar.runtime.checkpoints.full_state_dict import full_state_dict
from autopar.runtime.checkpoints.saving import save
from autopar.runtime.variants.run import run_of
from autopar.words.trees import PyTree

_DEVICES = "_setup_devices"


class Trainer(transformers.Trainer):
    """transformers' Trainer on several ranks.

    The other arguments are those of ``transformers.Trainer``. The model that is passed becomes the parallel module at
    the first step of ``train()``.

    Args:
        parallel: options of :func:`autopar.parallelize`, such as ``{"constraints": ...}``; ``mesh`` is the number of
            ranks by default.
    """

    optimizer: Any
    lr_scheduler: Any

    _given: Any = None
    """The model that was passed."""
    _shows_prepared: bool | None = None
    _handler: Any
    """What calls the callbacks, once it is there."""

    def __init__(self, *args: PyTree, parallel: Mapping[str, Any] | None = None, **kwargs: PyTree) -> None:
        self._parallel = dict(parallel or {})
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        if arguments is None:
            arguments = kwargs["args"] = transformers.TrainingArguments("tmp_trainer")
        arguments_of_one_process(arguments)
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make transformers' accelerator with models that are parallelized at their first call."""

        def make(**kwargs: PyTree) -> Accelerator:
            return Accelerator(parallel=self._parallel, **kwargs)

        with mock.patch("transformers.trainer.Accelerator", make):
            super().create_accelerator_and_postprocess()

    # -- the parallel module

    @property
    def _prepared(self) -> ParallelOnFirstCall | None:
        """The parallel module, once it exists."""
        wrapped = getattr(self, "model_wrapped", None)
        return wrapped if isinstance(wrapped, ParallelOnFirstCall) and wrapped.is_parallel else None

    @property
    def model(self) -> Any:
        """The parallel module during training, for callbacks and overridden methods; otherwise the passed model."""
        shows = self._shows_prepared if self._shows_prepared is not None else getattr(self, "is_in_train", False)
        prepared = self._prepared if shows else None
        return self._given if prepared is None else prepared

    @model.setter
    def model(self, model: Any) -> None:
        if model is not self._prepared:
            self._given = model

    @property
    def callback_handler(self) -> Any:
        """The handler of callbacks, which are given the current model."""
        self._handler.model = self.model
        return self._handler

    @callback_handler.setter
    def callback_handler(self, handler: Any) -> None:
        self._handler = handler

    @contextlib.contextmanager
    def _showing(self, prepared: bool) -> Iterator[None]:
        """Make ``self.model`` the parallel module, or the passed model, in this scope."""
        before, self._shows_prepared = self._shows_prepared, prepared
        try:
            yield
        finally:
            self._shows_prepared = before

    def evaluation_loop(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Evaluate the model; see ``transformers.Trainer.evaluation_loop``."""
        with self._showing(prepared=True):
            return super().evaluation_loop(*args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Count operations as transformers does, on the passed model: nothing is gathered for it."""
        with self._showing(prepared=False):
            return int(super().floating_point_ops(inputs))

    def _load_best_model(self) -> None:
        prepared = self._prepared
        state = full_state_dict(prepared.now, all_ranks=True) if prepared is not None else None  # type: ignore[arg-type]
        with self._showing(prepared=False), self._as_written(state):
            super()._load_best_model()  # in place, in addition to what is there: adapters alone, or all
            best = {name: value.detach().clone() for name, value in self._given.state_dict().items()}
        if prepared is not None:
            prepared.load_state_dict(best)

    # -- files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model with ``save_pretrained`` on the first rank; all ranks call it."""
        prepared = self._prepared
        state = full_state_dict(prepared.now) if prepared is not None else None  # type: ignore[arg-type]
        if self.args.should_save:
            with self._showing(prepared=False), self._as_written(state):
                self._save(output_dir or self.args.output_dir, state_dict=state)
        _wait()

    def create_model_card(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Write the model's card on the first rank; see ``transformers.Trainer.create_model_card``."""
        with self._showing(prepared=False), self._as_written(None):
            super().create_model_card(*args, **kwargs)

    def _as_written(self, state: Mapping[str, torch.Tensor] | None) -> contextlib.AbstractContextManager[Any]:
        """Make the passed model, in this scope, what its user wrote: its methods run on this rank alone."""
        if self._prepared is None:
            return contextlib.nullcontext()
        return run_of(self._prepared.now).user.as_written(state, captures=False)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        save(self.optimizer.state_dict(), folder / "optimizer.pt")
        save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)
        _wait()


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def arguments_of_one_process(arguments: Any) -> None:
    """Make training arguments, which may have read torchrun's variables already, describe one process."""
    if arguments.distributed_state is not None and arguments.distributed_state.num_processes > 1:
        AcceleratorState._reset_state(reset_partial_state=True)
    arguments.__dict__.pop(_DEVICES, None)
    unasked = mock.patch("transformers.training_args._is_torch_distributed_initialized", lambda: False)
    with without_launcher(), unasked:  # which warns that this is not DistributedDataParallel
        device = getattr(arguments, _DEVICES)
    tell_ranks(arguments.distributed_state)
    if device.type == "cuda":
        arguments.__dict__[_DEVICES] = arguments.distributed_state.device
        arguments._n_gpu = 1
